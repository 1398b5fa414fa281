"""Personal models: rounds of Ditto, FedPer, APFL, pFedMe, Per-FedAvg and IFCA beside rounds of FedAvg.

A hundred of 1,000 clients in each round train an MLP 64-128-10 on the digits, five local steps of ten rows. All
programs are compiled loops of ten rounds over the same population, timed in turns in one process. Own models are in
memory.
"""

from __future__ import annotations

import jax
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program
from fedjax_sim import algorithms, models, population, sampling

PLAIN = "FedAvg"
MADE = {
    PLAIN: (algorithms.fedavg, {}),
    "Ditto": (algorithms.ditto, {}),
    "FedPer": (algorithms.fedper, {}),
    "APFL": (algorithms.apfl, {}),
    "pFedMe": (algorithms.pfedme, {}),
    "Per-FedAvg": (algorithms.per_fedavg, {}),
    "IFCA, 4 clusters": (algorithms.ifca, {"num_clusters": 4}),
}
GOAL = 2.1  # Ditto trains two models


def measure(quick: bool = False) -> dict:
    """Clients a second of each algorithm, and the time of its rounds against FedAvg's."""
    num_clients, cohort_size, num_rounds = (20, 4, 2) if quick else (1000, 100, 10)
    data = population.digits(num_clients=num_clients, held_out_clients=0)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(128,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params, _ = model.init(jax.random.key(3))
    programs = {}
    for name, (make, options) in MADE.items():
        sampler = sampling.uniform(num_clients, cohort_size)
        made = make(loss_fn, sampler, optax.sgd(0.1), num_steps=5, batch_size=10, **options)
        programs[name] = rounds_program(made, params, data.train, num_rounds)
    timings = harness.interleaved(programs, repeats=3 if quick else 9)
    trained = num_rounds * cohort_size
    rows = [harness.row(name, timing, "clients/s", per=trained, ours=True) for name, timing in timings.items()]
    plain = timings[PLAIN].median
    ratios = [
        harness.ratio(
            f"time of {name} against {PLAIN}", timing.median / plain, at_most=GOAL if name == "Ditto" else None
        )
        for name, timing in timings.items()
        if name != PLAIN
    ]
    goal = f"A round of Ditto, which trains two models, takes at most {GOAL} times that of FedAvg."
    return harness.result("P26", "personal models", goal=goal, rows=rows, ratios=ratios)

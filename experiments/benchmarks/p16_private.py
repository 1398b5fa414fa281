"""DP-SGD in clients: ghost norms against per-example gradients.

Whole rounds of `client.private_sgd` (noise multiplier 1, batches drawn without replacement, so that every round has
the same number of examples), in one compiled loop: the MLP of the main job (digits, 64-128-10, 5 steps of 10) and a
wider one (784-256-10, 5 steps of 20), and one client of the latter with batches of 64. The same clipped sums by ghost
norms, by `vmap(grad)` over the batch, and by `vmap(grad)` over one example at a time, which holds a single gradient;
beside them plain local SGD on as many examples, and for the one client its noise alone.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program, separable
from fedjax_sim import aggregation, algorithms, client, models, population, prng, sampling, server, tree

GHOST, HELD, SINGLE, PLAIN = "ghost norms", "vmap(grad)", "vmap(grad), one example at a time", "no privacy"
NOISE = "the noise alone"
WAYS = {GHOST: ("ghost", None), HELD: ("vmap", None), SINGLE: ("vmap", 1)}
CLIP, RATE, STEPS = 1.0, 0.1, 5


def clients(loss_fn, batch_size: int, rows: int) -> dict:
    """A client for each way."""
    how = {"num_steps": STEPS, "batch_size": batch_size}
    made = {
        name: client.private_sgd(
            loss_fn, CLIP, 1.0, RATE, **how, num_examples=rows, sampling="shuffled", gradients=gradients,
            microbatch_size=size,
        )
        for name, (gradients, size) in WAYS.items()
    }  # fmt: skip
    return made | {PLAIN: client.local_sgd(loss_fn, optax.sgd(RATE), client.work(weighting="uniform", **how))}


def wide(num_clients: int, rows: int):
    """A loss, parameters and a population for the MLP 784-256-10."""
    model = models.mlp(input_shape=(784,), num_outputs=10, hidden=(256,))
    x, y = separable(np.random.default_rng(7), num_clients * rows, (784,), 10)
    data = population.stored({"x": x, "y": y}, np.arange(0, len(x) + 1, rows))
    return models.supervised(model, models.softmax_cross_entropy), model.init(jax.random.key(3))[0], data


def rounds(loss_fn, params, data, *, cohort_size: int, batch_size: int, rows: int, num_rounds: int) -> dict:
    """Way -> () -> what its compiled rounds return."""
    made = {}
    for name, work in clients(loss_fn, batch_size, rows).items():
        sampler = sampling.uniform(data.size, cohort_size)
        aggregator = aggregation.fixed_mean(float(cohort_size))
        algorithm = algorithms.federated(sampler, work, aggregator, server.optimizer(optax.sgd(1.0)))
        made[name] = rounds_program(algorithm, params, data, num_rounds)
    return made


def alone(loss_fn, params, data, batch_size: int, rows: int) -> dict:
    """Way -> () -> one client's update."""
    own = data.client(jnp.int32(0))

    def program(work):
        apply = jax.jit(lambda key, params, own: work.apply(key, params, (), own)[0].update)
        return lambda: apply(jax.random.key(0), params, own)

    def noise(key):
        return [prng.normal(jax.random.fold_in(key, i), (tree.num_values(params),)) for i in range(STEPS)]

    drawn = jax.jit(noise)
    made = {name: program(work) for name, work in clients(loss_fn, batch_size, rows).items()}
    return made | {NOISE: lambda: drawn(jax.random.key(0))}


def measure(quick: bool = False) -> dict:
    """Seconds a round, or a client, each way."""
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import load

    digits, count = (40, 4) if quick else (200, 10)
    job = build(load(None, [f"data.num_clients={4 * digits}", f"sampler.cohort_size={digits}"]))
    most = int(jnp.max(jax.vmap(job.data.train.count)(jnp.arange(job.data.train.size, dtype=jnp.int32))))
    jobs = {
        f"digits MLP, round of {digits}": rounds(
            job.loss_fn, job.params, job.data.train, cohort_size=digits, batch_size=10, rows=most, num_rounds=1
        ),
        f"MLP 784-256-10, round of {count}": rounds(
            *wide(2 * count, 100), cohort_size=count, batch_size=20, rows=100, num_rounds=1
        ),
        "MLP 784-256-10, one client, batch 64": alone(*wide(1, 320), 64, 320),
    }
    rows, ratios = [], []
    for job_name, work in jobs.items():
        found = harness.interleaved(work, repeats=3 if quick else 15, budget_seconds=60)
        rows += [harness.row(f"{job_name}: {way}", t, ours=way in (GHOST, PLAIN)) for way, t in found.items()]

        def times(way, found=found):  # the median over neighbours in time, since the machine's speed drifts
            pairs = zip(found[way].seconds, found[GHOST].seconds, strict=True)
            return statistics.median(theirs / mine for theirs, mine in pairs)

        ratios.append(harness.ratio(f"{job_name}: vmap(grad) / ghost", times(HELD), at_least=2.0))
        ratios.append(harness.ratio(f"{job_name}: one example at a time / ghost", times(SINGLE)))
        ratios.append(harness.ratio(f"{job_name}: ghost / no privacy", 1 / times(PLAIN)))
        if NOISE in found:
            ratios.append(harness.ratio(f"{job_name}: noise / ghost", times(NOISE)))
    notes = ["A ratio is the median over interleaved repeats; all ways of a job run in turns, noise included."]
    goal = "ghost norms at least twice as fast as per-example gradients of whole batches."
    title = "DP-SGD in clients: ghost norms"
    return harness.result("P16", title, goal=goal, rows=rows, ratios=ratios, notes=notes)

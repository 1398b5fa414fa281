"""Unequal clients.

1,000 clients share 60,000 rows by lognormal sizes (sigma 1) or by a power law (density s^-2.5: infinite variance), MLP
60-128-10, one epoch in batches of 10, everybody in every round. Useful steps are the sum of ceil(n_i / 10). Perfect
packing is the time that the same number of useful steps takes when all clients are equal (60 rows each, 6 steps), in
the same process and in turns: no lane idles and no device waits. Executed steps are those that the vmapped lanes run,
idle ones included: from the run's own info where it has it, and otherwise as lanes that follow the order of sizes
would give them. Padding to the largest client, or to powers of two, is computed beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program, separable
from fedjax_sim import algorithms, models, population, sampling

BATCH, CLIENTS, ROWS = 10, 1000, 60
GOALS = {"lognormal": 0.95, "power law": 0.85}


def measure(quick: bool = False) -> dict:
    """Seconds a round for three laws of sizes, and steps."""
    clients = 60 if quick else CLIENTS
    laws = {
        "equal": population.iid(clients * ROWS, clients, seed=1),
        "lognormal": population.quantity_lognormal(clients * ROWS, clients, sigma=1.0, seed=1),
        "power law": population.quantity_power_law(clients * ROWS, clients, exponent=2.5, seed=1),
    }
    rounds = 1 if quick else 2
    jobs = {name: _job(partition, rounds) for name, partition in laws.items()}
    timings = harness.interleaved({name: job[0] for name, job in jobs.items()}, repeats=9, budget_seconds=60)
    cores = len(jax.devices())
    rows, ratios, notes = [], [], []
    useful = {name: _steps(partition.sizes) for name, partition in laws.items()}
    pace = timings["equal"].median / useful["equal"].sum()
    for name in laws:
        per = rounds * useful[name].sum()
        rows.append(harness.row(f"{name}: useful steps", timings[name], "steps/s", per=per, ours=True, cores=cores))
    for name, goal in GOALS.items():
        steps = useful[name]
        executed = {
            "padded to the largest": steps.max() * len(steps),
            "padded to powers of two": (2 ** np.ceil(np.log2(steps))).sum(),
            "lanes of 8 in order of size": _in_lanes(np.sort(steps)[::-1], 8),
            "lanes of 8 as drawn": _in_lanes(steps, 8),
        } | jobs[name][1]()
        for what, number in executed.items():
            rows.append(harness.row(f"{name}: useful / executed steps, {what}", steps.sum() / number, "share"))
        perfect = pace * steps.sum()
        ratios.append(
            harness.ratio(f"{name}: perfect packing's time / ours", perfect / timings[name].median, at_least=goal)
        )
        notes.append(
            f"{name}: {steps.sum():,} useful steps a round, the largest client has {steps.max():,} of them "
            f"and {laws[name].sizes.max():,} rows."
        )
    goal = "at least 0.95 of perfect packing (lognormal), 0.85 (power law)."
    return harness.result("P9", "unequal clients", goal=goal, rows=rows, ratios=ratios, notes=notes)


def _steps(sizes: np.ndarray) -> np.ndarray:
    return -(-np.asarray(sizes) // BATCH)


def _in_lanes(steps: np.ndarray, lanes: int) -> int:
    padded = np.concatenate([steps, np.zeros(-len(steps) % lanes, steps.dtype)]).reshape(-1, lanes)
    return int(padded.max(axis=1).sum() * lanes)


def _job(partition, rounds: int):
    """Makes a program of rounds, and a function that returns the executed steps by the round's info.

    Args:
      partition: the rows of each of N clients.
      rounds: T rounds of the program, with all clients and one epoch each.

    Returns: (the program, () -> {"as run": local steps that a round executes}); the dict is empty if the info does not
      count them.
    """
    rng = np.random.default_rng(3)
    x, y = separable(rng, len(partition.indices), (60,), 10)
    data = population.indexed({"x": x, "y": y}, partition)
    model = models.mlp(input_shape=(60,), num_outputs=10, hidden=(128,))
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    made = algorithms.fedavg(loss_fn, sampling.full(data.size), optax.sgd(0.05), num_epochs=1, batch_size=BATCH)
    params = model.init(jax.random.key(0))[0]

    def executed() -> dict[str, float]:
        state = made.init(jax.random.key(0), params, data)
        info = jax.eval_shape(made.step, jax.random.key(0), state, data)[1]
        if "executed_steps" not in info:
            return {}
        _, info = jax.jit(made.step)(jax.random.key(0), state, data)
        return {"as run": float(jnp.asarray(info["executed_steps"]))}

    return rounds_program(made, params, data, rounds), executed


def plot(axes, result: dict) -> None:
    """Useful steps a second under each law."""
    from experiments.benchmarks.report import bars

    bars(axes, [row for row in result["rows"] if row["unit"] == "steps/s"])

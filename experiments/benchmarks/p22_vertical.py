"""Vertical logistic regression: a step of four parties on 100,000 aligned rows beside one centralised step.

Each party has 30 columns, float32. A centralised full-batch step reads the table of 48 MB twice, once for the scores
and once for the gradient; so does a vertical step, each party its own columns. "vertical" is a round of
`algorithms.vertical` as `run` makes it, with the parties' columns as arrays of their own; "one array" the same where
columns are cut out of one array, as from a config. Bytes that are counted are those of scores and residuals.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import harness
from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.types import ClientData

COLUMNS, RATE = (30, 30, 30, 30), 0.1


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, 120] and labels [n] of a logistic teacher."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, sum(COLUMNS)), np.float32)
    chances = 1 / (1 + np.exp(-x @ rng.standard_normal(sum(COLUMNS), np.float32) / 10))
    return x, (rng.random(rows) < chances).astype(np.int32)


def vertical(x, y):
    """() -> one round; the data are arguments, and the state's buffers are given to the program."""
    rows = {"x": x, "y": jnp.asarray(y)}
    data = population.generated(1, lambda rows, id: ClientData(rows, jnp.ones(len(y), bool)), rows)
    model = models.vertical_linear(columns=COLUMNS, num_outputs=1)
    loss, step = models.sigmoid_cross_entropy, {"num_steps": 1, "mesh": None}
    algorithm = algorithms.vertical(model, loss, sampling.full(1), optax.sgd(RATE), **step)
    state = [jax.jit(algorithm.init)(jax.random.key(0), model.init(jax.random.key(1))[0], data)]
    program = jax.jit(algorithm.step, donate_argnums=1)

    def call():
        state[0], info = program(jax.random.key(2), state[0], data)
        return info

    return call


def centralised(x, y):
    """() -> one step of gradient descent on the whole table."""
    model = models.linear(input_shape=(sum(COLUMNS),), num_outputs=1)
    loss_fn = models.supervised(model, models.sigmoid_cross_entropy)
    rows = {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def step(params, rows):
        loss, gradient = jax.value_and_grad(lambda params: loss_fn(params, rows, None)["loss"].mean())(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), loss

    program, params = jax.jit(step), [model.init(jax.random.key(1))[0]]

    def call():
        params[0], loss = program(params[0], rows)
        return loss

    return call


def measure(quick: bool = False) -> dict:
    """Seconds a step, and the ratio to a centralised one."""
    x, y = table(2_000 if quick else 100_000)
    parts = tuple(jnp.asarray(part) for part in np.split(x, np.cumsum(COLUMNS)[:-1], axis=1))
    ways = {"centralised": centralised(x, y), "vertical": vertical(parts, y), "one array": vertical(jnp.asarray(x), y)}
    times = harness.interleaved(ways, repeats=3 if quick else 31, budget_seconds=120)
    rows = [harness.row(way, timing, "s/step", ours=way != "centralised") for way, timing in times.items()]
    ratios = []
    for way, most in (("vertical", 1.5), ("one array", None)):
        pairs = zip(times[way].seconds, times["centralised"].seconds, strict=True)
        longer = statistics.median(a / b for a, b in pairs)
        ratios.append(harness.ratio(f"a step of {way} / centralised", longer, at_most=most))
    speed = 2 * x.nbytes / times["vertical"].median / 1e9
    notes = [
        "A ratio is the median over interleaved repeats; all on one device.",
        f"Two reads of the table at the vertical step's speed are {speed:.1f} GB/s.",
        f"Between the parties go {2 * 3 * 4 * len(y):,} bytes a step.",
    ]
    goal = "a vertical step takes at most 1.5 times as long as a centralised one on the same table."
    return harness.result("P22", "Vertical logistic regression", goal=goal, rows=rows, ratios=ratios, notes=notes)

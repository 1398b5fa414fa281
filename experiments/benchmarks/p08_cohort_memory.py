"""Temporary memory of a round against the cohort.

XLA's own count of the temporary bytes in the compiled round (`memory_analysis`), for cohorts of 10^2 to 10^6 out of
10^6 clients, softmax regression (d = 7,850). One vmap over the cohort, written by hand, is beside it: it holds every
client's weights and rows at once. What a round keeps for each slot of the cohort (its id, its key's counter, whether it
reported) must grow; the goal is about everything else, so that part is measured apart: as the bytes a slot that the
growth from 10^5 to 10^6 slots gives, and the growth of the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.benchmarks import baselines, harness
from experiments.benchmarks.workloads import massive
from fedjax_sim import models

COHORTS = (10**2, 10**3, 10**4, 10**5, 10**6)


def measure(quick: bool = False) -> dict:
    """Temporary bytes for each cohort; nothing is run."""
    cohorts = COHORTS[:3] if quick else COHORTS
    num_clients = 2 * cohorts[-1]
    ours = {m: _temporary_bytes(num_clients, m) for m in cohorts}
    vmap = {m: _vmap_bytes(num_clients, m) for m in cohorts}
    rows = [harness.row(f"fedjax_sim, cohort {m:,}", ours[m] / 2**20, "MiB", ours=True) for m in cohorts]
    rows += [harness.row(f"one vmap, cohort {m:,}", vmap[m] / 2**20, "MiB") for m in cohorts]
    low, middle, high = cohorts[0], cohorts[-2], cohorts[-1]
    slot = (ours[high] - ours[middle]) / (high - middle)
    ratios = [
        harness.ratio("bytes for each slot of the cohort", slot),
        harness.ratio(
            "growth without the slots' own bytes", (ours[high] - slot * high) / (ours[low] - slot * low), at_most=1.05
        ),
        harness.ratio("growth, slots included", ours[high] / ours[low]),
        harness.ratio("growth of one vmap", vmap[high] / vmap[low]),
    ]
    goal = f"at most 1.05 growth from a cohort of {low:,} to one of {high:,}."
    return harness.result("P8", "cohort size", goal=goal, rows=rows, ratios=ratios, cohorts=list(cohorts))


def _temporary_bytes(num_clients: int, cohort_size: int) -> int:
    job = massive(num_clients, cohort_size)
    key = jax.random.key(0)
    state = jax.eval_shape(job.algorithm.init, key, job.params, job.data)
    compiled = jax.jit(job.algorithm.step, donate_argnums=1).lower(key, state, job.data).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _vmap_bytes(num_clients: int, cohort_size: int) -> int:
    """Returns the bytes of temporary memory of a round that vmaps its whole cohort, by hand.

    Args:
      num_clients: N.
      cohort_size: m. A client takes 5 steps of 10 examples of logistic regression, 784-10.
    """
    job = massive(num_clients, cohort_size)
    model = models.logistic(input_shape=(784,), num_outputs=10)
    loss_fn = models.supervised(model, models.softmax_cross_entropy)

    def client(params, data, key, id):
        held = data.client(id)
        order = baselines.shuffled(baselines.client_seed(key, id), jnp.arange(20), held.mask)
        local = params
        for step in range(5):
            rows = order[(step % 2) * 10 : (step % 2) * 10 + 10]
            batch = jax.tree.map(lambda x, rows=rows: x[rows], held.examples)
            gradient = jax.grad(lambda p, b=batch: loss_fn(p, b, None)["loss"].mean())(local)
            local = jax.tree.map(lambda p, g: p - 0.05 * g, local, gradient)
        return jax.tree.map(jnp.subtract, local, params), jnp.float32(0), jnp.float32(1)

    loop = baselines.hand_written(client, lanes=1, devices=1, one_vmap=True)
    ids = jax.ShapeDtypeStruct((1, cohort_size), jnp.int32)
    compiled = loop.lower(jax.random.key(0), job.params, job.data, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def plot(axes, result: dict) -> None:
    """Temporary memory of both."""
    from experiments.benchmarks.report import OURS, THEIRS

    for start, color in (("fedjax_sim", OURS), ("one vmap", THEIRS)):
        values = [row["value"] for row in result["rows"] if row["name"].startswith(start)]
        axes.loglog(result["cohorts"], values, "o-", color=color, label=start)
    axes.set_xlabel("clients in the cohort")
    axes.set_ylabel("temporary memory (MiB)")
    axes.legend(fontsize=8)

"""SplitFed: what a round of clients who train through a cut costs beside one of FedAvg on the joint model.

The same clients in the same process, 1,000 a round: FedAvg; SplitFed (V1) with plain links, which is the same program
but for the counts of bytes; and with activations and gradients of eight bits, whose draws are made for each example.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import workload
from fedjax_sim import algorithms, models, network, sampling, transform

ROUNDS = 5
MODEL = {"input_shape": (60,), "num_outputs": 10, "hidden": (128,)}


def programs(quick: bool) -> dict:
    """{way: one compiled loop of rounds}."""
    cohort = 20 if quick else 1000
    job = workload("mlp", cohort_size=cohort, num_clients=2 * cohort)
    model, loss = models.mlp(**MODEL), models.softmax_cross_entropy
    params = model.init(jax.random.key(0))[0]
    sampler, rate = sampling.uniform(job.data.size, cohort), optax.sgd(job.learning_rate)
    how = {"num_steps": job.num_steps, "batch_size": job.batch_size, "mesh": None}
    eight = network.link(forward=transform.quantize(8), backward=transform.quantize(8))
    ways = {
        "FedAvg": algorithms.fedavg(models.supervised(model, loss), sampler, rate, **how),
        "SplitFed": algorithms.splitfed(model, loss, sampler, rate, cut="hidden_0", **how),
        "SplitFed, 8 bits": algorithms.splitfed(model, loss, sampler, rate, cut="hidden_0", link=eight, **how),
    }
    return {way: loop(made, params, job.data) for way, made in ways.items()}


def loop(algorithm, params, data):
    """() -> the losses of some rounds; the state's buffers are given to the program."""
    state = [jax.jit(algorithm.init)(jax.random.key(5), params, data)]

    def rounds(state, data):
        def one(state, i):
            state, info = algorithm.step(jax.random.fold_in(jax.random.key(5), i), state, data)
            return state, info["local_loss"]

        return jax.lax.scan(one, state, jnp.arange(ROUNDS))

    program = jax.jit(rounds, donate_argnums=0)

    def call():
        state[0], losses = program(state[0], data)
        return losses

    return call


def measure(quick: bool = False) -> dict:
    """Seconds a round, each way."""
    loops = programs(quick)
    found = harness.interleaved(loops, repeats=3 if quick else 15, budget_seconds=60)
    times = {way: harness.Timing(t.first, tuple(s / ROUNDS for s in t.seconds)) for way, t in found.items()}
    rows = [harness.row(way, t, "s/round", ours=True) for way, t in times.items()]
    pairs = zip(times["SplitFed"].seconds, times["FedAvg"].seconds, strict=True)
    times_as_long = statistics.median(a / b for a, b in pairs)
    ratios = [harness.ratio("a round of SplitFed / of FedAvg on the joint model", times_as_long, at_most=1.3)]
    notes = ["The ratio is the median over interleaved repeats; all on one device; 8 bits are in no goal."]
    goal = "a round of 1,000 SplitFed clients takes at most 1.3 times as long as one of FedAvg on the joint model."
    return harness.result("P21", "SplitFed", goal=goal, rows=rows, ratios=ratios, notes=notes)

"""What a transform adds to a round of the main job.

The job of `fedjax-sim run` (digits, 100,000 clients, MLP 64-128-10, 1,000 a round, 5 steps of 10, uniform weights
over a fixed divisor), rounds in one compiled loop, with and without the parts of `fedjax_sim.transform`: int8
stochastic quantisation of every update, the central Gaussian mechanism, both in the order in which the clip bounds
what is actually sent, and int8 messages in a modular sum in place of the exact float sum. Share = (with - without) /
without. Noise at the server is also timed alone, in turns with the rounds: a difference of two rounds does not
resolve one percent. Noise on every client's own update is shown too, and has no goal.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program
from fedjax_sim import aggregation, algorithms, sampling, transform
from fedjax_sim.types import Mean

BARE, NOISE = "no transform", "noise at the server, alone"
CLIP = 1.0


def variants(cohort_size: int) -> dict[str, dict]:
    """Options of `fedavg` for each variant."""
    central = transform.gaussian_mechanism(CLIP, 0.5)
    return {
        BARE: {},
        "int8 stochastic quantisation": {"transform": transform.quantize(8)},
        "clip alone": {"transform": transform.clip(CLIP)},
        "clip and noise at the server": {"transform": central},
        "int8, then clip and noise at the server": {"transform": transform.chain(transform.quantize(8), central)},
        "int8 in a modular sum": {
            "transform": transform.quantize(8, range=CLIP, integers=True),
            "aggregator": aggregation.modular_sum(denominator=float(cohort_size)),
        },
        "clip and noise on each letter": {"transform": transform.local_gaussian(CLIP, 0.5)},
    }


def noise_alone(params, cohort_size: int, repeats: int):
    """The server's end of the mechanism, by itself: () -> aggregates after so many draws."""
    central = transform.gaussian_mechanism(CLIP, 0.5)
    zero = {"clipped_update_share": (jnp.zeros(()), jnp.ones(())), "unclipped_norm": (jnp.zeros(()), jnp.ones(()))}

    @jax.jit
    def program(key, aggregate, seen):
        def once(i, aggregate):
            own = jax.random.fold_in(key, i)
            return central.on_server(own, None, aggregate, (), seen, 1 / cohort_size)[0]

        return jax.lax.fori_loop(0, repeats, once, aggregate)

    seen = jax.tree.map(jnp.asarray, {name: Mean(*pair) for name, pair in zero.items()})
    return lambda: program(jax.random.key(0), params, seen)


def measure(quick: bool = False) -> dict:
    """Seconds a round with each transform, and its share."""
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import load

    config = load(None, ["data.num_clients=400", "sampler.cohort_size=40"] if quick else [])
    job, options = build(config), config.resolved()
    cohort_size = options["sampler"]["cohort_size"]
    rounds, repeats = (1, 3) if quick else (5, 21)
    work, losses = {}, {}
    for name, extra in variants(cohort_size).items():
        algorithm = algorithms.fedavg(
            job.loss_fn, sampling.uniform(job.data.train.size, cohort_size),
            optax.sgd(options["client_optimizer"]["learning_rate"]), weighting="uniform",
            num_steps=options["algorithm"]["num_steps"], batch_size=options["algorithm"]["batch_size"],
            **{"aggregator": aggregation.fixed_mean(float(cohort_size))} | extra,
        )  # fmt: skip
        work[name] = rounds_program(algorithm, job.params, job.data.train, rounds)
        losses[name] = float(work[name]()[1][-1])
    work[NOISE] = noise_alone(job.params, cohort_size, rounds)
    timings = {
        name: harness.Timing(t.first, tuple(s / rounds for s in t.seconds))
        for name, t in harness.interleaved(work, repeats=repeats).items()
    }
    bare = timings[BARE].seconds

    def share(name, beside=BARE):  # the median of what neighbours in time say: the machine's speed drifts
        others = timings[beside].seconds if name != NOISE else [0.0] * repeats
        times = zip(timings[name].seconds, others, bare, strict=True)
        return statistics.median((mine - other) / whole for mine, other, whole in times)

    rows = [
        harness.row(name, t, ours=True, share=0.0 if name == BARE else share(name), last_loss=losses.get(name))
        for name, t in timings.items()
    ]
    ratios = [
        harness.ratio("share of int8 stochastic quantisation", share("int8 stochastic quantisation"), at_most=0.10),
        harness.ratio("share of noise at the server, timed alone", share(NOISE), at_most=0.01),
        harness.ratio("share of clipping", share("clip alone")),
        harness.ratio("share of clip and noise at the server", share("clip and noise at the server")),
        harness.ratio("share of all three", share("int8, then clip and noise at the server")),
        harness.ratio(
            "share of the modular sum, beyond int8 letters",
            share("int8 in a modular sum", "int8 stochastic quantisation"),
            at_most=0.10,
        ),
        harness.ratio("share of clip and noise on each letter", share("clip and noise on each letter")),
    ]
    notes = [
        "A share is the median over interleaved repeats of (with - without) / without; below zero means faster than "
        "the round without, which sums floats exactly.",
    ]
    goal = "int8 at most 10 %, noise 1 %, modular sum 10 % of a round."
    return harness.result("P7", "transforms as a share of a round", goal=goal, rows=rows, ratios=ratios, notes=notes)


def plot(axes, result: dict) -> None:
    """Shares in percent."""
    from experiments.benchmarks.report import OURS

    rows = [row for row in result["rows"] if row["name"] != BARE][::-1]
    axes.barh([row["name"] for row in rows], [100 * row["share"] for row in rows], color=OURS)
    axes.axvline(10, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("share of a round, %")

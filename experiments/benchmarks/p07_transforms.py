"""What a transform adds to a round of the main job.

The job of `fedjax-sim run` (digits, 100,000 clients, MLP 64-128-10, 1,000 a round, 5 steps of 10), rounds in one
compiled loop, with and without: int8 stochastic rounding of every letter (a scale for each leaf, dither by counter
hash), clipping to a norm and Gaussian noise at the server, and a sum modulo 2^32 of fixed-point letters in place of the
exact float sum. Share = (with - without) / without. The parts are ten-line ones of this file over `fedjax_sim.prng`.
Noise on every client's own letter is shown too, beside the generator of JAX's default: it has no goal.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks import harness
from experiments.benchmarks.workloads import rounds_program
from fedjax_sim import algorithms, prng, sampling, transform, tree
from fedjax_sim.types import Aggregator, UpdateTransform

FIXED = 2.0**20  # units of the modular sum in 1


def _leaves(fn, key, update):
    leaves, structure = jax.tree.flatten(update)
    return structure.unflatten([fn(jax.random.fold_in(key, i), x) for i, x in enumerate(leaves)])


def int8() -> UpdateTransform:
    """Stochastic rounding to 255 levels between -max and max of each leaf; decoded at once.

    The integers stay in floats, which hold them exactly: a cast to int8 and back would change nothing but the time.
    """

    def leaf(key, x):
        unit = jnp.maximum(jnp.abs(x).max(), 1e-30) / (127 - 2.0**-12)  # no quotient reaches 127, whatever rounds
        return prng.stochastic_round(key, x * (1 / unit)) * unit

    def letter(key, update):  # read more than once, before and after: not computed more than once
        zero = tree.hidden_zero(jax.random.key_data(key))
        return tree.settled(_leaves(leaf, key, tree.settled(update, zero)), zero)

    return transform.stateless(letter)


def clipped_noise(draw, *, clip: float = 1.0, noise: float = 0.01, local: bool = False) -> UpdateTransform:
    """Each letter clipped to a norm; Gaussian noise on the aggregate, or on each letter."""

    def add_noise(key, update):
        return _leaves(lambda key, x: x + noise * draw(key, x.shape), key, update)

    def letter(key, update):
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(update)))
        update = jax.tree.map(lambda x: x * jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-30)), update)
        return add_noise(key, update) if local else update

    def server(key, cohort, aggregate, state, measured, sensitivity):
        return (aggregate if local else add_noise(key, aggregate)), state, {}

    return transform.stateless(letter)._replace(on_server=server)


def modular_sum() -> tuple[UpdateTransform, Aggregator]:
    """Fixed-point letters in uint32, and their sum modulo 2^32 over the number of letters."""

    def letter(key, update):
        fixed = lambda x: jax.lax.bitcast_convert_type(jnp.round(x * FIXED).astype(jnp.int32), jnp.uint32)  # noqa: E731
        return jax.tree.map(fixed, update)

    def init(update_spec, num_slots):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), update_spec), jnp.zeros((), jnp.int32)

    def accumulate(key, cohort, carry, received):
        here = received.weights > 0

        def add(old, x):
            rows = here.reshape((-1,) + (1,) * (x.ndim - 1))
            return old + jnp.where(rows, x, jnp.uint32(0)).sum(0, dtype=jnp.uint32)

        return jax.tree.map(add, carry[0], received.updates), carry[1] + here.sum(dtype=jnp.int32)

    def finalize(key, cohort, carry):
        scale = 1 / (FIXED * jnp.maximum(carry[1], 1).astype(jnp.float32))
        signed = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32)  # noqa: E731
        return jax.tree.map(lambda x: signed(x) * scale, carry[0]), {}

    return transform.stateless(letter), Aggregator(init, accumulate, finalize, None)


def variants() -> dict[str, dict]:
    """Options of `fedavg` for each variant."""
    letter, table = modular_sum()
    return {
        "no transform": {},
        "int8 stochastic rounding": {"transform": int8()},
        "clip and Gaussian noise at the server": {"transform": clipped_noise(prng.normal)},
        "clip alone": {"transform": clipped_noise(prng.normal, noise=0.0, local=False)._replace(
            on_server=transform.identity().on_server)},
        "modular sum": {"transform": letter, "aggregator": table},
        "clip and noise on each letter, prng.normal": {"transform": clipped_noise(prng.normal, local=True)},
        "clip and noise on each letter, jax.random.normal": {
            "transform": clipped_noise(jax.random.normal, local=True)
        },
    }  # fmt: skip


def measure(quick: bool = False) -> dict:
    """Seconds a round with each transform, and its share."""
    from fedjax_sim.config import load
    from fedjax_sim.experiment import build

    config = load(None, ["data.num_clients=400", "sampler.cohort_size=40"] if quick else [])
    job, options = build(config), config.resolved()
    rounds, repeats = (1, 3) if quick else (5, 21)
    work, losses = {}, {}
    for name, extra in variants().items():
        algorithm = algorithms.fedavg(
            job.loss_fn, sampling.uniform(job.data.train.size, options["sampler"]["cohort_size"]),
            optax.sgd(options["client_optimizer"]["learning_rate"]),
            num_steps=options["algorithm"]["num_steps"], batch_size=options["algorithm"]["batch_size"], **extra,
        )  # fmt: skip
        work[name] = rounds_program(algorithm, job.params, job.data.train, rounds)
        losses[name] = float(work[name]()[1][-1])
    timings = {
        name: harness.Timing(t.first, tuple(s / rounds for s in t.seconds))
        for name, t in harness.interleaved(work, repeats=repeats).items()
    }
    bare = timings["no transform"].seconds

    def share(name, beside="no transform"):  # the median of what neighbours in time say: the machine's speed drifts
        times = zip(timings[name].seconds, timings[beside].seconds, bare, strict=True)
        return statistics.median((mine - other) / whole for mine, other, whole in times)

    rows = [
        harness.row(name, t, ours=True, share=0.0 if name == "no transform" else share(name), last_loss=losses[name])
        for name, t in timings.items()
    ]
    noise_share = share("clip and Gaussian noise at the server", beside="clip alone")
    ratios = [
        harness.ratio("share of int8 stochastic rounding", share("int8 stochastic rounding"), at_most=0.10),
        harness.ratio("share of Gaussian noise at the server", noise_share, at_most=0.01),
        harness.ratio("share of clipping", share("clip alone")),
        harness.ratio("share of the modular sum", share("modular sum"), at_most=0.10),
        harness.ratio(
            "share of noise on each letter, clip included", share("clip and noise on each letter, prng.normal")
        ),
    ]
    notes = [
        "A share is the median over interleaved repeats of (with - without) / without; below zero means faster than "
        "the round without, which sums floats exactly.",
        "Noise at the server: (with clip and noise - with the clip alone) / without any.",
    ]
    goal = "int8 at most 10 %, noise 1 %, modular sum 10 % of a round."
    return harness.result("P7", "transforms as a share of a round", goal=goal, rows=rows, ratios=ratios, notes=notes)


def plot(axes, result: dict) -> None:
    """Shares in percent."""
    from experiments.benchmarks.report import OURS

    rows = [row for row in result["rows"] if row["name"] != "no transform"][::-1]
    axes.barh([row["name"] for row in rows], [100 * row["share"] for row in rows], color=OURS)
    axes.axvline(10, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("share of a round, %")

"""One round of simulated time, client by client: who downloaded, trained, sent, and was cut off."""

from __future__ import annotations

import tempfile
import types
from typing import Any

import jax
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import init_key
from fedjax_sim.round.round import invite
from fedjax_sim.running.environment import matmul_precision
from fedjax_sim.sampling.time.lost_reports import NEVER, UNHEARD
from fedjax_sim.types import Algorithm, Array, Population, PyTree, Star, noisy_parts
from fedjax_sim.validate import PositiveInt

__all__ = ["timeline", "timeline_of_round"]


@validate.named_arguments
def timeline(star: Star, key: Array, sampler_state: PyTree, *, most: PositiveInt = 60) -> dict[str, Any]:
    """What the clients of a round spend their time on, by replaying its invitation; nobody trains.

    Args:
      star: parts whose sampler has a clock; `Algorithm.parts`.
      key: of the round: `run` gives round t = 0, 1, ... fold_in(key, t).
      sampler_state: of the sampler before the round; of `FederatedState` it is `state.sampler`.
      most: of the cohort's clients this many are kept, evenly from the fastest to the slowest.

    Returns: plain numbers for `report.timeline.picture`, and for JSON: `begins` (simulated seconds since the run's
    start), `lasts`, `invited`, `reported`, and `clients`: of each its `id`, seconds of `download`, `training` and
    `sending`, and its `end`: "reported", "cut off" (the round closed), "left" (before), or "silent" (it did all, and
    its report was lost).

    Raises: ValueError for a sampler whose rounds take no time.

    Guarantees: the round that the algorithm makes (tests/instruments/test_timeline.py::test_it_is_the_round).
    """
    validate.part("star", star, Star)
    _clocked("star.sampler", star)
    invited_from = jax.jit(lambda key, state: invite(star, key, types.SimpleNamespace(sampler=state))[0])
    cohort = jax.device_get(invited_from(key, sampler_state))
    per_second = star.sampler.devices.ticks_per_second
    parts = np.stack(cohort.timing.spent[:3], -1).astype(np.int64)
    totals = parts.sum(1)
    invited = np.flatnonzero(cohort.invited)
    order = invited[np.lexsort((cohort.ids[invited], totals[invited]))]
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int))]
    closed = totals.max(initial=0)
    unheard = np.min([*cohort.timing.lost.values(), np.full(len(totals), NEVER)], axis=0) == UNHEARD

    def one(slot: int) -> dict[str, Any]:
        end = "cut off" if totals[slot] == closed else "left"
        end = "reported" if cohort.reported[slot] else "silent" if unheard[slot] else end
        seconds = (parts[slot] / per_second).tolist()
        return (
            {"id": int(cohort.ids[slot])}
            | dict(zip(("download", "training", "sending"), seconds, strict=True))
            | {"end": end}
        )

    lasts, ends = (float(cohort.metrics[name]) for name in ("round_seconds", "simulated_seconds"))
    return {
        "begins": max(ends - lasts, 0.0),
        "lasts": lasts,
        "invited": len(invited),
        "reported": int(cohort.reported.sum()),
        "clients": [one(slot) for slot in shown.tolist()],
    }


@validate.named_arguments
def timeline_of_round(
    key: Array, algorithm: Algorithm, params: PyTree, population: Population, round: PositiveInt, *, most: int = 60
) -> dict[str, Any]:
    """`timeline` of any round of a run, from what the run was made of; the rounds before it are replayed.

    Nobody trains for that, unless the sampler learns from what clients report: then all earlier rounds run again.

    Args:
      key, algorithm, params, population: as `run` was given them.
      round: 1, 2, ..., as in the log.
      most: as in `timeline`.

    Returns: as `timeline`.

    Raises: ValueError where rounds take no time, and for a run with noise, which hides who took part.

    Guarantees: what the log says of that round (tests/instruments/test_timeline.py::test_any_round).
    """
    validate.part("algorithm", algorithm, Algorithm)
    star = algorithm.parts
    _clocked("algorithm", star)
    if parts := noisy_parts(star):
        validate.fail("algorithm", "one without noise, which hides who takes part", f"noise in {', '.join(parts)}")
    state = _sampler_after(round - 1, key, algorithm, params, population)
    return timeline(star, jax.random.fold_in(key, round - 1), state, most=most)


def _sampler_after(rounds: int, key: Array, algorithm: Algorithm, params: PyTree, population: Population) -> PyTree:
    """The sampler's state after so many rounds."""
    star = algorithm.parts
    alone = star.sampler.observe is None

    def step(key, state, population):
        if alone:
            return invite(star, key, types.SimpleNamespace(sampler=state))[1]
        return algorithm.step(key, state, population)[0]

    def replay(key, state, population, rounds):
        return jax.lax.fori_loop(0, rounds, lambda t, x: step(jax.random.fold_in(key, t), x, population), state)

    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        state = algorithm.init(init_key(key), params, population)
        given = (state.sampler, ()) if alone else (state, population)
        with jax.default_matmul_precision(matmul_precision()):
            state = jax.jit(replay, compiler_options=engine.compiler_options())(key, *given, rounds)
        return jax.device_get(state if alone else state.sampler)


def _clocked(name: str, star: Star | None) -> None:
    """Refuses parts whose rounds take no time."""
    if star is None or star.sampler.devices is None:
        hint = "Put with_clock(sampler, devices) around its sampler; in a config, write [sampler.with_clock]."
        validate.fail(name, "a sampler with a clock", "one whose rounds take no time", hint)

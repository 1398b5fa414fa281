"""Shows a round of simulated time client by client: who downloaded, trained, sent, and was cut off."""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import init_key
from fedjax_sim.round.round import invite
from fedjax_sim.round.state import FederatedState
from fedjax_sim.running.environment import matmul_precision
from fedjax_sim.sampling.time.cut import spent_by_slots
from fedjax_sim.sampling.time.lost_reports import NEVER, UNHEARD
from fedjax_sim.types import Algorithm, Array, Devices, Population, PyTree, Star, noisy_parts
from fedjax_sim.validate import PositiveInt


@validate.named_arguments
def timeline(star: Star, key: Array, sampler_state: PyTree, *, most: PositiveInt = 60) -> dict[str, Any]:
    """Returns what the clients of a round spend their time on, by replaying its invitation; nobody trains.

    Args:
      star: parts whose sampler has a clock; `Algorithm.parts`.
      key: the key of the round: `run` gives round t = 0, 1, ... the key fold_in(key, t).
      sampler_state: the sampler's state before the round; `state.sampler` of a `FederatedState`.
      most: how many of the cohort's clients are kept, evenly from the fastest to the slowest.

    Returns: plain numbers for `report.time.picture`, and for JSON. `begins` is in simulated seconds since the run's
    start, `lasts` in seconds; `invited` and `reported` are numbers of clients. `clients` has for each client its `id`,
    the seconds of `download`, `training` and `sending`, and its `end`: "reported", "cut off" (the round closed), "left"
    (before it closed), or "silent" (it did all its work, and its report was lost).

    Raises: ValueError for a sampler whose rounds take no time.

    Guarantees: it is the round that the algorithm makes (tests/instruments/test_timeline.py::test_it_is_the_round).
    """
    validate.part("star", star, Star)
    _, devices = _checked_clock("star.sampler", star)
    invited_from = jax.jit(lambda key, state: invite(star, key, _with_sampler(state))[0])
    cohort = jax.device_get(invited_from(key, sampler_state))
    per_second = devices.ticks_per_second
    parts = np.stack(spent_by_slots(cohort)[:3], -1).astype(np.int64)
    totals = parts.sum(1)
    invited = np.flatnonzero(cohort.invited)
    # By time, and by id where times are equal, so that the order does not depend on the cohort's.
    order = invited[np.lexsort((cohort.ids[invited], totals[invited]))]
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int))]
    # A client that is cut off has spent the time until the round closed, which is the longest of all.
    closing_ticks = totals.max(initial=0)
    first_losses = np.min([*cohort.timing.lost.values(), np.full(len(totals), NEVER)], axis=0)
    is_unheard = first_losses == UNHEARD

    def one_client(slot: int) -> dict[str, Any]:
        end = "cut off" if totals[slot] == closing_ticks else "left"
        end = "reported" if cohort.reported[slot] else "silent" if is_unheard[slot] else end
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
        "clients": [one_client(slot) for slot in shown.tolist()],
    }


@validate.named_arguments
def timeline_of_round(
    key: Array, algorithm: Algorithm, params: PyTree, population: Population, round: PositiveInt, *, most: int = 60
) -> dict[str, Any]:
    """Returns the `timeline` of any round of a run, from what the run was made of.

    The rounds before it are replayed. Nobody trains for this, unless the sampler learns from clients' reports: then all
    earlier rounds run again.

    Args:
      key, algorithm, params, population: as `run` was given them.
      round: 1, 2, ..., as in the log.
      most: as in `timeline`.

    Returns: as `timeline`.

    Raises: ValueError where rounds take no time, and for a run with noise, which hides who took part.

    Guarantees: the timeline agrees with the log of that round (tests/instruments/test_timeline.py::test_any_round).
    """
    validate.part("algorithm", algorithm, Algorithm)
    star, _ = _checked_clock("algorithm", algorithm.parts)
    if parts := noisy_parts(star):
        validate.fail("algorithm", "one without noise, which hides who takes part", f"noise in {', '.join(parts)}")
    state = _sampler_after(round - 1, key, algorithm, params, population)
    return timeline(star, jax.random.fold_in(key, round - 1), state, most=most)


def _sampler_after(rounds: int, key: Array, algorithm: Algorithm, params: PyTree, population: Population) -> PyTree:
    """Returns the sampler's state after so many rounds of a run, by replaying them.

    Args:
      rounds: >= 0.
      key, algorithm, params, population: as `run` was given them. Round t = 0, 1, ... has the key fold_in(key, t).

    Returns: the state, on the host. If the sampler observes reports, the cohorts of these rounds train again.
    """
    star = algorithm.parts
    assert star is not None, "checked by the caller"
    # Most samplers do not observe reports: their state follows from invitations alone.
    is_independent = star.sampler.observe is None

    def step(key, state, population):
        if is_independent:
            return invite(star, key, _with_sampler(state))[1]
        return algorithm.step(key, state, population)[0]

    def replay(key, state, population, rounds):
        return jax.lax.fori_loop(0, rounds, lambda t, x: step(jax.random.fold_in(key, t), x, population), state)

    with tempfile.TemporaryDirectory() as folder, engine.client_memory("auto", folder):
        state = algorithm.init(init_key(key), params, population)
        start = (state.sampler, ()) if is_independent else (state, population)
        with jax.default_matmul_precision(matmul_precision()):
            state = jax.jit(replay, compiler_options=engine.compiler_options())(key, *start, rounds)
        return jax.device_get(state if is_independent else state.sampler)


def _with_sampler(sampler_state: PyTree) -> FederatedState:
    """Returns a state for `invite`, which reads the sampler's part alone."""
    return FederatedState(round=jnp.int32(0), sampler=sampler_state, clients=(), memory=(), transform=(), server=())


def _checked_clock(name: str, star: Star | None) -> tuple[Star, Devices]:
    """Returns parts with a clock and their devices; refuses parts whose rounds take no time."""
    if star is None or star.sampler.devices is None:
        hint = "Put with_clock(sampler, devices) around its sampler; in a config, write [sampler.with_clock]."
        validate.fail(name, "a sampler with a clock", "one whose rounds take no time", hint)
    return star, star.sampler.devices

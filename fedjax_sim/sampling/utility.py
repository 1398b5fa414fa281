"""Samplers that prefer clients from whom more is to be learned, by the losses that they observe."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.devices import check_devices
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.importance import checked_weights, race
from fedjax_sim.sampling.time.cut import unlimited, untimed
from fedjax_sim.sampling.time.lost_reports import some_slots
from fedjax_sim.types import Array, Cohort, Devices, Metric, PyTree, Sampler
from fedjax_sim.validate import FromData, Integer, Number, PositiveShare

__all__ = ["oort", "power_of_choice"]

EXPLORED = Metric("explored", "places for clients that never reported", "count")
PREFERRED = Metric("preferred_seconds", "preferred duration of a client's round", "seconds", "last")


class _Losses(NamedTuple):
    sampler: PyTree
    losses: Array  # [N] float32, the last observed; inf = none yet


def power_of_choice(sampler: Sampler, cohort_size: int) -> Sampler:
    """Of d candidates, those m whose last known loss was highest; who is not known yet comes first (rpow-d).

    Candidates are those whom the wrapped sampler draws: `power_of_choice(weighted_without_replacement(sizes, d), m)` is
    that of the paper, whose cohorts are averaged uniformly. Losses are the ones that clients met in their own training,
    so candidates are not asked for any: nothing is sent for it. The larger d, the faster the average loss falls, and
    the more the result leans towards clients of high loss. Candidates of equal loss are taken in the order of slots.

    Args:
      sampler: of the d candidates, without a clock; `with_clock` goes around this.
      cohort_size: m in [1, d].

    Returns: a sampler with m slots, whose state is a float32 for each of the N clients. Its cohorts follow what it
    observes: formulas, weights by examples, and accountants refuse it.

    Raises: ValueError, TypeError for a size out of range, or a sampler with a clock.

    Guarantees: d = m is the wrapped sampler, bit for bit (tests/sampling/test_utility.py::
    test_as_many_candidates_as_places); the loss of who is chosen is that of the highest m of d, in closed form
    (::test_the_bias_of_power_of_choice).

    References: Cho, Wang and Joshi 2022 (power-of-choice), section 3, rpow-d.

    >>> from fedjax_sim.sampling.uniform import uniform
    >>> power_of_choice(uniform(100, 20), 5).num_slots
    5
    """
    untimed(sampler, "power_of_choice")
    unlimited(sampler, "power_of_choice", "Candidates do not report.")
    validate.integer("cohort_size", cohort_size, 1, sampler.num_slots, hint="There are no more candidates.")
    size = sampler.design.population_size

    def init():
        return _Losses(sampler.init(), jnp.full(size, jnp.inf, jnp.float32))

    def sample(key, state):
        candidates, inner = sampler.sample(key, state.sampler)
        known = jnp.where(candidates.invited, state.losses[candidates.ids], -jnp.inf)
        best = jnp.argsort(-known, stable=True)[:cohort_size]
        first = jnp.sort(best)  # in the order of the candidates
        return some_slots(candidates, first), state._replace(sampler=inner)

    def tell(state, work):
        return state._replace(sampler=sampler.tell(state.sampler, work))

    def observe(state, cohort, outcome):
        inner = state.sampler if sampler.observe is None else sampler.observe(state.sampler, cohort, outcome)
        return _Losses(inner, _learned(state.losses, cohort, outcome.losses))

    return sampler._replace(
        init=init,
        sample=sample,
        num_slots=cohort_size,
        design=_unknown(size, cohort_size, getattr(sampler.design, "replacement", True)),
        tell=sampler.tell and tell,
        observe=observe,
    )


class _Oort(NamedTuple):
    round: Array  # [] int32, rounds so far
    utility: Array  # [N] float32, statistical utility when it was last observed; NaN = never
    ticks: Array  # [N] int32, duration of the last round in which it reported
    seen: Array  # [N] int32, that round
    weights: Array  # [N] float32
    preferred: Array  # [] float32, T in ticks
    gained: Array  # [2 W] float32, the utility of the clients of each of the last rounds


@validate.named_arguments
def oort(
    weights: Annotated[Any, FromData("weights")],
    cohort_size: int,
    devices: Devices | None = None,
    *,
    preferred_seconds: float = 60.0,
    pacer_seconds: float = 20.0,
    window: Annotated[int, Integer(1, 65536)] = 20,
    penalty: Annotated[float, Number(0, 64)] = 2.0,
    exploration: float = 0.9,
    exploration_decay: float = 0.98,
    least_exploration: float = 0.2,
    cutoff: PositiveShare = 0.95,
) -> Sampler:
    """Clients of high loss that are fast, and clients that never took part: exploitation and exploration.

    A client's utility is (|B_i| l_i + sqrt(0.1 log R / L_i)) (T / t_i)^(alpha if T < t_i): its number of examples times
    the loss that it met in training, more the longer it was not seen (in round R, last in L_i), less if its round took
    longer than T. A share 1 - epsilon of the places goes to clients drawn in proportion to utility, of those with at
    least the share `cutoff` of the utility of the last one who would have a place by rank; the others to clients that
    never reported, uniformly. Where the last W rounds brought less utility than the W before them, T grows.

    The paper takes the root of the mean squared loss of single examples, which clients here do not report, and may draw
    new clients by speed.

    Args:
      weights: [N] numbers of examples |B_i|, finite and >= 0, not all 0.
      cohort_size: m in [1, N].
      devices: what the clients run on, for rounds with a clock; None = time plays no part.
      preferred_seconds: T at first.
      pacer_seconds: by which T grows.
      window: W rounds.
      penalty: alpha, at least 0.
      exploration, exploration_decay, least_exploration: epsilon = max(least, exploration * decay^(R - 1)), in [0, 1].
      cutoff: in (0, 1].

    Returns: a sampler with m slots; its state is 16 bytes a client, and a draw takes O(N). It goes inside of
    `with_clock`, by which it learns how long clients take. Its cohorts follow what it observes: formulas, weights by
    examples, and accountants refuse it.

    Raises: ValueError, TypeError for values out of range.

    Guarantees: the law of both halves (tests/sampling/test_utility.py::test_exploitation_is_in_proportion_to_utility,
    ::test_exploration_ends); slow clients are discounted, and T grows (::test_speed_counts, ::test_the_pacer).

    References: Lai et al. 2021 (Oort), sections 4.2 to 4.4, algorithm 1.

    >>> oort([10, 20, 30], 2).design.scheme
    'unknown_without_replacement'
    """
    sizes = checked_weights(weights).astype("float32")
    validate.integer("cohort_size", cohort_size, 1, len(sizes), hint="There are no more clients.")
    if devices is not None:
        check_devices(devices, len(sizes), "weights'")
    for name, value in (("preferred_seconds", preferred_seconds), ("pacer_seconds", pacer_seconds)):
        validate.positive(name, value)
    shares = {"exploration": exploration, "exploration_decay": exploration_decay}
    for name, value in (shares | {"least_exploration": least_exploration}).items():
        validate.in_range(name, value, 0, 1)
    per_second = 1 if devices is None else devices.ticks_per_second

    def init():
        size, zero = len(sizes), jnp.zeros((), jnp.int32)
        never = jnp.full(size, jnp.nan, jnp.float32)
        started = jnp.float32(preferred_seconds * per_second)
        nothing = jnp.zeros(2 * window, jnp.float32)
        whole = jnp.zeros(size, jnp.int32)
        return _Oort(zero, never, whole, whole, jnp.asarray(sizes), started, nothing)

    def sample(key, state):
        round = state.round + 1
        utility = _utility(state, round, penalty)
        known = ~jnp.isnan(utility)
        epsilon = jnp.maximum(least_exploration, exploration * exploration_decay ** state.round.astype(jnp.float32))
        new = len(sizes) - known.sum(dtype=jnp.int32)
        explored = jnp.clip(jnp.round(epsilon * cohort_size).astype(jnp.int32), cohort_size + new - len(sizes), new)
        ids = _drawn(key, utility, cohort_size, explored, cutoff)
        everyone = jnp.ones(cohort_size, bool)
        metrics = {"explored": explored, "preferred_seconds": state.preferred / per_second}
        return Cohort(ids, everyone, everyone, metrics), state._replace(round=round)

    def observe(state, cohort, outcome):
        gains = state.weights[cohort.ids] * outcome.losses
        arrived = outcome.arrived & jnp.isfinite(gains)
        where = jnp.where(arrived, cohort.ids, len(sizes))
        state = state._replace(
            utility=state.utility.at[where].set(jnp.maximum(gains, 0), mode="drop"),
            seen=state.seen.at[where].set(state.round, mode="drop"),
        )
        if cohort.timing.spent is not None and devices is not None:
            state = state._replace(ticks=state.ticks.at[where].set(cohort.timing.spent.total, mode="drop"))
        gained = jnp.roll(state.gained, -1).at[-1].set(jnp.where(arrived, jnp.maximum(gains, 0), 0).sum())
        slower = gained[:window].sum() > gained[window:].sum()
        grows = (state.round % window == 0) & (state.round >= 2 * window) & slower
        preferred = state.preferred + jnp.where(grows, pacer_seconds * per_second, 0)
        return state._replace(preferred=preferred, gained=gained)

    metrics = (EXPLORED,) if devices is None else (EXPLORED, PREFERRED)
    design = _unknown(len(sizes), cohort_size, False)
    return Sampler(init, sample, cohort_size, design, observe=observe, metrics=metrics)


def _utility(state: _Oort, round: Array, penalty: float) -> Array:
    """[N] utilities before a round; NaN for clients that never reported."""
    since = jnp.sqrt(0.1 * jnp.log(round.astype(jnp.float32)) / jnp.maximum(state.seen, 1).astype(jnp.float32))
    ticks = state.ticks.astype(jnp.float32)
    slow = (state.preferred / jnp.maximum(ticks, 1)) ** penalty
    return (state.utility + since) * jnp.where(ticks > state.preferred, slow, 1)


def _drawn(key: Array, utility: Array, cohort_size: int, explored: Array, cutoff: float) -> Array:
    """[m] int32 clients: first those drawn by utility [N], then `explored` of those that never reported (NaN)."""
    known, exploited = ~jnp.isnan(utility), cohort_size - explored
    ranked = jax.lax.top_k(jnp.where(known, utility, -jnp.inf), cohort_size)[0]
    least = cutoff * ranked[jnp.maximum(exploited - 1, 0)]
    among = known & (utility >= least)
    waits = race(stream(key, "exploitation"), jnp.where(among, utility, 0))
    best = jax.lax.top_k(jnp.where(among, -waits, -jnp.inf), cohort_size)[1]
    waits = race(stream(key, "exploration"), jnp.ones_like(utility))
    fresh = jax.lax.top_k(jnp.where(known, -jnp.inf, -waits), cohort_size)[1]
    slots = jnp.arange(cohort_size, dtype=jnp.int32)
    return jnp.where(slots < exploited, best, fresh[jnp.maximum(slots - exploited, 0)]).astype(jnp.int32)


def _learned(losses: Array, cohort: Cohort, observed: Array) -> Array:
    """Losses [N] with those that were observed; who sent none, or no number, keeps its own."""
    where = jnp.where(cohort.invited & jnp.isfinite(observed), cohort.ids, losses.size)
    return losses.at[where].set(observed, mode="drop")


def _unknown(size: int, num_slots: int, replacement: bool) -> SamplingDesign:
    scheme = "unknown" if replacement else "unknown_without_replacement"
    return SamplingDesign(
        scheme=scheme, population_size=size, cohort_size=num_slots, num_slots=num_slots, response="others"
    )

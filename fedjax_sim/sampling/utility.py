"""Samplers that prefer clients with a high loss: power-of-choice and Oort."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.devices import check_devices
from fedjax_sim.prng import stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.importance import checked_weights, race
from fedjax_sim.sampling.inner import inner_tell
from fedjax_sim.sampling.time.cut import unlimited, untimed
from fedjax_sim.sampling.time.lost_reports import some_slots
from fedjax_sim.types import Array, Cohort, Devices, Metric, PyTree, Sampler
from fedjax_sim.validate import FromData, Integer, Number, PositiveShare

EXPLORED = Metric("explored", "places for clients that never reported", "count")
PREFERRED = Metric("preferred_seconds", "preferred duration of a client's round", "seconds", "last")


class _Losses(NamedTuple):
    """The state of the wrapped sampler, and the losses of the clients."""

    sampler: PyTree
    losses: Array  # [N] float32, the last observed loss; inf = none yet


def power_of_choice(sampler: Sampler, cohort_size: int) -> Sampler:
    """Invites, of d candidates, the m clients whose last known loss was highest (power-of-choice, rpow-d).

    The wrapped sampler draws the candidates. `power_of_choice(weighted_without_replacement(sizes, d), m)` is the
    paper's method, whose cohorts are averaged uniformly. Candidates without a known loss come first; candidates of
    equal loss are taken in the order of slots.

    The losses are those that clients had in their own training, so candidates send nothing for the choice. With a
    larger d the average loss falls faster, and the result is more biased towards clients of high loss.

    Args:
      sampler: draws d candidates, without a clock; `with_clock` goes around this wrapper.
      cohort_size: m in [1, d].

    Returns: a sampler with m slots, whose state is a float32 for each of the N clients. Its cohorts depend on what it
    observes, so formulas, weights by examples, and accountants refuse it.

    Raises: ValueError or TypeError for a size out of range, and for a sampler with a clock.

    Guarantees:
      - with d = m it is the wrapped sampler, bit for bit
        (tests/sampling/test_utility.py::test_as_many_candidates_as_places)
      - the loss of the chosen clients is that of the highest m of d, in closed form
        (::test_the_bias_of_power_of_choice)

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
        losses = jnp.where(candidates.invited, state.losses[candidates.ids], -jnp.inf)
        best = jnp.argsort(-losses, stable=True)[:cohort_size]
        slots = jnp.sort(best)  # the order of the candidates is kept
        return some_slots(candidates, slots), state._replace(sampler=inner)

    def observe(state, cohort, outcome):
        inner = state.sampler if sampler.observe is None else sampler.observe(state.sampler, cohort, outcome)
        return _Losses(inner, _with_observed_losses(state.losses, cohort, outcome.losses))

    return sampler._replace(
        init=init,
        sample=sample,
        num_slots=cohort_size,
        design=_unknown_design(size, cohort_size, getattr(sampler.design, "replacement", True)),
        tell=inner_tell(sampler),
        observe=observe,
    )


class _Oort(NamedTuple):
    """An `_Oort` holds what Oort knows of the clients."""

    round: Array  # [] int32, the number of rounds so far
    utility: Array  # [N] float32, |B_i| l_i when it was last observed; NaN = never
    ticks: Array  # [N] int32, the duration of the last round in which the client reported
    seen: Array  # [N] int32, the number L_i of that round
    weights: Array  # [N] float32, |B_i|
    preferred: Array  # [] float32, T in ticks
    gained: Array  # [2 W] float32, the utility of the clients observed in each of the last rounds


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
    """Invites fast clients of high loss (exploitation) and clients that never reported (exploration), as in Oort.

    In round R, the utility of a client that last reported in round L_i, in a round of duration t_i, is

        (|B_i| l_i + sqrt(0.1 log R / L_i)) (T / t_i)^(alpha if T < t_i else 0)

    It is the client's number of examples |B_i| times the loss l_i of its training. The utility grows with the time
    since the client reported, and falls if its round took longer than the preferred duration T.

    A share 1 - epsilon of the places is for exploitation: clients are drawn in proportion to utility. Only clients are
    drawn whose utility is at least `cutoff` times the utility of the last client that would have such a place by rank.
    The other places are for clients that never reported, drawn uniformly. If the last W rounds had less utility than
    the W rounds before them, T grows.

    The paper takes the root of the mean squared loss of single examples, which clients here do not report. It may also
    draw new clients by speed.

    Args:
      weights: [N] numbers of examples |B_i|, finite and >= 0, not all 0.
      cohort_size: m in [1, N].
      devices: what the clients run on, for rounds with a clock; None = the duration of rounds has no effect.
      preferred_seconds: the first T, positive.
      pacer_seconds: by how much T grows, positive.
      window: W, in rounds.
      penalty: alpha, in [0, 64].
      exploration: in [0, 1]; in round R, epsilon = max(least_exploration, exploration * exploration_decay^(R - 1)). The
        number of places epsilon m is rounded up or down at random.
      exploration_decay: in [0, 1].
      least_exploration: in [0, 1].
      cutoff: in (0, 1].

    Returns: a sampler with m slots. Its state is 16 bytes for each client, and a draw takes O(N). It goes inside of
    `with_clock`, which tells it how long clients take. Its cohorts depend on what it observes, so formulas, weights by
    examples, and accountants refuse it.

    Raises: ValueError or TypeError for values out of range.

    Guarantees:
      - clients are drawn by the distribution of exploitation and of exploration
        (tests/sampling/test_utility.py::test_exploitation_is_in_proportion_to_utility, ::test_exploration_ends)
      - slow clients are discounted, and T grows (::test_speed_counts, ::test_the_pacer)

    References: Lai et al. 2021 (Oort), sections 4.2 to 4.4, algorithm 1.

    >>> oort([10, 20, 30], 2).design.scheme
    'unknown_without_replacement'
    """
    sizes = checked_weights(weights).astype("float32")
    validate.integer("cohort_size", cohort_size, 1, len(sizes), hint="There are no more clients.")
    if devices is not None:
        check_devices(devices, len(sizes), "weights'")
    for name, seconds in (("preferred_seconds", preferred_seconds), ("pacer_seconds", pacer_seconds)):
        validate.positive(name, seconds)
    shares = {"exploration": exploration, "exploration_decay": exploration_decay}
    for name, fraction in (shares | {"least_exploration": least_exploration}).items():
        validate.in_range(name, fraction, 0, 1)
    per_second = 1 if devices is None else devices.ticks_per_second

    def init():
        size = len(sizes)
        zero = jnp.zeros((), jnp.int32)
        no_utility = jnp.full(size, jnp.nan, jnp.float32)
        preferred_ticks = jnp.float32(preferred_seconds * per_second)
        no_gains = jnp.zeros(2 * window, jnp.float32)
        zeros = jnp.zeros(size, jnp.int32)
        return _Oort(
            round=zero,
            utility=no_utility,
            seen=zeros,
            ticks=zeros,
            weights=jnp.asarray(sizes),
            preferred=preferred_ticks,
            gained=no_gains,
        )

    def sample(key, state):
        round = state.round + 1
        utility = _utility(state, round, penalty)
        is_known = ~jnp.isnan(utility)
        epsilon = jnp.maximum(least_exploration, exploration * exploration_decay ** state.round.astype(jnp.float32))
        num_new = len(sizes) - is_known.sum(dtype=jnp.int32)
        # Rounded at random: a share that is less than half a client in each round would otherwise never be explored.
        num_wanted = jnp.floor(epsilon * cohort_size + jax.random.uniform(stream(key, "rounding"))).astype(jnp.int32)
        # No more than there are new clients, and so many that the known clients can fill the other places.
        num_explored = jnp.clip(num_wanted, cohort_size + num_new - len(sizes), num_new)
        ids = _draw_clients(key, utility, cohort_size, num_explored, cutoff)
        invited = jnp.ones(cohort_size, bool)
        metrics = {"explored": num_explored, "preferred_seconds": state.preferred / per_second}
        return Cohort(ids, invited, invited, metrics), state._replace(round=round)

    def observe(state, cohort, outcome):
        gains = state.weights[cohort.ids] * outcome.losses
        is_observed = outcome.arrived & jnp.isfinite(gains)
        rows = jnp.where(is_observed, cohort.ids, len(sizes))  # a row past the end is dropped
        state = state._replace(
            utility=state.utility.at[rows].set(jnp.maximum(gains, 0), mode="drop"),
            seen=state.seen.at[rows].set(state.round, mode="drop"),
        )
        if cohort.timing.spent is not None and devices is not None:
            state = state._replace(ticks=state.ticks.at[rows].set(cohort.timing.spent.total, mode="drop"))
        round_gain = jnp.where(is_observed, jnp.maximum(gains, 0), 0).sum()
        gained = jnp.roll(state.gained, -1).at[-1].set(round_gain)
        # The pacer: once in W rounds, the last W rounds are compared with the W rounds before them.
        is_lower = gained[:window].sum() > gained[window:].sum()
        grows = (state.round % window == 0) & (state.round >= 2 * window) & is_lower
        preferred = state.preferred + jnp.where(grows, pacer_seconds * per_second, 0)
        return state._replace(preferred=preferred, gained=gained)

    metrics = (EXPLORED,) if devices is None else (EXPLORED, PREFERRED)
    design = _unknown_design(len(sizes), cohort_size, False)
    return Sampler(init, sample, cohort_size, design, observe=observe, metrics=metrics)


def _utility(state: _Oort, round: Array, penalty: float) -> Array:
    """Computes the utilities before a round, [N]; NaN for clients that never reported."""
    uncertainty = jnp.sqrt(0.1 * jnp.log(round.astype(jnp.float32)) / jnp.maximum(state.seen, 1).astype(jnp.float32))
    ticks = state.ticks.astype(jnp.float32)
    discount = (state.preferred / jnp.maximum(ticks, 1)) ** penalty
    return (state.utility + uncertainty) * jnp.where(ticks > state.preferred, discount, 1)


def _draw_clients(key: Array, utility: Array, cohort_size: int, num_explored: Array, cutoff: float) -> Array:
    """Draws clients by utility first, then clients that never reported.

    Client i is drawn in proportion to its utility u_i, successively, if u_i >= cutoff u_(k). Here u_(k) is the k-th
    largest utility, and k = m - num_explored the number of places by utility.

    Args:
      key: of the round.
      utility: [N] float32 >= 0; NaN for clients that never reported.
      cohort_size: m.
      num_explored: [] int32 in [0, m], at most the number of clients that never reported.
      cutoff: in (0, 1].

    Returns: [m] int32 ids, the clients by utility in front.
    """
    is_known = ~jnp.isnan(utility)
    num_exploited = cohort_size - num_explored
    ranked = jax.lax.top_k(jnp.where(is_known, utility, -jnp.inf), cohort_size)[0]
    least_utility = cutoff * ranked[jnp.maximum(num_exploited - 1, 0)]
    is_eligible = is_known & (utility >= least_utility)
    # The clients with the shortest waiting times are drawn in proportion to the rates of the times.
    waits = race(stream(key, "exploitation"), jnp.where(is_eligible, utility, 0))
    exploited = jax.lax.top_k(jnp.where(is_eligible, -waits, -jnp.inf), cohort_size)[1]
    waits = race(stream(key, "exploration"), jnp.ones_like(utility))
    explored = jax.lax.top_k(jnp.where(is_known, -jnp.inf, -waits), cohort_size)[1]
    slots = jnp.arange(cohort_size, dtype=jnp.int32)
    explored_in_slots = explored[jnp.maximum(slots - num_exploited, 0)]
    return jnp.where(slots < num_exploited, exploited, explored_in_slots).astype(jnp.int32)


def _with_observed_losses(losses: Array, cohort: Cohort, observed: Array) -> Array:
    """The losses [N] with the observed losses [m]; a client without a finite loss keeps its last one."""
    rows = jnp.where(cohort.invited & jnp.isfinite(observed), cohort.ids, losses.size)  # past the end: dropped
    return losses.at[rows].set(observed, mode="drop")


def _unknown_design(size: int, num_slots: int, replacement: bool) -> SamplingDesign:
    """The design of cohorts that depend on observations."""
    scheme = "unknown" if replacement else "unknown_without_replacement"
    return SamplingDesign(
        scheme=scheme, population_size=size, cohort_size=num_slots, num_slots=num_slots, response="others"
    )

"""This module simulates availability as a two-state Markov chain that can be read at any time without its history."""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.availability import slot_of, source
from fedjax_sim.network.distributions import unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.types import Availability
from fedjax_sim.validate import Integer

MISSED = 2.0**-30  # probability that a look back finds no slot which determines the state
MOST_SLOTS = 4096  # the most slots of a look back


@validate.named_arguments
def markov(
    mean_on_seconds: float,
    mean_off_seconds: float,
    *,
    slot_seconds: Annotated[int, Integer(1, 1073741824)] = 600,
    seed: int = 0,
) -> Availability:
    """A client is available for a while and then away for a while: a two-state chain that moves once in a slot.

    Each client's slots begin at a moment of its own. Each slot has one uniform draw u. Let a = slot / mean_on and b =
    slot / mean_off. If u < b, the slot switches the client on, and if u >= 1 - a, it switches the client off, whatever
    the state was. Otherwise the state stays.

    So the last slot that switches determines the state, and no state is kept: a look back reads the draws of earlier
    slots. It ends after a number of slots in which none switches with probability 2^-30, with a draw from the
    stationary law. The probability of each state is exact at any time. That of the states at two times together is
    exact to 2^-30.

    Args:
      mean_on_seconds, mean_off_seconds: mean lengths of a presence and of an absence. They must satisfy slot / on +
        slot / off <= 1, and a look back of at most 4,096 slots. That bounds the harmonic mean of the two by about 390
        slots.
      slot_seconds: length of a slot.
      seed: of the draws.

    Returns: `Availability`. A query costs as many draws as there are slots since the last switch, at most those of the
    look back.

    Raises: ValueError for means that are too short or too long for the slot.

    Guarantees: The chain's transitions and shares (tests/network/test_markov.py::test_the_law_is_the_chains), also far
    from the start and in any order of queries (::test_queries_agree).

    References: Propp and Wilson 1996 (coupling from the past), for a chain whose draws are kept.

    >>> markov(1200.0, 3600.0).rate(np.arange(1)).tolist()
    [0.25]
    """
    for name, mean in (("mean_on_seconds", mean_on_seconds), ("mean_off_seconds", mean_off_seconds)):
        validate.in_range(name, mean, slot_seconds, hint="Slots are shorter than what they tell apart.")
    off_probability = slot_seconds / mean_on_seconds
    on_probability = slot_seconds / mean_off_seconds
    if not off_probability + on_probability <= 1:
        hint = "Take shorter slots."
        validate.fail("slot_seconds", "slot / mean_on + slot / mean_off <= 1", slot_seconds, hint)
    # The probability that no slot switches is (1 - a - b)^n; it is 0 if every slot switches.
    num_slots = (
        1
        if off_probability + on_probability == 1
        else math.ceil(math.log(MISSED) / math.log1p(-(off_probability + on_probability)))
    )
    if num_slots > MOST_SLOTS:
        hint = f"A look back would read {num_slots} slots, more than {MOST_SLOTS}: take longer slots."
        validate.fail("slot_seconds", "slots that are long enough for the means", slot_seconds, hint)
    key = source("markov", seed, on=mean_on_seconds, off=mean_off_seconds, slot=slot_seconds)
    # The state before the look back has a key of its own, so that it is independent of the slots' draws.
    start = stream(key, "start")
    share = on_probability / (off_probability + on_probability)

    def at(ids, seconds):
        now, _ = slot_of(key, ids, seconds, slot_seconds)

        def is_undecided(carry):
            slots_back, is_decided, _ = carry
            return (slots_back < num_slots) & ~is_decided.all()

        def look_back(carry):
            slots_back, is_decided, is_on = carry
            draw = unit_draws(key, ids, now - slots_back)
            switches_now = ~is_decided & ((draw < on_probability) | (draw >= 1 - off_probability))
            return slots_back + 1, is_decided | switches_now, jnp.where(switches_now, draw < on_probability, is_on)

        # The state before the look back, which counts only if no slot of the look back switches.
        stationary_draw = unit_draws(start, ids, now - num_slots) < share
        carry = (jnp.int32(0), jnp.zeros(ids.shape, bool), stationary_draw)
        return jax.lax.while_loop(is_undecided, look_back, carry)[2]

    return Availability(at, lambda ids: np.full(np.shape(ids), share))

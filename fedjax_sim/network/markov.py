"""Availability that comes and goes as a two-state Markov chain, read at any time without its history."""

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

__all__ = ["markov"]

MISSED = 2.0**-30  # chance that a look back finds no slot which decides
MOST_SLOTS = 4096  # of a look back


@validate.named_arguments
def markov(
    mean_on_seconds: float,
    mean_off_seconds: float,
    *,
    slot_seconds: Annotated[int, Integer(1, 1073741824)] = 600,
    seed: int = 0,
) -> Availability:
    """A client is there for a while, away for a while: a stationary two-state chain that moves once in a slot of time.

    Each client's slots begin at a moment of its own. Each slot has one uniform draw u. With a = slot / mean_on and b
    = slot / mean_off, u < b switches a client on and u >= 1 - a switches it off, whatever it was; between them it
    stays. So the last slot that switches decides, and nothing is kept: a look back reads the draws of the slots
    before. It ends, in the stationary law, after as many slots as none of them switches with probability 2^-30: the
    chance of any state is exact at any time, and that of two times together to 2^-30.

    Args:
      mean_on_seconds, mean_off_seconds: mean lengths of a presence and of an absence; slot / on + slot / off <= 1, and
        a look back of at most 4,096 slots: the harmonic mean of the two is at most 390 slots.
      slot_seconds: length of a slot.
      seed: of the draws.

    Returns: `Availability`; a query costs as many draws as the slots since the last switch, at most the look back.

    Guarantees: the chain's transitions and shares (tests/network/test_markov.py::test_the_law_is_the_chains), also far
    from the start and in any order of queries (::test_queries_agree).

    References: Propp and Wilson 1996 (coupling from the past), for a chain whose draws are kept.

    >>> markov(1200.0, 3600.0).rate(np.arange(1)).tolist()
    [0.25]
    """
    for name, mean in (("mean_on_seconds", mean_on_seconds), ("mean_off_seconds", mean_off_seconds)):
        validate.in_range(name, mean, slot_seconds, hint="Slots are shorter than what they tell apart.")
    leaves, comes = slot_seconds / mean_on_seconds, slot_seconds / mean_off_seconds
    if not leaves + comes <= 1:
        hint = "Take shorter slots."
        validate.fail("slot_seconds", "slot / mean_on + slot / mean_off <= 1", slot_seconds, hint)
    slots = 1 if leaves + comes == 1 else math.ceil(math.log(MISSED) / math.log1p(-(leaves + comes)))
    if slots > MOST_SLOTS:
        hint = f"A look back would read {slots} slots, more than {MOST_SLOTS}: take longer slots."
        validate.fail("slot_seconds", "slots that are long enough for the means", slot_seconds, hint)
    key = source("markov", seed, on=mean_on_seconds, off=mean_off_seconds, slot=slot_seconds)
    start = stream(key, "start")
    share = comes / (leaves + comes)

    def at(ids, seconds):
        now, _ = slot_of(key, ids, seconds, slot_seconds)

        def undecided(carry):
            back, decided, _ = carry
            return (back < slots) & ~decided.all()

        def look(carry):
            back, decided, on = carry
            draw = unit_draws(key, ids, now - back)
            switches = ~decided & ((draw < comes) | (draw >= 1 - leaves))
            return back + 1, decided | switches, jnp.where(switches, draw < comes, on)

        before = unit_draws(start, ids, now - slots) < share
        return jax.lax.while_loop(undecided, look, (jnp.int32(0), jnp.zeros(ids.shape, bool), before))[2]

    return Availability(at, lambda ids: np.full(np.shape(ids), share))

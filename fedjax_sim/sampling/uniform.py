"""Samplers in which all clients are equally likely: uniform, with replacement, full participation, cyclic."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.prng import below, fold_in, random_bits, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.permutation import permute
from fedjax_sim.types import Array, Cohort, Sampler
from fedjax_sim.validate import PopulationSize, PositiveInt


class CyclicState(NamedTuple):
    """A `CyclicState` holds the progress of a cyclic sampler."""

    position: Array  # [] uint32 in [0, N), the number of clients already invited in this pass
    seed: Array  # [2] uint32, the seed of this pass's order; unused when not shuffled


def _everyone(ids: Array) -> Cohort:
    """The cohort of these clients, in which every slot is invited and reports."""
    invited = jnp.ones(ids.shape, bool)
    return Cohort(ids=ids, invited=invited, reported=invited)


def _check_without_replacement(population_size: int, cohort_size: int) -> None:
    validate.integer("population_size", population_size)
    hint = f"A cohort without replacement has at most N={population_size} clients; with_replacement has no such limit."
    validate.integer("cohort_size", cohort_size, 1, population_size, hint=hint)


def uniform(population_size: PopulationSize, cohort_size: int) -> Sampler:
    """Draws m of N clients without replacement, with all subsets equally likely, independently in each round.

    Args:
      population_size: N in [1, 2^31 - 1].
      cohort_size: m in [1, N].

    Returns: a sampler with m slots, all of them invited; a round costs O(m) for N > 1024.

    Raises: ValueError or TypeError for sizes out of range.

    Guarantees:
      - no client is drawn twice, pi_i = m/N, and pi_ij = m(m-1)/(N(N-1))
        (tests/sampling/test_uniform.py::test_every_subset_is_equally_likely, test_pair_covariance)
      - rounds are independent (test_rounds_are_independent)
      - above N = 1024 the permutation is pseudo-random, and the guarantees hold as far as its tests show
        (tests/sampling/test_permutation.py)

    References: Cochran 1977, sections 2.1 and 2.9.

    >>> uniform(1000, 10).design.inclusion_probabilities()
    0.01
    """
    _check_without_replacement(population_size, cohort_size)

    def sample(key, state):
        positions = jnp.arange(cohort_size, dtype=jnp.int32)
        return _everyone(permute(stream(key, "cohort"), positions, population_size)), state

    design = SamplingDesign(
        scheme="uniform_without_replacement",
        population_size=population_size,
        cohort_size=cohort_size,
        num_slots=cohort_size,
    )
    return Sampler(lambda: (), sample, cohort_size, design)


@validate.named_arguments
def with_replacement(population_size: PopulationSize, cohort_size: PositiveInt) -> Sampler:
    """Draws m clients uniformly and independently, so that a client may fill several slots.

    Args:
      population_size: N in [1, 2^31 - 1].
      cohort_size: m, any positive integer.

    Returns: a sampler with m slots, all of them invited.

    Raises: ValueError or TypeError for sizes out of range.

    Guarantees:
      - draws are independent (tests/sampling/test_uniform.py::test_draws_with_replacement_are_independent)
      - draws are uniform to a relative N / 2^64 (tests/test_prng.py::test_draws_among_many_are_uniform)

    References: Cochran 1977, section 2.10.

    >>> with_replacement(2, 3).design.inclusion_probabilities()
    0.875
    """

    def sample(key, state):
        return _everyone(below(stream(key, "cohort"), population_size, (cohort_size,))), state

    design = SamplingDesign(
        scheme="with_replacement",
        population_size=population_size,
        cohort_size=cohort_size,
        num_slots=cohort_size,
    )
    return Sampler(lambda: (), sample, cohort_size, design)


@validate.named_arguments
def full(population_size: PopulationSize) -> Sampler:
    """Invites every client in every round, in the order of ids (full participation).

    Args:
      population_size: N in [1, 2^31 - 1].

    Returns: a sampler with N slots; slot i holds client i.

    Raises: ValueError or TypeError for a size out of range.

    Guarantees: sampling has no variance at all (tests/sampling/test_uniform.py::test_full_participation_is_everyone).

    >>> full(3).design.inclusion_probabilities()
    1.0
    """

    def sample(key, state):
        return _everyone(jnp.arange(population_size, dtype=jnp.int32)), state

    design = SamplingDesign(
        scheme="full", population_size=population_size, cohort_size=population_size, num_slots=population_size
    )
    return Sampler(lambda: (), sample, population_size, design)


@validate.named_arguments
def cyclic(population_size: PopulationSize, cohort_size: int, *, shuffled: bool = False) -> Sampler:
    """Invites clients in turn, m at a time, in one pass over the population after another.

    Not shuffled, a cohort that reaches the last client continues with client 0. Shuffled, each pass has a new random
    order. If m does not divide N, the last cohort of such a pass is smaller: its other slots are padding, so that no
    client is invited twice in a pass.

    Args:
      population_size: N in [1, 2^31 - 1].
      cohort_size: m in [1, N].
      shuffled: True: a new random order for each pass. False: the order 0, 1, ..., N-1.

    Returns: a sampler with m slots. Its inclusion probability is the long-run fraction of rounds.

    Raises: ValueError or TypeError for values out of range.

    Guarantees:
      - if it is not shuffled, N rounds invite each client exactly m times
        (tests/sampling/test_uniform.py::test_cyclic_covers_everyone_evenly)
      - if it is shuffled, ceil(N/m) rounds invite each client exactly once (test_shuffled_pass_covers_everyone_once)

    References: Mishchenko, Khaled and Richtarik 2020 (random reshuffling).

    >>> cyclic(10, 4, shuffled=True).design.cohort_size  # the mean of 4, 4 and 2
    3.3333333333333335
    """
    _check_without_replacement(population_size, cohort_size)
    rounds_in_pass = -(-population_size // cohort_size)

    def init():
        return CyclicState(jnp.zeros((), jnp.uint32), jnp.zeros((2,), jnp.uint32))

    def in_order(key, state):
        places = state.position + jnp.arange(cohort_size, dtype=jnp.uint32)  # below 2N < 2^32
        ids = (places % jnp.uint32(population_size)).astype(jnp.int32)
        position = (state.position + jnp.uint32(cohort_size)) % jnp.uint32(population_size)
        return _everyone(ids), CyclicState(position, state.seed)

    def in_random_order(key, state):
        new_seed = random_bits(stream(key, "cohort"), 2)
        seed = jnp.where(state.position == 0, new_seed, state.seed)
        # The order of a pass is kept as a seed, not as N ids: `permute` evaluates it at the places of the cohort.
        order_key = fold_in(fold_in(jax.random.key(0), seed[0]), seed[1])
        places = state.position + jnp.arange(cohort_size, dtype=jnp.uint32)
        invited = places < jnp.uint32(population_size)
        ids = permute(order_key, places % jnp.uint32(population_size), population_size)
        position = state.position + jnp.uint32(cohort_size)
        position = jnp.where(position < jnp.uint32(population_size), position, jnp.uint32(0))
        return Cohort(ids=ids, invited=invited, reported=invited), CyclicState(position, seed)

    divides = population_size % cohort_size == 0
    design = SamplingDesign(
        scheme="shuffled_cyclic" if shuffled else "cyclic",
        population_size=population_size,
        cohort_size=cohort_size if divides or not shuffled else population_size / rounds_in_pass,
        num_slots=cohort_size,
    )
    return Sampler(init, in_random_order if shuffled else in_order, cohort_size, design)

"""Wrappers that decide how much of its local work each client of a cohort does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.sampling.participation import client_bits
from fedjax_sim.sampling.time.cut import untimed
from fedjax_sim.sampling.time.lost_reports import losing
from fedjax_sim.types import Metric, Sampler, Work
from fedjax_sim.validate import Integer

ONE_FIXED = "one with fixed numbers of steps"
STRAGGLERS = Metric("stragglers", "stragglers whose work was dropped", "count")
# Shares of the work lie below k / num_parts by this part of them. Otherwise float32 could round a product of a share
# and a number of steps up, past the whole number of steps that it is.
BELOW = 2.0**-22


def _work_spec(sampler: Sampler) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of `Cohort.work`; None if clients do all of their work."""
    return jax.eval_shape(lambda: sampler.sample(jax.random.key(0), sampler.init())[0].work)


@validate.named_arguments
def with_stragglers(
    sampler: Sampler,
    share: float,
    *,
    num_parts: Annotated[int, Integer(1, 1024)] | None = None,
    late: Literal["partial", "dropped"] = "partial",
) -> Sampler:
    """Some clients (stragglers) complete only part of their local work until the round ends.

    A client is a straggler in a round with probability `share`, independently. A straggler completes a part of its
    local steps that is uniform in (0, 1], rounded up to whole steps. So of K steps it takes 1, ..., K steps, equally
    likely. Of several such wrappers the smallest part counts.

    Args:
      sampler: any sampler, with or without `Cohort.work`, but without fixed numbers of steps.
      share: in [0, 1], below 1 for "dropped"; may be traced, so that a sweep can vary it.
      num_parts: a straggler completes k of so many equal parts of its work, k = 1, ..., num_parts equally likely. The
        number of local epochs E makes it whole epochs, for clients of up to 2^21 steps. None: any number of steps.
      late: what happens to a straggler's update. "partial": the client sends what it has, as in FedProx. "dropped": the
        client does not report, as in FedAvg, also where its part happens to be all of the work. The stragglers and
        their parts are the same in both.

    Returns: a sampler of the same cohorts whose `Cohort.work` is [m] float32 in (0, 1], and 1 for clients that are no
    stragglers. `round.collect` refuses it with clients that cannot stop early. With "dropped",
    `metrics["stragglers"]` counts those who do not report.

    Raises: ValueError or TypeError for options out of range; ValueError around `with_local_steps`.

    Guarantees:
      - work has the stated distribution, independent of the cohort
        (tests/sampling/test_work.py::test_law_of_stragglers) and of slots; a second wrapper draws anew
        (::test_stragglers_belong_to_clients)
      - with parts, a straggler of E epochs completes 1, ..., E whole epochs, equally likely
        (::test_epochs_of_stragglers), and exactly the steps of these epochs (::test_parts_are_whole_epochs)
      - "dropped" loses exactly the reports of the stragglers (::test_dropped_are_the_stragglers), and is a round of
        those who finish alone (tests/client/test_stragglers.py::test_dropped_leave_a_round_of_the_others)
      - a share may be traced (tests/sampling/test_work.py::test_share_may_be_traced)
      - share 0 is the sampler without the wrapper, up to rounding
        (tests/client/test_stragglers.py::test_no_stragglers)

    References: Li et al. 2020 (FedProx), section 5.2, where an exact share of each cohort straggles; here each client
    does with a probability.

    >>> import jax
    >>> from fedjax_sim.sampling.uniform import uniform
    >>> late = with_stragglers(uniform(100, 4), 1.0)
    >>> cohort, _ = jax.jit(late.sample)(jax.random.key(0), late.init())
    >>> cohort.work.shape, bool((cohort.work > 0).all()), bool((cohort.work <= 1).all())
    ((4,), True, True)
    """
    untimed(sampler, "with_stragglers")
    are_dropped = late == "dropped"
    hint = "It is a client's probability to be a straggler."
    validate.in_range("share", share, 0, 1, open_high=are_dropped, hint=hint)
    work_spec = _work_spec(sampler)
    if work_spec is not None and jnp.issubdtype(work_spec.dtype, jnp.integer):
        hint = "Numbers of steps are fixed there, and not shares of the work: leave one of the two out."
        validate.fail("sampler", "one that does not fix its clients' steps, for with_stragglers", ONE_FIXED, hint)

    def with_partial_work(key, cohort):
        work_before = jnp.ones(cohort.ids.shape, jnp.float32) if cohort.work is None else cohort.work
        name = "straggler" if cohort.work is None else "another straggler"  # a second wrapper has streams of its own
        # 24 random bits, which a float32 holds exactly.
        who, part = (client_bits(stream(key, f"{name} {draw}"), cohort.ids) >> 8 for draw in ("who", "part"))
        part = (part + 1).astype(jnp.float32) * jnp.float32(2.0**-24)  # in (0, 1]
        if num_parts is not None:
            part = jnp.ceil(part * num_parts) * jnp.float32((1 - BELOW) / num_parts)
        is_straggler = who.astype(jnp.float32) * jnp.float32(2.0**-24) < share
        cohort = cohort._replace(work=jnp.where(is_straggler, jnp.minimum(part, work_before), work_before))
        if not are_dropped:
            return cohort
        sent = None if cohort.timing.sent is None else cohort.timing.sent & ~is_straggler
        return losing(cohort.timed(sent=sent), STRAGGLERS.name, cohort.reported & is_straggler)

    if not are_dropped:
        return sampler.then(with_partial_work)
    response_rate = None if isinstance(share, Tracer) else 1 - float(share)
    design = dataclasses.replace(sampler.design, response_rates=(*sampler.design.response_rates, response_rate))
    # A second wrapper adds to the metric of the first, which states it.
    metrics = () if STRAGGLERS in sampler.metrics else (STRAGGLERS,)
    return sampler.then(with_partial_work, design, metrics)


def with_local_steps(sampler: Sampler, steps: Sequence[int]) -> Sampler:
    """Clients take different numbers of local steps: client i takes `steps[i % len(steps)]` in every round.

    Args:
      sampler: any sampler without `Cohort.work`.
      steps: K_i, each in [1, K] for local work of `num_steps` K: one number for each client, or a shorter list that
        repeats.

    Returns: a sampler of the same cohorts whose `Cohort.work` is [m] int32. `round.collect` refuses it with clients
    that cannot stop early.

    Raises: ValueError or TypeError for numbers out of range, for more numbers than clients, and for a sampler whose
      clients do part of their work; ValueError at `init` of the algorithm for a number above its `num_steps`.

    Guarantees:
      - each client takes its number of steps (tests/sampling/test_work.py::test_local_steps_are_taken)
      - numbers that would be cut off, or contradict another wrapper, are refused (::test_wrong_input)

    References: Wang et al. 2020 (FedNova), section 3, on clients with K_i local steps.

    >>> import jax
    >>> from fedjax_sim.sampling.uniform import full
    >>> unequal = with_local_steps(full(4), [1, 5])
    >>> jax.jit(unequal.sample)(jax.random.key(0), ())[0].work.tolist()
    [1, 5, 1, 5]
    """
    untimed(sampler, "with_local_steps")
    validate.sequence("steps", steps)
    for i, number in enumerate(steps):
        validate.steps(f"steps[{i}]", number)
    if len(steps) > sampler.design.population_size:
        validate.fail("steps", f"at most {sampler.design.population_size} numbers, one a client", len(steps))
    work_spec = _work_spec(sampler)
    if work_spec is not None:
        has_shares = jnp.issubdtype(work_spec.dtype, jnp.floating)
        hint = "Local work is planned once: leave one of the two out."
        refused = "one with stragglers" if has_shares else ONE_FIXED
        validate.fail("sampler", "one whose clients do all of their work, for with_local_steps", refused, hint)
    numbers = np.asarray(steps, np.int32)

    def tell(state, work: Work):
        if isinstance(work.steps, int) and work.steps < numbers.max():
            hint = "The local work's num_steps is the most that a client may take: raise it."
            validate.fail("steps", f"at most {work.steps} local steps", int(numbers.max()), hint)
        return state if sampler.tell is None else sampler.tell(state, work)

    def with_fixed_steps(key, cohort):
        return cohort._replace(work=jnp.asarray(numbers)[cohort.ids % len(numbers)])

    return sampler.then(with_fixed_steps)._replace(tell=tell)

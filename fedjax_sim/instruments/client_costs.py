"""Measures what a round costs each client in bytes, seconds and joules, for `theory.allocate`; nobody trains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.prng import init_key
from fedjax_sim.round.state import FederatedState
from fedjax_sim.sampling.design import one_for_one
from fedjax_sim.sampling.time.cut import price_in, priced_by_part
from fedjax_sim.theory.allocation import ClientCosts
from fedjax_sim.types import Algorithm, Array, Cohort, Population, PyTree, Sampler

PLAIN_SAMPLER = "with_clock(uniform(N, m), devices)"


@validate.named_arguments
def client_costs(algorithm: Algorithm, params: PyTree, population: Population) -> ClientCosts:
    """Returns what a whole round costs each client: bytes both ways, and seconds and joules of each phase.

    Bytes are those of the algorithm's messages, after its transforms. Seconds and joules follow from the devices of its
    sampler, `with_clock(uniform(N, m), devices)`, as in a run. The cohort size does not matter. If the clock has
    scales, the costs are those of the larger model.

    Args:
      algorithm: of one message a client and round.
      params: the model's parameters.
      population: all clients.

    Returns: `theory.ClientCosts`. `joules` is None if a client spends none: devices without energy state none, and an
      energy that is not known is no energy of zero. `overhead_seconds` of a clock is not known here, and is 0.

    Raises: ValueError for rounds that `theory.allocate` does not describe: without a clock, with a deadline or other
      causes of lost reports, with partial work, with availability, with times that differ between rounds (`jitter`), of
      clients that are federations, with two messages, and with bytes that depend on the cohort (secure sums).

    Guarantees: Cohorts of the real sampler spend what `theory.allocate` says, with and without a deadline
    (tests/instruments/test_client_costs.py::test_cohorts_spend_what_is_predicted).
    """
    validate.part("algorithm", algorithm, Algorithm)
    star = algorithm.parts
    if star is None or star.sampler is None or star.sampler.devices is None:
        hint = f"Seconds and joules are those of devices: sampling.{PLAIN_SAMPLER}."
        validate.fail("algorithm", "one whose sampler has a clock", "one whose rounds take no time", hint)
    key = jax.random.key(0)
    state = algorithm.init(init_key(key), params, population)
    if not isinstance(state, FederatedState):
        validate.fail("algorithm", "synchronous rounds of a star", type(state).__name__, "Such as fedavg.")
    _check_sampler(star.sampler, state.sampler)
    price = price_in(state.sampler)
    for name, value in (("federations as clients", price.inside), ("two messages a round", price.before),
                        ("bytes that depend on the cohort", price.by_invited)):  # fmt: skip
        if value is not None:
            validate.fail("algorithm", "one message of a fixed size from each client", name)
    devices = star.sampler.devices
    ids = jnp.arange(population.size, dtype=jnp.int32)
    everyone = jnp.ones(population.size, bool)
    loads = price.loads(Cohort(ids, everyone, everyone))

    @jax.jit
    def spent(key: Array) -> tuple[Array, Array]:
        ticks, joules = priced_by_part(devices, key, ids, loads)
        return jnp.stack(ticks), jnp.stack(joules)

    ticks, joules = (np.asarray(x, np.float64) for x in spent(key))
    if not np.array_equal(ticks, spent(jax.random.key(1))[0]):
        validate.fail("devices", "times that are the same in every round", "times that differ", "Leave out the jitter.")
    # Phases are told apart by differences in float32, which may end a little below zero.
    joules = np.maximum(joules, 0)
    return ClientCosts(
        float(price.bytes_down),
        float(price.bytes_up),
        ticks / devices.ticks_per_second,
        joules if (joules.sum(0) > 0).all() else None,
    )


def _check_sampler(sampler: Sampler, state: PyTree) -> None:
    """Refuses samplers with which invited clients are lost or do less work.

    Args:
      sampler: with a clock, whose design says who reports.
      state: of the sampler, of which only shapes count.

    Raises: ValueError for rates of response, deadlines, availability, limits of reports, and partial work.
    """
    assert sampler.devices is not None, "checked by the caller"
    design = sampler.design
    is_plain = (
        one_for_one(design)
        and design.response == "random"
        and not design.response_rates
        and design.client_rates is None
        and design.max_reports is None
        and sampler.devices.availability is None
    )
    if not is_plain:
        validate.fail("sampler", PLAIN_SAMPLER, design, "Deadlines are arguments of theory.allocate.")
    if jax.eval_shape(sampler.sample, jax.random.key(0), state)[0].work is not None:
        validate.fail("sampler", PLAIN_SAMPLER, "one whose clients do part of their work")

"""Measures what each client is worth to a federation: Shapley values and leave-one-out, by training coalitions anew."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.population.members import Members
from fedjax_sim.prng import init_key
from fedjax_sim.types import Algorithm, Array, Population, PyTree
from fedjax_sim.validate import Integer, NonNegativeInt, PositiveInt

MOST_EXACT = 12  # clients of whom all 2^N coalitions are trained


class ClientValues(NamedTuple):
    """What clients are worth, in the unit of the value."""

    shapley: np.ndarray  # [N]; their sum is value_of_all - value_of_none
    standard_errors: np.ndarray  # [N] of the Shapley values; 0 where all coalitions were trained
    leave_one_out: np.ndarray  # [N] the value of all clients less that of all others
    value_of_all: float
    value_of_none: float
    num_coalitions: int  # that were trained


@validate.named_arguments
def client_values(
    algorithm: Algorithm,
    params: PyTree,
    population: Population,
    num_rounds: PositiveInt,
    value: Callable,
    *,
    key: Array,
    num_permutations: Annotated[int, Integer(2)] | None = None,
    seed: NonNegativeInt = 0,
    batch: PositiveInt = 16,
) -> ClientValues:
    """Computes each client's Shapley value: its mean marginal value over all orders in which clients may join.

    Each coalition is trained from the same model with the same keys, so that cohorts, minibatches and noise are common
    to all. A client outside of a coalition has no rows. A value costs a training: N clients have 2^N coalitions, and R
    permutations at most R (N - 1) + N + 2.

    Args:
      algorithm: one whose state and population fit the device as often as `batch` says.
      params: the initial model.
      population: the clients.
      num_rounds: of each training.
      value: params -> number, traced; more is better, such as the accuracy on a test set.
      key: of all trainings, as for `run`.
      num_permutations: R, of which the Shapley values are the mean; None for all coalitions of at most 12 clients.
      seed: of the permutations.
      batch: coalitions under one vmap, which share a program.

    Raises: ValueError for more than 12 clients without `num_permutations`, and for a value that is no single number;
    FloatingPointError for a value that is not finite, and if a client's update was not finite: it would be dropped, and
    the client be worth nothing.

    Guarantees: values are those of separate runs up to rounding, and of the definition's sum
    (tests/instruments/test_client_value.py::test_values_are_those_of_runs). They add up to the value of all clients
    less that of none, with permutations too. A client without rows is worth 0, and equal clients are worth the same.
    Permutations meet the exact values within their errors (::test_permutations). No epsilon covers them.

    References: Shapley 1953; Ghorbani and Zou 2019 (Data Shapley), for the permutations; Wang et al. 2020, section 3.
    """
    num_clients = population.size
    if num_permutations is None and num_clients > MOST_EXACT:
        hint = "They would need 2^N trainings. Give num_permutations."
        validate.fail("population", f"at most {MOST_EXACT} clients", num_clients, hint)
    everyone = (1 << num_clients) - 1
    without_each = [everyone ^ (1 << i) for i in range(num_clients)]
    if num_permutations is None:
        orders = None
        coalitions = list(range(1 << num_clients))
    else:
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(num_clients).tolist() for _ in range(num_permutations)]
        prefixes = [prefix for order in orders for prefix in _prefixes(order)]
        coalitions = list(dict.fromkeys([0, everyone, *without_each, *prefixes]))
    is_member = np.array([[coalition >> i & 1 for i in range(num_clients)] for coalition in coalitions], bool)
    coalition_values, num_dropped = _trained(
        algorithm, params, population, is_member, num_rounds=num_rounds, value=value, key=key, batch=batch
    )
    if num_dropped:
        raise FloatingPointError(f"{num_dropped} updates were not finite: lower the learning rate.")
    if not np.isfinite(coalition_values).all():
        num_not_finite = (~np.isfinite(coalition_values)).sum()
        raise FloatingPointError(f"{num_not_finite} values are not finite: lower the learning rate.")
    worth = dict(zip(coalitions, coalition_values.tolist(), strict=True))
    if orders is None:
        shapley, errors = _all_orders(worth, num_clients), np.zeros(num_clients)
    else:
        marginals = np.array([_marginals(worth, order) for order in orders])
        shapley, errors = marginals.mean(0), marginals.std(0, ddof=1) / len(orders) ** 0.5
    leave_one_out = np.array([worth[everyone] - worth[coalition] for coalition in without_each])
    return ClientValues(
        shapley=shapley,
        standard_errors=errors,
        leave_one_out=leave_one_out,
        value_of_all=worth[everyone],
        value_of_none=worth[0],
        num_coalitions=len(coalitions),
    )


def _prefixes(order: list[int]) -> list[int]:
    """Returns the coalitions of an order, from nobody to everybody, as bit sets.

    >>> _prefixes([1, 0])
    [0, 2, 3]
    """
    prefixes = [0]
    for client in order:
        prefixes.append(prefixes[-1] | 1 << client)
    return prefixes


def _marginals(worth: dict[int, float], order: list[int]) -> np.ndarray:
    """Returns what each client adds when clients join in this order, [N]."""
    prefixes = _prefixes(order)
    marginals = np.zeros(len(order))
    for client, before, after in zip(order, prefixes[:-1], prefixes[1:], strict=True):
        marginals[client] = worth[after] - worth[before]
    return marginals


def _all_orders(worth: dict[int, float], num_clients: int) -> np.ndarray:
    """Returns the Shapley values from all coalitions: sum_S (v(S + i) - v(S)) / (N C(N - 1, |S|)) over S without i.

    Args:
      worth: v, of each of the 2^N coalitions. Client i is in a coalition if its bit i is set.
      num_clients: N.

    Returns: [N] float64.

    >>> _all_orders({0: 0.0, 1: 1.0, 2: 0.0, 3: 3.0}, 2).tolist()
    [2.0, 1.0]
    """
    shapley = np.zeros(num_clients)
    for coalition, value in worth.items():
        for client in range(num_clients):
            if not coalition >> client & 1:
                share = 1 / (num_clients * comb(num_clients - 1, coalition.bit_count()))
                shapley[client] += share * (worth[coalition | 1 << client] - value)
    return shapley


def _trained(
    algorithm: Algorithm,
    params: PyTree,
    population: Population,
    is_member: np.ndarray,
    *,
    num_rounds: int,
    value: Callable,
    key: Array,
    batch: int,
) -> tuple[np.ndarray, int]:
    """Trains each coalition from the same model with the same keys, and returns what its model is worth.

    Args:
      algorithm, params, population: as in `client_values`.
      is_member: [C, N] bool, the clients of each coalition. The others have no rows.
      num_rounds: T of each training, >= 1.
      value: params -> number, traced.
      key: of all trainings; round t has the key fold_in(key, t).
      batch: the most coalitions under one vmap.

    Returns: the values [C] float64, in the order of the coalitions; and how many updates of clients were not finite, in
      all trainings together. Such an update was left out.

    Raises: ValueError for a value that is no single number.
    """

    def replay(key, params, population, members):
        people = Members(population, members, population.size)

        def one_round(t, carry):
            state, num_dropped = carry
            state, info = algorithm.step(jax.random.fold_in(key, t), state, people)
            return state, num_dropped + info.get("dropped_clients", 0)

        state = algorithm.init(init_key(key), params, people)
        # Python's numbers have weak types, which a loop's carry must not change.
        state = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), state)
        state, num_dropped = jax.lax.fori_loop(0, num_rounds, one_round, (state, jnp.int32(0)))
        worth = jnp.asarray(value(algorithm.params(state)), jnp.float32)
        if worth.shape:
            validate.fail("value", "a function whose result is a single number", f"an array {list(worth.shape)}")
        return worth, num_dropped

    @jax.jit
    def of_all(key, params, population, is_member):
        def of_coalition(members):
            return replay(key, params, population, members)

        return jax.lax.map(of_coalition, is_member, batch_size=min(batch, len(is_member)))

    with engine.one_device(), engine.client_memory("device"):
        coalition_values, num_dropped = jax.device_get(of_all(key, params, population, jnp.asarray(is_member)))
    return coalition_values.astype(np.float64), int(num_dropped.sum())

"""Error feedback and EF21: compressors with a memory of what they left out.

- Memory: both keep as many numbers for each client as its update has, [N, d] in all. A round reads and writes the
  cohort's rows (`engine.client_memory` says where they are stored). A client that does not report keeps its memory.
- Order: both wrap a whole chain, `error_feedback(chain(top_k(0.01), quantize(8)))`. What a member after them loses
  would not enter the memory.
- Compressor: both need a contraction, E |C(x) - x|^2 < |x|^2. They refuse a compressor that is no contraction for equal
  or for normal entries.
- Sampling: both need cohorts drawn without replacement, since a client has one memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import prng, tree, validate
from fedjax_sim.types import Array, PyTree, UpdateTransform
from fedjax_sim.validate import PopulationSize


class Memory(NamedTuple):
    """A `Memory` is the memory of one client."""

    numbers: PyTree  # the residual e_i, or EF21's g_i; float32 at least
    inner: PyTree  # the memory of the wrapped transform


class State(NamedTuple):
    """The state of EF21's server."""

    mean: PyTree  # g, the mean of all g_i
    inner: PyTree  # the state of the wrapped transform


def _zeros(update_spec: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), update_spec)


def _check(transform: UpdateTransform) -> None:
    """Refuses an argument that is no transform, and a transform with noise."""
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "The memory would take the noise back in later rounds: put the mechanism after it, with chain."
        validate.fail("transform", "a compressor without noise", transform.facts.noise.mechanism, hint)


def _memory(transform: UpdateTransform, send: Callable, update_spec: PyTree) -> Memory:
    """Makes a client's memory before its first round, of zeros.

    It refuses a transform that has such a memory already, and a transform that is no contraction, under which the
    memory would grow.

    Args:
      transform: the compressor.
      send: `_sender` of the transform.
      update_spec: shapes and dtypes of an update.
    """
    inner = transform.init_client(update_spec)
    if any(isinstance(x, Memory) for x in jax.tree.leaves(inner, is_leaf=lambda x: isinstance(x, Memory))):
        hint = "The outer memory would undo the inner one's work: wrap once, around the whole chain."
        validate.fail("transform", "a compressor without error feedback or EF21 of its own", "one with it", hint)
    hint = "The memory would grow without end: use the unscaled form, such as random_k(scaled=False), or send more."
    validate.contraction("transform", send, update_spec, hint=hint)
    return Memory(_zeros(update_spec), inner)


def _sender(transform: UpdateTransform) -> Callable:
    """Returns (key, update) -> the numbers that a message decodes to, without anything remembered."""

    def send(key, x):
        spec = tree.spec(x)
        state = transform.init(spec)
        _, decoded, _, _ = _sent(transform, key, x, x, state=state, memory=transform.init_client(spec))
        return decoded

    return send


def _sent(
    transform: UpdateTransform, key: Array, wanted: PyTree, update: PyTree, *, state: PyTree, memory: PyTree
) -> tuple[PyTree, PyTree, PyTree, Any]:
    """Compresses `wanted` in the update's dtypes.

    Args:
      transform: the compressor.
      key: of the client.
      wanted: the numbers to send, in the structure of the update; in a round float32 at least, in the trial of a
        compressor the update's dtypes.
      update: read for its dtypes alone.
      state, memory: of the compressor, at the server and at the client.

    Returns: (message, the numbers that it decodes to, the compressor's next memory, what it measured).
    """
    narrow = jax.tree.map(lambda x, u: x.astype(u.dtype), wanted, update)
    message, memory, measured = transform.on_client(key, narrow, state, memory)
    decoded = message
    if transform.facts.integer_range is not None:
        # Decoding is linear, so the server's end, which decodes a sum, decodes a single message too.
        decoded, _, _ = transform.on_server(key, None, message, state, measured, None)
    return message, decoded, memory, measured


def error_feedback(transform: UpdateTransform) -> UpdateTransform:
    """A client adds to its update what the compressor left out in earlier rounds (error feedback).

    With a compressor C, an update u and a residual e, a client sends C(u + e) and keeps e <- u + e - C(u + e).

    Args:
      transform: C, a contraction. It may be biased, have a memory of its own, or be a chain. If it sends integers, e is
        the difference from their decoded value.

    Returns: a transform with the wire and the bound of C. It is biased in each round. Over rounds, a client's messages
    add up to its updates, up to the last e.

    Raises: ValueError for a transform with noise. When the update's shape is known, also for a transform that has such
      a memory already, and for a transform that is no contraction: its error is no less than the update itself, for
      equal or for normal entries. Examples are a scaled random_k of half the entries or fewer, and a few levels for
      many numbers.

    Guarantees:
      - what was sent plus e is the sum of the updates, to 2^-22 of the largest update for each round
        (tests/transform/test_feedback.py::test_sent_and_residual_add_up_to_the_updates)
      - memories of clients that did not report stay (test_only_reporting_clients_remember)
      - it converges to the optimum where the bare compressor stalls
        (test_feedback_converges_where_the_bare_compressor_stalls)

    References: Seide et al. 2014 (1-bit SGD); Stich, Cordonnier and Jaggi 2018, algorithm 1; Karimireddy et al. 2019,
    algorithm 2.

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.transform import error_feedback, top_k
    >>> feedback, key = error_feedback(top_k(count=1)), jax.random.key(0)
    >>> update = jnp.array([4.0, 3.0])
    >>> state, memory, send = feedback.init(update), feedback.init_client(update), jax.jit(feedback.on_client)
    >>> sent, memory, _ = send(key, update, state, memory)
    >>> sent_next, _, _ = send(key, update, state, memory)
    >>> sent.tolist(), sent_next.tolist()
    ([4.0, 0.0], [0.0, 6.0])
    """
    _check(transform)

    def on_client(key, update, state, memory):
        wanted = jax.tree.map(lambda m, u: m + u.astype(m.dtype), memory.numbers, update)
        message, decoded, inner, measured = _sent(transform, key, wanted, update, state=state, memory=memory.inner)
        numbers = jax.tree.map(jnp.subtract, wanted, decoded)
        return message, Memory(numbers, inner), measured

    feedback = transform._replace(
        init_client=partial(_memory, transform, _sender(transform)), on_client=on_client, squared_error=None
    )
    return feedback.stating(nonexpansive=False, unbiased=False, exact_error=False)


@validate.named_arguments
def ef21(transform: UpdateTransform, population_size: PopulationSize) -> UpdateTransform:
    """Clients send compressed changes of an estimate of their update, and the server applies the mean estimate (EF21).

    With a compressor C, client i keeps an estimate g_i of its update u_i. It sends C(u_i - g_i) and keeps
    g_i <- g_i + C(u_i - g_i). The server applies g, the mean of all g_i. What is compressed, u_i - g_i, vanishes as the
    updates converge. So a constant step size converges even if the updates of single clients do not vanish.

    Clients that do not report keep their g_i, and their last g_i stays in g (EF21-PP). So g moves by the sum of the
    cohort's messages over N, the aggregate of `aggregation.fixed_mean(population_size)`. Other aggregators are refused:
    a mean over the cohort would move g by N/m times too much, and by another factor in each round.

    Args:
      transform: C, a contraction, as in `error_feedback`.
      population_size: N.

    Returns: a transform whose server end returns g in place of the aggregate. All g_i and g start at zero.

    Raises: as `error_feedback`; ValueError, when the first round is built, for an aggregator other than
      `fixed_mean(population_size)`.

    Guarantees:
      - g is the mean of all g_i, whoever reported
        (tests/transform/test_feedback.py::test_ef21_keeps_the_mean_of_the_memories)
      - with the same updates in every round, g_i converges to u_i (test_ef21_converges_to_the_updates)
      - it reaches the optimum of quadratics under full and partial participation (test_ef21_reaches_the_optimum)

    References: Richtarik, Sokolov and Fatkhullin 2021, algorithm 2; Fatkhullin et al. 2021 (EF21 with bells and
    whistles), algorithm 4 (partial participation).
    """
    _check(transform)

    def on_client(key, update, state, memory):
        wanted = jax.tree.map(lambda u, g: u - g, update, memory.numbers)
        message, decoded, inner, measured = _sent(
            transform, key, wanted, update, state=state.inner, memory=memory.inner
        )
        numbers = jax.tree.map(jnp.add, memory.numbers, decoded)
        return message, Memory(numbers, inner), measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        if cohort is not None and not (sensitivity and math.isclose(sensitivity * population_size, 1, rel_tol=1e-6)):
            refused = "one without a sensitivity" if not sensitivity else f"one that divides by {1 / sensitivity:g}"
            hint = "Messages are steps of g, the mean over all clients."
            validate.fail("aggregator", f"aggregation.fixed_mean({population_size}), as ef21 needs", refused, hint)
        aggregate, inner, metrics = transform.on_server(
            prng.stream(key, "ef21"), cohort, aggregate, state.inner, measured, sensitivity
        )
        step = aggregate
        mean = jax.tree.map(lambda g, x: g + x.astype(g.dtype), state.mean, step)
        return mean, State(mean, inner), metrics

    tracking = transform._replace(
        init=lambda update_spec: State(_zeros(update_spec), transform.init(update_spec)),
        init_client=partial(_memory, transform, _sender(transform)),
        on_client=on_client,
        on_server=on_server,
        squared_error=None,
    )
    return tracking.stating(nonexpansive=False, unbiased=False, exact_error=False, mirrored=True)

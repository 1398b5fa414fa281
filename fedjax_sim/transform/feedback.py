"""Compressors with a memory of what they left out: error feedback and EF21.

Both keep as many numbers for each client as its update has, [N, d] in all, of which a round reads and writes the
cohort's rows (`engine.client_memory`: where they are stored). A client that does not report keeps its memory as it was.
Both wrap a whole chain, `error_feedback(chain(top_k(0.01), quantize(8)))`: what a member after them loses would not
enter the memory. Both need a contraction, E |C(x) - x|^2 < |x|^2, and refuse a compressor that is none for equal or for
normal entries. Both need cohorts drawn without replacement, as a client has one memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, prng, tree, validate
from fedjax_sim.types import Array, PyTree, UpdateTransform
from fedjax_sim.validate import PopulationSize

__all__ = ["ef21", "error_feedback"]


class Memory(NamedTuple):
    """What one client remembers."""

    numbers: PyTree  # the residual e_i, or EF21's g_i; float32 at least
    inner: PyTree  # of the transform underneath


class State(NamedTuple):
    """What EF21's server remembers."""

    mean: PyTree  # g, the mean of all g_i
    inner: PyTree


def _zeros(update_spec: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), update_spec)


def _check(transform: UpdateTransform) -> None:
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "The memory would take the noise back in later rounds: put the mechanism after it, with chain."
        validate.fail("transform", "a compressor without noise", transform.facts.noise.mechanism, hint)


def _memory(transform: UpdateTransform, update_spec: PyTree) -> Memory:
    """A memory of zeros. Refuses a transform that has such a memory already, or under which this one would grow."""
    inner = transform.init_client(update_spec)
    if any(isinstance(x, Memory) for x in jax.tree.leaves(inner, is_leaf=lambda x: isinstance(x, Memory))):
        hint = "The outer memory would undo the inner one's work: wrap once, around the whole chain."
        validate.fail("transform", "a compressor without error feedback or EF21 of its own", "one with it", hint)
    hint = "The memory would grow without end: use the unscaled form, such as random_k(scaled=False), or send more."

    def send(key, x):
        return _sent(transform, key, x, x, transform.init(update_spec), transform.init_client(update_spec))[1]

    validate.contraction("transform", send, update_spec, hint=hint)
    return Memory(_zeros(update_spec), inner)


def _sent(transform: UpdateTransform, key: Array, wanted: PyTree, update: PyTree, state: Any, memory: Any):
    """(message, the numbers that it decodes to, inner memory, measured) for `wanted`, in the update's dtypes."""
    narrow = jax.tree.map(lambda x, u: x.astype(u.dtype), wanted, update)
    message, memory, measured = transform.on_client(key, narrow, state, memory)
    decoded = message
    if transform.facts.integer_range is not None:  # decoding is linear, so the server's end decodes one message too
        decoded, _, _ = transform.on_server(key, None, message, state, measured, None)
    return message, decoded, memory, measured


def error_feedback(transform: UpdateTransform) -> UpdateTransform:
    """Any compressor C, fed with what it left out before: a client sends C(u + e) and keeps e <- u + e - C(u + e).

    Args:
      transform: a contraction, biased or not, with a memory of its own or not, a chain, or one that sends integers
        (then e is a difference to their decoded value).

    Returns: a transform of the same wire and the same bound on its messages. It is biased in each round; over rounds a
    client's messages add up to its updates, up to the last e.

    Raises: ValueError for a transform with noise; and, when the update's shape is known, for one that has such a memory
    already, or whose error is no less than the update itself, for equal or for normal entries (a scaled random_k of
    half the entries or fewer, a few levels for many numbers).

    Guarantees: what was sent plus e is the sum of the updates, to 2^-22 of the largest of them a round
    (tests/transform/test_feedback.py::test_sent_and_residual_add_up_to_the_updates); memories of clients that did not
    report stay (test_only_reporting_clients_remember); converges to the optimum where the bare compressor stalls
    (test_feedback_converges_where_the_bare_compressor_stalls).

    References: Seide et al. 2014 (1-bit SGD); Stich, Cordonnier and Jaggi 2018, algorithm 1; Karimireddy et al. 2019,
    algorithm 2.

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.transform import error_feedback, top_k
    >>> ef, key, u = error_feedback(top_k(count=1)), jax.random.key(0), jnp.array([4.0, 3.0])
    >>> sent, memory, _ = ef.on_client(key, u, ef.init(u), ef.init_client(u))
    >>> sent.tolist(), ef.on_client(key, u, ef.init(u), memory)[0].tolist()
    ([4.0, 0.0], [0.0, 6.0])
    """
    _check(transform)

    def on_client(key, update, state, memory):  # what is kept as well as sent is computed once: equal bits
        wanted = engine.computed_once(jax.tree.map(lambda m, u: m + u.astype(m.dtype), memory.numbers, update), key)
        message, decoded, inner, measured = _sent(transform, key, wanted, update, state, memory.inner)
        numbers = engine.computed_once(jax.tree.map(jnp.subtract, wanted, decoded), key)
        return message, Memory(numbers, inner), measured

    made = transform._replace(
        init_client=lambda update_spec: _memory(transform, update_spec), on_client=on_client, squared_error=None
    )
    return made.stating(nonexpansive=False, unbiased=False, exact_error=False)


@validate.named_arguments
def ef21(transform: UpdateTransform, population_size: PopulationSize) -> UpdateTransform:
    """EF21: client i sends C(u_i - g_i) and keeps g_i <- g_i + C(u_i - g_i); the server applies g, the mean of all g_i.

    What is compressed, u_i - g_i, vanishes as the updates converge; so a constant step size converges even where single
    clients' updates do not vanish. Clients that do not report keep their g_i, and their last g_i stays in g (EF21-PP):
    g moves by the sum of the cohort's messages over N, the aggregate of `aggregation.fixed_mean(population_size)`. Any
    other aggregator is refused: a mean over the cohort would move g by N/m times too much, and by another factor in
    each round.

    Args:
      transform: a contraction, as for `error_feedback`.
      population_size: N.

    Returns: a transform whose server end gives g in place of the aggregate; its g_i and g start at zero.

    Raises: as `error_feedback`; ValueError when the first round is built with an aggregator other than
    `fixed_mean(population_size)`.

    Guarantees: g is the mean of all g_i, whoever reported
    (tests/transform/test_feedback.py::test_ef21_keeps_the_mean_of_the_memories); with the same updates in every round
    g_i converges to u_i (test_ef21_converges_to_the_updates); it reaches the optimum of quadratics by full and partial
    participation (test_ef21_reaches_the_optimum).

    References: Richtarik, Sokolov and Fatkhullin 2021, algorithm 2; Fatkhullin et al. 2021 (EF21 with bells and
    whistles), algorithm 4 (partial participation).
    """
    _check(transform)

    def on_client(key, update, state, memory):
        wanted = engine.computed_once(jax.tree.map(lambda u, g: u - g, update, memory.numbers), key)
        message, decoded, inner, measured = _sent(transform, key, wanted, update, state.inner, memory.inner)
        numbers = engine.computed_once(jax.tree.map(jnp.add, memory.numbers, decoded), key)
        return message, Memory(numbers, inner), measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        if cohort is not None and not (sensitivity and math.isclose(sensitivity * population_size, 1, rel_tol=1e-6)):
            got = "one without a sensitivity" if not sensitivity else f"one that divides by {1 / sensitivity:g}"
            hint = "Messages are steps of g, the mean over all clients."
            validate.fail("aggregator", f"aggregation.fixed_mean({population_size}), as ef21 needs", got, hint)
        aggregate, inner, metrics = transform.on_server(
            prng.stream(key, "ef21"), cohort, aggregate, state.inner, measured, sensitivity
        )
        step = engine.rounded_here(aggregate, key)
        mean = jax.tree.map(lambda g, x: g + x.astype(g.dtype), state.mean, step)
        return mean, State(mean, inner), metrics

    made = transform._replace(
        init=lambda update_spec: State(_zeros(update_spec), transform.init(update_spec)),
        init_client=lambda update_spec: _memory(transform, update_spec),
        on_client=on_client,
        on_server=on_server,
        squared_error=None,
    )
    return made.stating(nonexpansive=False, unbiased=False, exact_error=False, mirrored=True)

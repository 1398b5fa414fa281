"""DP-SGD inside a client hides each record of the client's data from everybody who sees the client's message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree, validate
from fedjax_sim.client.clipping import GRADIENTS, clipped_sum
from fedjax_sim.client.local_sgd import is_unrolled
from fedjax_sim.client.losses import check_own, own_weight
from fedjax_sim.prng import fold_in, normal, stream
from fedjax_sim.types import Array, ClientData, ClientFacts, ClientUpdate, Noise, PyTree, Report
from fedjax_sim.validate import NonNegative, Positive

OVERFLOW = 1e-9  # bound on the probability that a Poisson batch exceeds its slots
SAMPLING = ("poisson", "shuffled")


@validate.named_arguments
def private_sgd(
    loss_fn: Callable,
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    learning_rate: NonNegative,
    *,
    num_steps: int,
    batch_size: int,
    num_examples: int,
    microbatch_size: int | None = None,
    sampling: Literal["poisson", "shuffled"] = "poisson",
    weighting: Literal["examples", "uniform"] = "uniform",
    gradients: str = "auto",
) -> ClientUpdate:
    """Makes a client whose every local SGD step is differentially private for each record of its data.

    With clipped per-example gradients and an expected batch size B, a step is

        w <- w - (learning_rate / B) (sum_{i in batch} g_i min(1, C / |g_i|) + N(0, (z C)^2 I)).

    A record that is added or removed moves the sum by at most C. The divisor B is fixed, whatever size was drawn.
    Gradients are clipped in float32. A gradient that is not finite there counts as zero, and its loss is left out of
    the metrics, so no record can cause the message to be dropped. The analysis assumes real numbers (see
    `prng.normal`).

    Args:
      loss_fn: as in `local_sgd`; an example's gradient is that of its own loss, whatever its "weight" above 0.
      clip_norm: C > 0, the bound on the L2 norm of one example's gradient over all leaves.
      noise_multiplier: z >= 0; 0 gives no privacy. May be traced.
      learning_rate: >= 0. May be traced.
      num_steps: K.
      batch_size: B.
      num_examples: n >= B, a public upper bound on a client's rows; a record is in a batch with probability q = B / n.
        Smaller clients draw proportionally smaller batches, so every record of the population counts alike.
      microbatch_size: number of examples whose gradients are computed at once; None for a whole batch.
      sampling: how a batch is drawn. "poisson": every record independently with probability q. A batch has so many
        slots that its size exceeds them with probability below 1e-9; then a uniform subset is kept. "shuffled": B
        records at a time without replacement, which accountants of Poisson sampling do not cover.
      weighting: the weight that the client reports. "uniform": 1, whatever the client holds, and an empty client sends
        noise like the others. "examples": the number of examples, or the sum of their "weight" where the loss gives
        one. The client then reveals this number without noise: it is outside of every guarantee.
      gradients: how an example's gradient is clipped. "vmap": it is held in memory as a whole, for each example of a
        microbatch. "ghost": for a kernel that an example uses once, in one product with one vector, as in dense layers,
        the gradient is never formed: its norm follows from two vectors, and the clipped sum is one matmul; refused if
        another parameter has two axes or more. "auto": ghost norms for such kernels, and "vmap" for the rest.

    Returns: a stateless ClientUpdate. `noise` has unit "record", place "local" and the multiplier of one step's sum;
    `details` has `sampling` ("poisson", "truncated_poisson" or "shuffled"), `rate` (q), `steps` (K, in a round that the
    client takes part in), `num_examples` (n) and `max_batch_size` (slots). Metrics are means over the batches'
    examples, with `clipped_share`, the share of these examples whose gradient was clipped. Metrics are NOT private.

    Raises: ValueError, TypeError for options out of range, and for clients with more than `num_examples` rows.

    Guarantees: no example contributes more than C, whatever its gradient
    (tests/client/test_private.py::test_contributions_are_bounded); adding or removing a record moves the noiseless sum
    by at most C, in 10^4 pairs (::test_neighbouring_records); noise of std z C, fresh for each step and number
    (::test_noise_level); with z = 0 and no clip, `local_sgd` on the same batches (::test_without_privacy_it_is_sgd);
    microbatches change rounding only (::test_microbatches); Poisson inclusion (::test_records_are_drawn_by_poisson);
    padding rows change nothing (::test_padding). Ghost norms change rounding only (tests/client/test_ghost.py::
    test_sums_agree, ::test_extremes, ::test_neighbouring_records), and no kernel's gradients are held in memory
    (::test_no_gradient_is_held).

    References: Abadi et al. 2016, algorithm 1; Mironov, Talwar and Zhang 2019 (Poisson batches); Li et al. 2022,
    section 4 (ghost norms).

    >>> import jax, jax.numpy as jnp
    >>> client = private_sgd(lambda w, x, key: w * x, 1.0, 0.0, 0.5, num_steps=1, batch_size=2, num_examples=2)
    >>> data = ClientData(jnp.array([3.0, 0.5]), jnp.array([True, True]))  # gradients 3, clipped to 1, and 0.5
    >>> round(float(client.apply(jax.random.key(0), jnp.zeros(()), (), data)[0].update), 4)
    -0.375
    >>> client.facts.noise.unit, client.facts.noise.details["rate"]
    ('record', 1.0)
    """
    check_own(loss_fn)
    _check_batches(num_steps, batch_size, num_examples, microbatch_size)
    validate.one_of("gradients", gradients, GRADIENTS)
    rate = batch_size / num_examples
    slots = batch_size if sampling == "shuffled" else _poisson_slots(num_examples, rate)
    sum_of_clipped_gradients = jax.jit(
        partial(clipped_sum, loss_fn, clip_norm=clip_norm, microbatch_size=microbatch_size, gradients=gradients)
    )

    def apply(key: Array, broadcast: PyTree, state: PyTree, data: ClientData):
        if data.mask.shape[0] > num_examples:
            hint = "q = batch_size / num_examples: give the rows of the largest client."
            validate.fail("num_examples", f"at least {data.mask.shape[0]}", num_examples, hint)
        batch = _batches(key, data, sampling, rate, slots)
        loss_key = stream(key, "loss")
        noise_key = stream(key, "noise")

        def one_step(step, carry, batch):
            params, sums = carry
            gradient, means = sum_of_clipped_gradients(params, batch, fold_in(loss_key, step))
            noise = _noise(fold_in(noise_key, step), gradient, noise_multiplier * clip_norm)
            gradient = jax.tree.map(jnp.add, gradient, noise)
            params = jax.tree.map(lambda w, g: w - (learning_rate / batch_size * g).astype(w.dtype), params, gradient)
            return params, jax.tree.map(jnp.add, sums, means)

        first_batch = jax.eval_shape(batch, jnp.int32(0))
        means = jax.eval_shape(sum_of_clipped_gradients, broadcast, first_batch, loss_key)[1]
        carry = (broadcast, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means))
        if is_unrolled(num_steps):
            batches = jax.vmap(batch)(jnp.arange(num_steps, dtype=jnp.int32))
            for step in range(num_steps):
                carry = one_step(step, carry, jax.tree.map(lambda x, i=step: x[i], batches))
        else:
            carry = jax.lax.fori_loop(0, num_steps, lambda step, carry: one_step(step, carry, batch(step)), carry)
        params, metrics = carry
        weight = jnp.ones(()) if weighting == "uniform" else own_weight(loss_fn, broadcast, data, loss_key)
        return Report(tree.subtract(params, broadcast), weight, metrics), state

    # With a slot for every record no Poisson batch is ever cut.
    poisson_name = "poisson" if slots == num_examples else "truncated_poisson"
    details = {
        "sampling": poisson_name if sampling == "poisson" else sampling,
        "rate": rate,
        "steps": num_steps,
        "num_examples": num_examples,
        "max_batch_size": slots,
    }
    noise = Noise(
        mechanism="gaussian",
        place="local",
        multiplier=noise_multiplier,
        clip_norm=clip_norm,
        unit="record",
        details=details,
    )
    facts = ClientFacts(
        num_steps=num_steps,
        noise=noise,
        uniform_weights=weighting == "uniform",
        needs_weights=weighting == "examples",
        scalable=True,
    )
    return ClientUpdate(lambda params: (), apply, facts)


def _check_batches(num_steps: int, batch_size: int, num_examples: int, microbatch_size: int | None) -> None:
    """Raises ValueError or TypeError for numbers out of range."""
    validate.steps("num_steps", num_steps)
    validate.integer("num_examples", num_examples)
    validate.integer("batch_size", batch_size, 1, num_examples, hint="At most num_examples: q = B / n.")
    if microbatch_size is not None:
        validate.integer("microbatch_size", microbatch_size)


def _batches(key: Array, data: ClientData, sampling: str, rate: float, slots: int) -> Callable:
    """Makes the function (step) -> the step's batch, in which rows with a False mask do not count.

    Args:
      key: of the client; batches are drawn from it.
      data: of the client, [rows, ...], padding included.
      sampling: "poisson": every example independently with probability q. "shuffled": the next examples of a random
        order, which is drawn anew in each epoch.
      rate: q in (0, 1]; read with "poisson" alone.
      slots: rows of a batch, at least 1. Of more examples a uniform subset is kept.

    Returns: (step [] int32) -> `ClientData` [min(slots, rows), ...].
    """
    rows = data.mask.shape[0]
    own_slots = min(slots, rows)
    order = engine.shuffle(key, data.mask)
    num_examples = data.mask.sum(dtype=jnp.int32)

    def batch(step):
        places = jnp.arange(own_slots, dtype=jnp.int32)
        if sampling == "shuffled":
            steps_per_epoch = jnp.maximum(-(-num_examples // own_slots), 1)
            epoch = step // steps_per_epoch
            epoch_places = (step % steps_per_epoch) * own_slots + places
            return _take_rows(data, order(epoch, epoch_places), epoch_places < num_examples)
        is_drawn = data.mask
        if rate < 1:
            bits = jax.random.bits(fold_in(stream(key, "batch"), step), (rows,), jnp.uint32)
            is_drawn &= bits < jnp.uint32(int(rate * 2.0**32))
        if own_slots == rows:
            return ClientData(data.examples, is_drawn)
        # The coin flips decide the size of the batch alone. Its members are the first rows of a random order, which
        # has the same distribution and needs fewer slots than all rows.
        num_drawn = is_drawn.sum(dtype=jnp.int32)
        return _take_rows(data, order(step, places), places < num_drawn)

    return batch


def _noise(key: Array, like: PyTree, std: float | Array) -> PyTree:
    """Draws noise of the given std, shaped like a pytree, in one draw for all leaves."""
    leaves, structure = jax.tree.flatten(like)
    drawn = std * normal(key, (sum(x.size for x in leaves),))
    ends = np.cumsum([x.size for x in leaves])
    parts = [drawn[end - x.size : end].reshape(x.shape) for end, x in zip(ends.tolist(), leaves, strict=True)]
    return structure.unflatten(parts)


def _poisson_slots(num_examples: int, rate: float) -> int:
    """Finds the smallest number that the size of a Poisson batch exceeds with probability below 1e-9."""
    from scipy import stats

    # SciPy's quantile may be one too small, by its rounding.
    slots = max(1, int(stats.binom.isf(OVERFLOW, num_examples, rate)))
    while not stats.binom.sf(slots, num_examples, rate) < OVERFLOW:
        slots += 1
    return min(slots, num_examples)


def _take_rows(data: ClientData, rows: Array, mask: Array) -> ClientData:
    """These rows of the data, with a mask of their own."""
    # Computed once, or the places would be worked out anew for each number that is read.
    rows, mask = jax.lax.optimization_barrier((rows, mask))
    return ClientData(tree.take_rows(data.examples, rows), mask)

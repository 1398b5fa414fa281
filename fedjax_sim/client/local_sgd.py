"""Local training of one client: minibatches without replacement, any optax optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.prng import below, shuffle, stream
from fedjax_sim.types import Array, ClientData, ClientUpdate, Mean, PyTree, Report

__all__ = [
    "Training",
    "full_gradient_at",
    "local_sgd",
    "local_training",
    "loss_and_metrics",
    "minibatch_steps",
    "send_model",
]

UNROLLED_STEPS = 8


class Training(NamedTuple):
    """What local training leaves behind."""

    params: PyTree
    metrics: dict[str, Mean]  # `local_<metric>`, over the examples met while training
    num_steps: Array  # [] int32 steps really taken
    num_examples: Array  # [] int32
    weight: Array  # [] float32 number of own examples, or the sum of their weights where the loss gives them


def loss_and_metrics(loss_fn: Callable, params: PyTree, examples: PyTree, mask: Array, key: Array | None):
    """The mean loss over the examples where `mask`, and every metric as a `Mean` named `local_<metric>`.

    Local, for models in training move away from the server's: the mean of such losses over a round is no objective.

    Args:
      loss_fn: (params, examples, key) -> losses [b], or a dict of per-example values [b] that holds "loss" and, if
        examples count unequally, "weight", and no "steps", which is taken. key None means evaluation.
      examples: leaves [b, ...]; rows where the mask is False are replaced by zeros before the loss sees them.
    """
    out = loss_fn(params, tree.where(mask, examples, tree.zeros_like(examples)), key)
    out = dict(out) if isinstance(out, dict) else {"loss": out}
    if "loss" not in out or any(jnp.shape(x) != mask.shape for x in out.values()):
        shapes = {name: jnp.shape(x) for name, x in out.items()}
        validate.fail("loss_fn", f"one 'loss' per example, shape {mask.shape}", shapes, "Do not average over examples.")
    if "steps" in out:
        validate.fail("loss_fn", "names other than 'steps', which are the solver's", sorted(out), "Rename it.")
    weights = jnp.where(mask, out.pop("weight", 1.0), 0.0).astype(jnp.float32)
    means = {f"local_{name}": Mean((jnp.where(mask, x, 0) * weights).sum(), weights.sum()) for name, x in out.items()}
    loss = means["local_loss"]
    return loss.total / jnp.where(loss.weight > 0, loss.weight, 1), means


def _own_weight(loss_fn: Callable, params: PyTree, data: ClientData, key: Array) -> Array:
    """The sum of the weights of a client's own examples; 1 each unless the loss gives a "weight"."""
    examples = tree.where(data.mask, data.examples, tree.zeros_like(data.examples))
    given = jax.eval_shape(loss_fn, params, examples, key)
    if not isinstance(given, dict) or "weight" not in given:
        return data.mask.sum(dtype=jnp.float32)
    weights = loss_fn(params, examples, None)["weight"]  # the compiler drops what only the loss needs
    return jnp.where(data.mask, weights, 0).sum(dtype=jnp.float32)


def full_gradient_at(loss_fn: Callable, params: PyTree, data: ClientData, key: Array | None):
    """(gradient of the mean loss over all of a client's examples, metrics); zero without examples."""
    return jax.grad(lambda p: loss_and_metrics(loss_fn, p, data.examples, data.mask, key), has_aux=True)(params)


def _own_work(key: Array, straggler_share: float, most: int) -> Array:
    """[] int32 epochs or steps that a client gets done: a straggler's are uniform in 1..most."""
    who, amount = jax.random.split(stream(key, "straggler"))
    part = 1 + below(amount, most)
    return jnp.where(jax.random.uniform(who) < straggler_share, part, most)


def local_training(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    num_steps: int | None,
    num_epochs: int | None,
    batch_size: int | None,
    straggler_share: float = 0.0,
) -> Callable:
    """(key, params, data, correct, at=None) -> Training; `correct(gradients, params)` comes before the optimiser.

    Each epoch visits every example once in a fresh random order; its last batch may be partial and is a step of its
    own. With `num_steps`, batches continue through as many epochs as that takes. With `at`, a model, each batch's
    gradient there is the third argument of `correct`.
    """
    validate.loss_function(loss_fn)
    validate.optimizer("optimizer", optimizer)
    validate.in_range("straggler_share", straggler_share, 0, 1)
    stragglers = not (isinstance(straggler_share, (int, float)) and straggler_share == 0)  # it may be traced
    if (num_steps is None) == (num_epochs is None):
        validate.fail("num_steps, num_epochs", "exactly one of the two", (num_steps, num_epochs))
    validate.steps(*(("num_epochs", num_epochs) if num_steps is None else ("num_steps", num_steps)))
    if stragglers and 1 in (num_steps, num_epochs):
        hint = "A part of one is one: give clients more epochs or steps, or leave it out."
        validate.fail("straggler_share", "0 with a single epoch or step", straggler_share, hint)
    if batch_size is not None:
        validate.integer("batch_size", batch_size, hint="Leave it out for full-batch steps.")

    @jax.jit  # traced once, however many steps are written out
    def gradient(params: PyTree, batch: ClientData, key: Array):
        return full_gradient_at(loss_fn, params, batch, key)

    def train(key: Array, params: PyTree, data: ClientData, correct: Callable, at: PyTree | None = None) -> Training:
        rows = data.mask.shape[0]
        size = rows if batch_size is None else min(batch_size, rows)
        num_examples = data.mask.sum(dtype=jnp.int32)
        steps_per_epoch = jnp.maximum(-(-num_examples // size), 1)
        work = num_steps if num_epochs is None else num_epochs
        work = _own_work(key, straggler_share, work) if stragglers else work
        own_steps = work if num_epochs is None else work * steps_per_epoch
        most_steps = num_steps if num_epochs is None else num_epochs * -(-rows // size)
        if most_steps > validate.MOST_STEPS:
            validate.fail("num_epochs", f"at most {validate.MOST_STEPS} steps", most_steps, "Make larger batches.")
        zero = tree.hidden_zero(params)
        loss_key, order = stream(key, "loss"), shuffle(key, data.mask, zero)

        def batch(step):
            if size == rows:
                return data
            positions = (step % steps_per_epoch) * size + jnp.arange(size)
            epoch, positions, mask = tree.settled((step // steps_per_epoch, positions, positions < num_examples), zero)
            return ClientData(tree.take(data.examples, tree.settled(order(epoch, positions), zero)), mask)

        def one_step(step, carry, batch):
            params, state, sums = carry
            step_key = jax.random.fold_in(loss_key, step)
            gradients, means = gradient(params, batch, step_key)
            there = () if at is None else (gradient(at, batch, step_key)[0],)
            updates, state = optimizer.update(correct(gradients, params, *there), state, params)
            return optax.apply_updates(params, updates), state, jax.tree.map(jnp.add, sums, means)

        _, means = jax.eval_shape(lambda: loss_and_metrics(loss_fn, params, data.examples, data.mask, loss_key))
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means)
        carry = (params, optimizer.init(params), sums)
        if (num_epochs is None and num_steps <= UNROLLED_STEPS and not stragglers) or most_steps == 1:
            batches = jax.vmap(batch, out_axes=None if size == rows else 0)(jnp.arange(most_steps))
            for step in range(most_steps):
                one = batches if size == rows else jax.tree.map(lambda x, i=step: x[i], batches)
                carry = one_step(step, carry, one)
        else:  # a client with fewer examples stops earlier; under vmap the longest of its lanes decides
            carry = jax.lax.fori_loop(0, own_steps, lambda step, carry: one_step(step, carry, batch(step)), carry)
        params, _, sums = carry
        num_steps_taken = jnp.asarray(own_steps, jnp.int32) * (num_examples > 0)
        weight = _own_weight(loss_fn, params, data, loss_key)
        return Training(params, sums, num_steps_taken, num_examples, weight)

    return train


def local_sgd(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    straggler_share: float = 0.0,
) -> ClientUpdate:
    """Local training with an optax optimiser whose state starts afresh each round.

    Args:
      loss_fn: (params, examples, key) -> per-example losses [b], or a dict of them (see `loss_and_metrics`).
      optimizer: any optax transformation; schedules count local steps.
      num_steps: K, or `num_epochs`: E, exactly one. E epochs are E ceil(n/b) steps, so unequal clients then take
        unequal numbers of steps.
      batch_size: b; None for all examples at each step.
      weighting: the weight that the client reports: "examples" (n, or the sum of its examples' "weight" where the loss
        gives one, such as tokens) or "uniform" (1); 0 without examples.
      straggler_share: the chance, in [0, 1], that a client does part of its work in a round: a number of epochs (or of
        steps) uniform in 1..E, E > 1, drawn afresh for each round and client; may be traced. The work done is sent, as
        FedProx has it; `sampling.with_dropout` loses it instead.

    Returns: a stateless ClientUpdate; update = local params - broadcast params; metrics `local_loss` and
    `local_<metric>` for each one of the loss, over the minibatches met while the model moved: no objective at any one
    model, for which see `metrics.evaluation(train=...)`.

    Guarantees: matches a NumPy loop on ragged clients with partial batches (tests/oracles/test_fedavg.py); one
    full-batch step of everybody is a centralised step (tests/oracles/test_centralised.py); each epoch visits each
    example once (tests/client/test_local_sgd.py::test_an_epoch_visits_each_example_once); partial work has the law
    above and stops the same trajectory early (tests/client/test_stragglers.py).

    References: McMahan et al. 2017, algorithm 1 (ClientUpdate); Li et al. 2020 (FedProx), section 5.2 (stragglers:
    there an exact share of each cohort, here each client by a chance of its own).

    >>> import jax, jax.numpy as jnp, optax
    >>> from fedjax_sim.types import ClientData
    >>> client = local_sgd(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), num_steps=1)
    >>> data = ClientData(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False]))
    >>> report, _ = client.apply(jax.random.key(0), jnp.zeros(()), (), data)
    >>> float(report.update), float(report.weight)
    (1.0, 2.0)
    """
    validate.one_of("weighting", weighting, ("examples", "uniform"))
    train = local_training(
        loss_fn,
        optimizer,
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        straggler_share=straggler_share,
    )
    steps = minibatch_steps(num_steps, num_epochs, batch_size)
    return _client(train, lambda broadcast: lambda gradients, params: gradients, weighting, steps)


def minibatch_steps(num_steps: int | None, num_epochs: int | None, batch_size: int | None) -> int | Callable | None:
    """`ClientUpdate.num_steps` of local training; the most that a straggler may take."""
    if batch_size is None or num_epochs is None:
        return None if batch_size is None else num_steps
    return lambda examples: num_epochs * jnp.maximum(-(-examples // batch_size), 1)


def _client(train: Callable, correction: Callable, weighting: str, num_steps: int | Callable | None) -> ClientUpdate:
    """A stateless client; `correction(broadcast)` gives the change of its gradients."""

    def apply(key, broadcast, state, data):
        done = train(key, broadcast, data, correction(broadcast))
        present = done.num_examples > 0
        weight = jnp.where(present, done.weight if weighting == "examples" else 1.0, 0.0)
        steps = Mean(done.num_steps.astype(jnp.float32), present.astype(jnp.float32))
        update = tree.subtract(done.params, broadcast)
        return Report(update, weight, done.metrics | {"local_steps": steps}), state

    return ClientUpdate(lambda params: (), apply, num_steps=num_steps, uniform_weights=weighting == "uniform")


def send_model(client: ClientUpdate) -> ClientUpdate:
    """The same client, handing over its model instead of the difference; compose with `server.replacement`.

    Guarantees: equal to the update form if and only if the aggregator's weights sum to one
    (tests/client/test_local_sgd.py::test_model_and_update_forms_agree_only_for_weights_that_sum_to_one).
    """

    def apply(key, broadcast, state, data):
        report, state = client.apply(key, broadcast, state, data)
        return report._replace(update=jax.tree.map(jnp.add, broadcast, report.update)), state

    return client._replace(apply=apply)

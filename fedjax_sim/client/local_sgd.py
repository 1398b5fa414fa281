"""Local training of one client, by any optax optimiser on minibatches that are drawn without replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import engine, tree, validate
from fedjax_sim.client.losses import check_own, full_gradient_at, loss_and_metrics, own_weight
from fedjax_sim.client.optimizers import OverRounds
from fedjax_sim.client.work import LocalWork
from fedjax_sim.prng import fold_in, stream
from fedjax_sim.types import Array, ClientData, ClientFacts, ClientUpdate, Mean, PyTree, Report

UNROLLED_STEPS = 8  # the most local steps that are written out one after the other, on accelerators


class TrainingResult(NamedTuple):
    """A `TrainingResult` is the result of local training."""

    params: PyTree  # the local model after training
    metrics: dict[str, Mean]  # `local_<metric>`, over the minibatches of the training
    num_steps: Array  # [] int32 steps actually taken
    num_examples: Array  # [] int32
    weight: Array  # [] float32 number of own examples, or the sum of their weights where the loss gives them

    def report(self, update: PyTree, by_examples: bool) -> Report:
        """Makes the client's report.

        Args:
          update: what the client sends.
          by_examples: True: the report weighs as much as the client's examples; False: it weighs 1. A client without
            examples reports weight 0 in both cases.

        Returns: `Report`; its metrics are those of the training and `local_steps`.
        """
        has_examples = self.num_examples > 0
        weight = jnp.where(has_examples, self.weight if by_examples else 1.0, 0.0)
        local_steps = Mean(self.num_steps.astype(jnp.float32), has_examples.astype(jnp.float32))
        return Report(update, weight, self.metrics | {"local_steps": local_steps})


def local_training(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    work: LocalWork,
    gradient_at: Callable = full_gradient_at,
) -> Callable:
    """Makes the training loop that all solvers share, as a function of one client's data.

    Each epoch visits every example once; its last batch may be partial and is a step of its own. With `num_steps`,
    batches continue through as many epochs as the steps need. A client with partial work (`data.work`) stops the same
    trajectory early.

    Args:
      loss_fn, optimizer, work: as in `local_sgd`.
      gradient_at: (loss_fn, params, batch, key) -> (gradient, metrics) of one minibatch, such as the gradient of the
        loss after inner steps on the same minibatch; by default that of the loss.

    Returns: (key, params, data, correct, at=None) -> `TrainingResult`. `correct(gradients, params)` changes the
    gradients before the optimiser sees them. With a model `at`, `correct` has a third argument: the gradient of the
    same batch, with the same key, at that model.
    """
    check_own(loss_fn)
    validate.optax_transformation("optimizer", optimizer)
    if not isinstance(work, LocalWork):
        validate.fail("work", "a LocalWork", work, "Call client.work(num_steps=..., batch_size=...).", TypeError)
    if (work.num_steps is None) == (work.num_epochs is None):
        validate.fail("work", "one of num_steps and num_epochs", work, "Make it by client.work, which checks this.")

    @jax.jit  # traced once, however many steps are unrolled
    def gradient(params: PyTree, batch: ClientData, key: Array):
        return gradient_at(loss_fn, params, batch, key)

    def train(
        key: Array, params: PyTree, data: ClientData, correct: Callable, at: PyTree | None = None
    ) -> TrainingResult:
        rows = data.mask.shape[0]
        size = rows if work.batch_size is None else min(work.batch_size, rows)
        num_examples = data.mask.sum(dtype=jnp.int32)
        # At least 1: a client without examples takes steps on padding, whose gradients are zero.
        steps_per_epoch = jnp.maximum(-(-num_examples // size), 1)
        own_steps = work.own_steps(steps_per_epoch, data.work)
        most_steps = work.most_steps(size, rows)
        loss_key = stream(key, "loss")
        round_options = {"round": data.round} if isinstance(optimizer, OverRounds) else {}
        batch = _batches(
            key,
            data,
            size=size,
            steps_per_epoch=steps_per_epoch,
            num_examples=num_examples,
            shuffled=work.shuffle,
        )

        def one_step(step_key, carry, batch):
            params, state, sums = carry
            gradients, means = gradient(params, batch, step_key)
            # The same batch and key, so that both gradients have the same minibatch noise.
            gradients_at = () if at is None else (gradient(at, batch, step_key)[0],)
            corrected = correct(gradients, params, *gradients_at)
            with jax.numpy_dtype_promotion("standard"):  # optax's code promotes
                updates, state = optimizer.update(corrected, state, params, **round_options)
            return optax.apply_updates(params, updates), state, jax.tree.map(jnp.add, sums, means)

        _, means = jax.eval_shape(lambda: loss_and_metrics(loss_fn, params, data.examples, data.mask, loss_key))
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means)
        carry = (params, optimizer.init(params), sums)
        takes_all_steps = work.num_epochs is None and data.work is None
        if most_steps == 1 or (takes_all_steps and is_unrolled(most_steps)):
            # All batches are gathered at once. A full batch is the same at every step, so it has no axis of steps.
            batches = jax.vmap(batch, out_axes=None if size == rows else 0)(jnp.arange(most_steps))
            for step, step_key in enumerate(fold_in(loss_key, jnp.arange(most_steps))):
                step_batch = batches if size == rows else jax.tree.map(lambda x, i=step: x[i], batches)
                carry = one_step(step_key, carry, step_batch)
        else:  # a client with fewer examples stops earlier; under vmap the loop runs for the most steps of any lane

            def next_step(step, carry):
                return one_step(fold_in(loss_key, step), carry, batch(step))

            carry = jax.lax.fori_loop(0, own_steps, next_step, carry)
        params, _, sums = carry
        # Steps on padding alone do not count.
        num_steps_taken = jnp.asarray(own_steps, jnp.int32) * (num_examples > 0).astype(jnp.int32)
        weight = own_weight(loss_fn, params, data, loss_key)
        return TrainingResult(params, sums, num_steps_taken, num_examples, weight)

    return train


def facts_of(work: LocalWork, optimizer: optax.GradientTransformation) -> ClientFacts:
    """Returns the facts of a client that does this work with this optimizer, whose rate may fall over rounds."""
    return work.facts()._replace(reads_round=isinstance(optimizer, OverRounds))


def is_unrolled(num_steps: int) -> bool:
    """Returns whether so many local steps are written out one after the other; else they are a loop.

    On a CPU a loop is as fast, and a round of five steps compiles in three quarters of the time.

    Guarantees:
      In reproducible arithmetic the written-out steps of an MLP have the bits of the loop
      (tests/client/test_local_sgd.py::test_loop_and_written_out_steps). Other models were not compared.
    """
    return num_steps == 1 or (num_steps <= UNROLLED_STEPS and engine.target() != "cpu")


def _batches(
    key: Array,
    data: ClientData,
    *,
    size: int,
    steps_per_epoch: Array,
    num_examples: Array,
    shuffled: bool,
) -> Callable:
    """Makes the function (step) -> the step's minibatch, `ClientData` of `size` rows.

    With s = `steps_per_epoch`, step k is in epoch floor(k / s), and takes the places from (k mod s) b on, b of them, in
    the order of this epoch. Places from n on are padding.

    Args:
      key: of the client; orders are drawn from it.
      data: of the client, [rows, ...], padding included.
      size: b in [1, rows]; with b = rows every step takes `data` as it is.
      steps_per_epoch: [] int32, s = ceil(n / b), at least 1.
      num_examples: [] int32, n in [0, rows], the examples without padding.
      shuffled: True: each epoch has a fresh random order. False: the order in which examples are stored.

    Returns: (step [] integer >= 0) -> `ClientData` [b, ...], without `work` and `pull`.
    """
    rows = data.mask.shape[0]
    order = engine.shuffle(key, data.mask) if shuffled else _stored_order(data.mask)
    data = data._replace(work=None, pull=None)  # of the client as a whole, and not of a batch

    def batch(step):
        if size == rows:
            return data
        step = jnp.asarray(step, steps_per_epoch.dtype)
        # No number is negative, so these divisions, which round to zero, equal // and %, in fewer operations.
        epoch = jax.lax.div(step, steps_per_epoch)
        step_in_epoch = jax.lax.rem(step, steps_per_epoch)
        positions = step_in_epoch * size + jnp.arange(size)
        mask = positions < num_examples
        # Computed once, or the places would be worked out anew for each number that is read.
        epoch, positions, mask = jax.lax.optimization_barrier((epoch, positions, mask))
        chosen_rows = jax.lax.optimization_barrier(order(epoch, positions))
        return ClientData(tree.take_rows(data.examples, chosen_rows), mask)

    return batch


def _stored_order(mask: Array) -> Callable:
    """Makes the function (epoch, positions) -> rows that visits examples as they are stored, padding last."""
    # False sorts before True, so a stable sort puts the real examples first, as they are stored.
    rows = jnp.argsort(~mask, stable=True).astype(jnp.int32)
    return lambda epoch, positions: rows[jnp.minimum(positions, mask.shape[0] - 1)]


def local_sgd(loss_fn: Callable, optimizer: optax.GradientTransformation, work: LocalWork) -> ClientUpdate:
    """Makes the client of FedAvg: it trains by an optax optimiser, whose state is initialised in each round.

    Args:
      loss_fn: (params, examples, key) -> per-example losses [b], or a dict of per-example values (see
        `losses.loss_and_metrics`).
      optimizer: any optax transformation; schedules count local steps.
      work: `client.work(...)`; weighting "examples" unless it says otherwise.

    Returns: a stateless ClientUpdate; update = local params - broadcast params. Its metrics are `local_loss` and
    `local_<metric>` for each metric of the loss. They are means over the minibatches of the training, each at the local
    model of its step; `metrics.evaluation(train=...)` gives the objective at one model.

    Guarantees: matches a NumPy loop on ragged clients with partial batches (tests/oracles/test_fedavg.py); one
    full-batch step of every client is a centralised step (tests/oracles/test_centralised.py); a client with partial
    work stops the same trajectory early (tests/client/test_stragglers.py).

    References: McMahan et al. 2017, algorithm 1 (ClientUpdate).

    >>> import jax, jax.numpy as jnp, optax
    >>> from fedjax_sim.client import work
    >>> from fedjax_sim.types import ClientData
    >>> client = local_sgd(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), work(num_steps=1))
    >>> data = ClientData(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False]))
    >>> report, _ = client.apply(jax.random.key(0), jnp.zeros(()), (), data)
    >>> float(report.update), float(report.weight)
    (1.0, 2.0)
    """
    return stateless_client(loss_fn, optimizer, work, uncorrected)


def uncorrected(broadcast: PyTree) -> Callable:
    """The correction of plain local training, which leaves all gradients as they are."""
    return lambda gradients, params: gradients


def stateless_client(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    work: LocalWork,
    correction: Callable,
    *,
    sends_model: bool = False,
    gradient_at: Callable = full_gradient_at,
) -> ClientUpdate:
    """Makes a client that trains with corrected gradients, and keeps no state.

    Args:
      loss_fn, optimizer, work: as in `local_sgd`.
      correction: (broadcast) -> ((gradients, params) -> gradients that the optimiser sees), such as `uncorrected`.
      sends_model: True: the message is the trained model itself; its difference from the broadcast is never computed.
      gradient_at: as in `local_training`.
    """
    train = local_training(loss_fn, optimizer, work, gradient_at)
    by_examples = work.weighs_examples()

    def apply(key, broadcast, state, data):
        correct = correction(broadcast)
        if data.pull is not None:
            correct = _with_pull(correct, broadcast, data.pull)
        training = train(key, broadcast, data, correct)
        if engine.target() != "cpu":
            # XLA would fuse the subtraction into the last step's product, and write the broadcast once for each client.
            training = training._replace(params=jax.lax.optimization_barrier(training.params))
        update = training.params if sends_model else tree.subtract(training.params, broadcast)
        return training.report(update, by_examples), state

    facts = facts_of(work, optimizer)._replace(
        pulled=True,
        scalable=not sends_model,  # a share of a model is another model
    )
    return ClientUpdate(lambda params: (), apply, facts)


def _with_pull(correct: Callable, start: PyTree, pull: Array) -> Callable:
    """Mixes a pull back to the start into corrected gradients, as a constrained attacker does.

    Args:
      correct: (gradients, params) -> gradients.
      start: the broadcast model w_t.
      pull: [] in [0, 1), the share of w - w_t in the result, beside that of the gradients; 0 changes nothing.
    """

    def leaf(g, w, s):
        share = pull.astype(g.dtype)
        return (1 - share) * g + share * (w - s)

    return lambda gradients, params: jax.tree.map(leaf, correct(gradients, params), params, start)


def send_model(client: ClientUpdate) -> ClientUpdate:
    """Makes a client send its local model instead of its update; compose with `server.replacement`.

    Args:
      client: any client whose update is shaped like the broadcast.

    Guarantees: equal to sending updates if and only if the aggregator's weights sum to one
    (tests/client/test_local_sgd.py::test_model_and_update_forms_agree_only_for_weights_that_sum_to_one).
    """
    validate.part("client", client, ClientUpdate)

    def apply(key, broadcast, state, data):
        report, state = client.apply(key, broadcast, state, data)
        return report._replace(update=jax.tree.map(jnp.add, broadcast, report.update)), state

    return client._replace(apply=apply).stating(scalable=False)

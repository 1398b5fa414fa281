"""This module freezes a part of a model, as transfer learning does: clients train and send all other leaves."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from fedjax_sim.models.model import Model
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.models.paths import chosen_paths, leaves_by_path
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, named_arguments, part


@named_arguments
def freeze(model: Model, *, trained: Sequence[str]) -> Model:
    """Freezes a model but for the listed leaves, which are all that clients train and send.

    The frozen leaves are the state of the new model, which `supervised` takes as its `frozen_state`. So every algorithm
    trains, clips, compresses and sends the trained leaves alone, and clients do not have to receive or send the others.
    The frozen leaves are those that the model's `init` returns: with `started_from`, those of a pre-trained model.

    Args:
      model: whose parameters are nested dicts.
      trained: paths of leaves or dicts, such as "output". `lora` adapts matrices beside them.

    Returns: a `Model` whose params are the trained leaves, in the nested dicts of the model's own paths. Its state is
      {"frozen": the other leaves, "state": the model's own}. As `supervised` says of models with state, it runs in
      evaluation mode, so statistics of normalisation stay those of the start.

    Raises: ValueError for a path that the parameters lack, and where nothing is trained or nothing is frozen; TypeError
    for parameters that are not nested dicts.

    Guarantees:
      The new model gives the old one's bits, and its gradient is the old one's at the trained leaves
      (tests/models/test_freezing.py::test_it_is_the_model). No frozen leaf is in a message or changes in a round
      (::test_frozen_leaves_stay_and_are_in_no_message). At 20 examples of a new task, a pre-trained body and a new
      output layer have a lower test loss than a model from scratch, paired over 20 seeds (::test_transfer).

    References: Yosinski et al. 2014; Liu et al. 2020 (federated transfer learning).

    >>> from fedjax_sim.models import mlp
    >>> params, state = freeze(mlp(input_shape=(5,), num_outputs=3, hidden=(4,)), trained=["output"]).init(
    ...     jax.random.key(0)
    ... )
    >>> jax.tree.map(lambda x: x.shape, params)
    {'output': {'bias': (3,), 'kernel': (4, 3)}}
    """
    part("model", model, Model)
    params_spec, _ = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    if not isinstance(params_spec, dict):
        fail("model", "a model whose parameters are nested dicts", type(params_spec).__name__, error=TypeError)
    trained_paths = set(chosen_paths("trained", params_spec, trained))
    if not trained_paths:
        fail("trained", "paths of at least one leaf", trained, "Clients would have nothing to train.")
    if trained_paths == set(leaves_by_path(params_spec)):
        fail("trained", "paths that leave something frozen", trained, "Leave out the wrapper to train the whole model.")

    def init(key: Array) -> tuple[PyTree, PyTree]:
        own_params, own_state = model.init(key)
        trained_leaves, frozen = partition(own_params, lambda path: path in trained_paths)
        return trained_leaves, {"frozen": frozen, "state": own_state}

    def apply(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        out, own_state = model.apply(combine(params, state["frozen"]), state["state"], x, key, train)
        return out, {**state, "state": own_state}

    return Model(init, apply)

"""Makes the model that a config names, and the loss of the data's task on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.config import registry
from fedjax_sim.config.data_facts import INPUTS
from fedjax_sim.config.factories import Maker
from fedjax_sim.config.signatures import Part
from fedjax_sim.config.value_kinds import Words, problem
from fedjax_sim.models import Augmentation, Model, default_loss, link_prediction, supervised
from fedjax_sim.models.augmentations import augmented
from fedjax_sim.population import FederatedData, quadratic_loss
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree


class TaskModel(NamedTuple):
    """A model and its loss."""

    model: Model | None  # None if the parameter is a point in R^d, or if the algorithm trains no model
    loss_fn: Callable | None  # (params, examples, key) -> per-example losses; None without a model, or if it is refused
    frozen: PyTree = ()  # the state of the model, such as parameters that `models.lora` freezes


def task_model(maker: Maker, data: FederatedData) -> TaskModel:
    """Makes the model of a config for the task of the data; what is wrong is added to the maker's problems.

    Args:
      maker: makes the parts of the config.
      data: whose task, input shape and number of outputs the model gets.
    """
    if "model" not in maker.parts:
        return TaskModel(None, None)
    part = maker.parts["model"]
    wanted_input = INPUTS.get(data.task, "features")
    fitting = [name for name, other in registry.parts_of_table("model").items() if _takes(other, wanted_input)]
    if part.name not in fitting:
        rule = f"one of {', '.join(fitting)} for the data {data.name!r}"
        maker.problems.append(problem("model.name", rule, part.name, f"Its task is {data.task}."))
        return TaskModel(None, None)
    if "augmentation" in maker.tables and (wanted_input == "point" or data.task == "link_prediction"):
        hint = "Leave it out: --unset augmentation."
        maker.problems.append(problem("augmentation", f"no such table for the task {data.task}", Words("one"), hint))
        return TaskModel(None, None)
    if wanted_input == "point":
        return TaskModel(None, quadratic_loss)
    sizes = {"input_shape": data.input_shape, "num_features": data.input_shape[-1], "columns": data.columns}
    model = maker.wrapped("model", **sizes, num_outputs=data.num_outputs)
    if model is None:
        return TaskModel(None, None)
    frozen_state = _frozen_state(model, maker.tables["seed"])
    frozen = () if frozen_state is None else frozen_state
    algorithm = maker.parts["algorithm"]
    if frozen_state is not None and (data.task == "link_prediction" or registry.takes(algorithm, "model")):
        hint = f"{algorithm.name} on {data.task} computes with the model's parameters alone."
        maker.problems.append(problem("model", "a model without frozen parameters", maker.tables["model"], hint))
        return TaskModel(model, None, frozen)
    if data.task == "link_prediction":
        return TaskModel(model, maker.attempt("model", {}, partial(link_prediction, model)), frozen)
    augmentations = maker.members("augmentation", data.train.size)
    if augmentations is None:
        return TaskModel(model, None, frozen)
    if problems := _problems_of_inputs(augmentations, data):
        maker.problems += problems
        return TaskModel(model, None, frozen)
    options = {"measure": data.measure, "frozen_state": frozen_state, "augmentations": augmentations}
    loss = default_loss(data.task, special_tokens=data.special_tokens)
    loss_fn = maker.attempt("model", {}, partial(supervised, model, loss, **options))
    if loss_fn is not None and _inputs(part) is None:
        maker.problems += _problems_of_shapes(model, frozen, data, part.name)
    return TaskModel(model, loss_fn, frozen)


def _problems_of_shapes(model: Model, state: PyTree, data: FederatedData, name: str) -> list[str]:
    """Returns a problem if a user's own model, which states no inputs, does not fit the data; nothing is computed.

    Args:
      model: the model, with its `state`.
      state: what no round changes.
      data: the data set, of whose clients one is tried.
      name: the model's name.
    """
    client = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32))
    rule = f"a model of inputs {[*data.input_shape]} with {data.num_outputs} outputs"

    def outputs(x: PyTree) -> Array:
        return model.apply(model.init(jax.random.key(0))[0], state, x, None, False)[0]

    try:
        shape = jax.eval_shape(outputs, client.examples["x"]).shape
    except (TypeError, ValueError) as error:
        return [problem("model.name", rule, name, str(error).split("\n")[0])]
    # A label beyond the outputs would be read as another one.
    if data.task in ("classification", "next_token") and shape[-1:] != (data.num_outputs,):
        return [problem("model.name", rule, Words(f"outputs of shape {[*shape[1:]]}"))]
    return []


def _problems_of_inputs(augmentations: Sequence[Augmentation], data: FederatedData) -> list[str]:
    """Returns a problem if augmentations do not fit the inputs of the data; nothing is computed.

    Args:
      augmentations: in their order.
      data: the data set, of whose clients one is tried.
    """
    if not augmentations:
        return []
    client = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32))
    try:
        jax.eval_shape(partial(augmented, augmentations), jax.random.key(0), client.examples["x"])
    except (TypeError, ValueError) as error:
        got = str(error).split("\n")[0].rstrip(".")
        return [problem("augmentation", f"what fits the inputs {[*data.input_shape]} of {data.name}", Words(got))]
    return []


def _frozen_state(model: Model, seed: int) -> PyTree | None:
    """Returns the state of a model at the config's seed, which no round changes; None for a stateless model."""
    if not jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))[1])):
        return None
    return model.init(stream(jax.random.key(seed), "init"))[1]


def _takes(part: Part, wanted_input: str) -> bool:
    """Returns whether a model takes this kind of input; one of a user's own that states none takes what is data."""
    return _inputs(part) == wanted_input or (_inputs(part) is None and wanted_input != "point")


def _inputs(part: Part) -> str | None:
    """Returns the kind of a model's input, "point", "features", "graph" or "tokens", read from its arguments.

    None stands for a model of a user's own module whose arguments do not tell: what the data hold is tried.
    """
    passed_values = set(part.values.values())
    if "num_features" in passed_values:
        return "graph"
    if passed_values & {"columns", "input_shape"}:
        return "features"
    if part.subpackage in registry.admitted_modules():
        return None
    return "point" if part.name == "point" else "tokens"

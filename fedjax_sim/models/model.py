"""What a model is, and how a model and a loss become the `loss_fn` that clients differentiate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, function

__all__ = ["Model", "from_fn", "per_example", "supervised"]


class Model(NamedTuple):
    """Two pure functions over plain dict pytrees, written for one client's batch.

    `init(key) -> (params, state)`; `apply(params, state, x, key, train) -> (out, state)` with x and out [n, ...].
    `state` is `()` for a stateless model; `train` is a Python bool, and `key` may be None when it is False.
    """

    init: Callable
    apply: Callable
    layers: tuple = ()  # what it is made of, in order, so that it can be cut; () = it cannot


def accepts(function: Callable, name: str) -> bool:
    """True if `function` names the parameter itself; `**kwargs` do not count, for nobody knows what becomes of them."""
    return name in inspect.signature(function).parameters


def from_fn(init: Callable, apply: Callable) -> Model:
    """A stateless model from `init(key) -> params` and `apply(params, x) -> out`.

    Args:
      init: returns the parameters, any pytree.
      apply: may also take keywords `key` and `train`, e.g. for dropout.

    Returns: the `Model`, with state `()`.

    >>> import jax, jax.numpy as jnp
    >>> model = from_fn(lambda key: {"slope": jnp.ones(2)}, lambda params, x: x @ params["slope"])
    >>> params, state = model.init(jax.random.key(0))
    >>> out, _ = model.apply(params, state, jnp.ones((3, 2)), None, False)
    >>> out.tolist()
    [2.0, 2.0, 2.0]
    """
    for name, value in (("init", init), ("apply", apply)):
        if not callable(value):
            fail(name, "a function", value, error=TypeError)
    takes = [name for name in ("key", "train") if accepts(apply, name)]

    def apply_fn(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        given = {"key": key, "train": train}
        return apply(params, x, **{name: given[name] for name in takes}), state

    return Model(lambda key: (init(key), ()), apply_fn)


def per_example(out: Array | Mapping[str, Array], num_examples: int | None = None) -> dict[str, Array]:
    """What a loss function returned, as a dict of per-example values.

    Args:
      out: [n] losses, or a dict of [n] arrays that holds "loss". "weight" is each example's weight in averages over
        examples (default 1); all other entries are metrics; "<metric>_weight" is the weight of a metric that
        not every example has.
      num_examples: n, if known.

    Returns: the dict.

    Raises: ValueError, TypeError: "loss" is missing, or a value is not [n].

    Guarantees: a batch mean or a wrong length is refused, since only per-example values let padding be left out
    (tests/models/test_model.py::test_per_example_refuses_what_is_not_one_value_per_example).

    >>> import jax.numpy as jnp
    >>> sorted(per_example(jnp.zeros(3)))
    ['loss']
    """
    values = dict(out) if isinstance(out, Mapping) else {"loss": out}
    if "loss" not in values:
        fail(
            "loss_fn",
            'a dict that holds "loss"',
            sorted(values),
            'Metrics go beside it, as in {"loss": ..., "mse": ...}.',
        )
    n = num_examples
    for name, value in values.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            fail(f"loss_fn[{name!r}]", "an array [n]", value, error=TypeError)
        n = value.shape[0] if n is None and value.ndim == 1 else n
        if value.shape != (n,):
            fail(
                f"loss_fn[{name!r}]",
                "one value per example, [n]" if n is None else f"one value per example, [{n}]",
                value.shape,
                "Do not average over examples: the caller does it, over the rows that are not padding.",
            )
    return values


def check_examples(examples: Mapping[str, PyTree]) -> None:
    """Refuses all but a dict that has "x" and "y", with a TypeError."""
    if not isinstance(examples, Mapping) or not {"x", "y"} <= set(examples):
        shown = sorted(examples) if isinstance(examples, Mapping) else type(examples).__name__
        fail("examples", 'a dict with "x" and "y"', shown, "Write your own loss_fn for other layouts.", TypeError)


def supervised(
    model: Model,
    loss: Callable,
    state: PyTree = (),
    *,
    frozen_state: PyTree | None = None,
    measure: Callable | None = None,
) -> Callable:
    """Joins a model and a loss into `loss_fn(params, examples, key) -> dict` of per-example values.

    Args:
      model: the model.
      loss: `(outputs, targets) -> dict` of [n] values, or an array [n]; see `models.losses`.
      state: the model's state as `init` returned it; must be empty.
      frozen_state: for a model with state, the state to use always. The model then always runs in evaluation mode
        (`train=False`: batch statistics are not updated and dropout is off).
      measure: `(outputs, examples) -> dict` of [n] values, told beside the loss's own when the key is None, that is in
        evaluations: what a data set wants to know of a model (`FederatedData.measure`).

    Returns: `loss_fn`, with examples `{"x": [n, ...], "y": [n, ...]}`; key None means evaluation.

    Raises: ValueError: the model has state and no `frozen_state` is given.

    Guarantees: equals the model and the loss written out by hand, training exactly when a key is given
    (tests/models/test_model.py::test_supervised_trains_iff_a_key_is_given); a model with running statistics is refused
    (tests/models/test_model.py::test_supervised_refuses_state_unless_frozen); measures are told in evaluations only
    (tests/population/datasets/test_industrial.py::test_measures_are_told_in_evaluations).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.models import linear, softmax_cross_entropy
    >>> model = linear(input_shape=(2,), num_outputs=2)
    >>> loss_fn = supervised(model, softmax_cross_entropy)
    >>> params, _ = model.init(jax.random.key(0))
    >>> values = loss_fn(params, {"x": jnp.ones((3, 2)), "y": jnp.zeros(3, int)}, None)
    >>> [round(float(v), 4) for v in values["loss"]]
    [0.6931, 0.6931, 0.6931]
    """
    if not isinstance(model, Model):
        fail(
            "model",
            "a Model",
            type(model).__name__,
            "Wrap functions with from_fn, flax modules with from_linen or from_nnx.",
            TypeError,
        )
    function("loss", loss, "outputs, targets", hint="Call its factory: default_loss(task), say.")
    abstract = jax.eval_shape(lambda: model.init(jax.random.key(0))[1])
    if frozen_state is None:
        held = jax.tree_util.tree_leaves_with_path((abstract, state))
        if held:
            fail(
                "model",
                "a model without state",
                [jax.tree_util.keystr(path[1:]) for path, _ in held],
                "Running statistics of a client's padded minibatch are no example means: padding and batch size would "
                "change the model. Use GroupNorm or LayerNorm, or pass frozen_state=state to keep them fixed.",
            )
    elif jax.tree.structure(frozen_state) != jax.tree.structure(abstract):
        fail("frozen_state", f"the model's own {jax.tree.structure(abstract)}", jax.tree.structure(frozen_state))
    if measure is not None:
        function("measure", measure, "outputs, examples")
    fixed = () if frozen_state is None else frozen_state

    def loss_fn(params: PyTree, examples: Mapping[str, PyTree], key: Array | None = None) -> dict[str, Array]:
        check_examples(examples)
        train = key is not None and frozen_state is None
        out, _ = model.apply(params, fixed, examples["x"], key, train)
        values = loss(out, examples["y"])
        if measure is not None and key is None:
            values = {**(values if isinstance(values, Mapping) else {"loss": values}), **measure(out, examples)}
        return per_example(values, jnp.shape(jax.tree.leaves(examples["x"])[0])[0])

    return loss_fn

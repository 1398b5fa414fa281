"""This module defines what a model is, and joins a model and a loss to the `loss_fn` that clients differentiate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fedjax_sim.models.augmentations import Augmentation, augmented, check_augmentations
from fedjax_sim.types import AnyArray, Array, PyTree, Scores
from fedjax_sim.validate import fail, function

QUICK = {"xla_backend_optimization_level": 1}  # of LLVM; level 0 gives other bits


class Model(NamedTuple):
    """A model consists of two pure functions over plain dict pytrees, which are written for the batch of one client.

    `init(key)` returns (params, state). `apply(params, state, x, key, train)` returns (out, state), where x and out are
    [n, ...]. `state` is `()` for a stateless model. `train` is a Python bool, and `key` may be None if it is False.
    """

    init: Callable
    apply: Callable
    layers: tuple = ()  # the layers of the model in order, so that it can be cut. A model with () cannot be cut.


def accepts(function: Callable, name: str) -> bool:
    """Returns whether `function` has a parameter of this name.

    `**kwargs` do not count, since the function may pass them on or ignore them.
    """
    return name in inspect.signature(function).parameters


def compiled_init(init: Callable) -> Callable:
    """Returns the initialisation of a model as one program, which XLA:CPU compiles in a third of its usual time.

    The program runs once, so that optimising it takes longer than it saves.

    Args:
      init: key -> pytree of arrays.

    Guarantees:
      Every built-in model starts with the bits that a fully optimised program draws
      (tests/models/test_model.py::test_a_quickly_compiled_start_has_the_same_bits).
    """
    traced_init = jax.jit(init)
    quick_init = jax.jit(init, compiler_options=QUICK)

    def init_on_its_own(key: Array) -> PyTree:
        # JAX refuses options for a program inside of another one, and other backends have no such level.
        # Inside, the key may be a constant, but what is computed from it is traced.
        is_inside = isinstance(jax.random.key_data(key), Tracer)
        return traced_init(key) if is_inside or jax.default_backend() != "cpu" else quick_init(key)

    return init_on_its_own


def from_fn(init: Callable, apply: Callable) -> Model:
    """Makes a stateless model from `init(key) -> params` and `apply(params, x) -> out`.

    Args:
      init: returns the parameters, any pytree.
      apply: may also take the keywords `key` and `train`, for example for dropout.

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
    # Signatures are read once, here, rather than in every call.
    accepted_names = [name for name in ("key", "train") if accepts(apply, name)]

    def apply_fn(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        keywords = {"key": key, "train": train}
        return apply(params, x, **{name: keywords[name] for name in accepted_names}), state

    return Model(lambda key: (init(key), ()), apply_fn)


def per_example(out: Array | Mapping[str, Array], num_examples: int | None = None) -> dict[str, Array]:
    """Checks the values that a loss function returned, and returns them as a dict of per-example values.

    Args:
      out: [n] losses, or a dict of [n] arrays with the key "loss". The entry "weight" is the weight of each example in
        averages over examples (default 1). All other entries are metrics. An entry "<metric>_weight" is the weight of a
        metric that not every example has, such as "auc_weight" for "auc".
      num_examples: n; None: any, at least one.

    Returns: the dict.

    Raises: ValueError or TypeError if "loss" is missing, or a value is not [n].

    Guarantees: a batch mean or a wrong length is refused, since only per-example values allow to leave out padding
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
    # If n is not known, the first value of rank 1 gives it.
    n = num_examples
    for name, value in values.items():
        if not isinstance(value, AnyArray):
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
    """Raises a TypeError unless `examples` is a dict with the keys "x" and "y"."""
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
    augmentations: Sequence[Augmentation] = (),
    keeps_scores: bool = False,
) -> Callable:
    """Joins a model and a loss to `loss_fn(params, examples, key) -> dict` of per-example values.

    Args:
      model: the model.
      loss: `(outputs, targets) -> dict` of [n] values, or an array [n]. See `models.losses`.
      state: the model's state as `init` returned it. It must be empty.
      frozen_state: for a model with state, the state to use in every call. The model then always runs in evaluation
        mode (`train=False`): batch statistics are not updated, and dropout is off. None for a model without state.
      measure: `(outputs, examples) -> dict` of [n] values, the metrics of a data set (`FederatedData.measure`). They
        are added to those of the loss in evaluations, that is if the key is None.
      augmentations: random changes of the inputs in local steps, that is if a key is given, one after the other; see
        `models.augmentations`. A record's privacy is not touched: an example changes nothing but itself.
      keeps_scores: whether evaluations also return the outputs and targets themselves, as the entry "scores" of the
        dict, a `types.Scores`. `metrics.evaluation(metrics=...)` needs them.

    Returns: `loss_fn`, with examples `{"x": [n, ...], "y": [n, ...]}`. A key of None means evaluation.

    Raises: ValueError if the model has state and no `frozen_state` is given.

    Guarantees: the function equals the model and the loss written out by hand, and trains exactly if a key is given
    (tests/models/test_model.py::test_supervised_trains_iff_a_key_is_given). A model with running statistics is refused
    (tests/models/test_model.py::test_supervised_refuses_state_unless_frozen). Measures appear in evaluations only
    (tests/population/datasets/test_industrial.py::test_measures_are_told_in_evaluations). An evaluation is the same
    program with augmentations and without (tests/models/test_augmentations.py::test_evaluations_are_untouched).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.models import linear, softmax_cross_entropy
    >>> model = linear(input_shape=(2,), num_outputs=2)
    >>> loss_fn = supervised(model, softmax_cross_entropy)
    >>> params, _ = model.init(jax.random.key(0))
    >>> values = jax.jit(loss_fn)(params, {"x": jnp.ones((3, 2)), "y": jnp.zeros(3, int)}, None)
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
    # An abstract call shows the structure of the state without drawing parameters.
    state_spec = jax.eval_shape(lambda: model.init(jax.random.key(0))[1])
    if frozen_state is None:
        state_leaves = jax.tree_util.tree_leaves_with_path((state_spec, state))
        if state_leaves:
            fail(
                "model",
                "a model without state",
                [jax.tree_util.keystr(path[1:]) for path, _ in state_leaves],
                "Running statistics of a client's padded minibatch are no example means: padding and batch size would "
                "change the model. Use GroupNorm or LayerNorm, or pass frozen_state=state to keep them fixed.",
            )
    elif jax.tree.structure(frozen_state) != jax.tree.structure(state_spec):
        fail("frozen_state", f"the model's own {jax.tree.structure(state_spec)}", jax.tree.structure(frozen_state))
    if measure is not None:
        function("measure", measure, "outputs, examples")
    augmentations = check_augmentations(augmentations)
    fixed_state = () if frozen_state is None else frozen_state

    def loss_fn(params: PyTree, examples: Mapping[str, PyTree], key: Array | None = None) -> dict[str, Any]:
        check_examples(examples)
        train = key is not None and frozen_state is None
        x = examples["x"] if key is None or not augmentations else augmented(augmentations, key, examples["x"])
        out, _ = model.apply(params, fixed_state, x, key, train)
        values = loss(out, examples["y"])
        # Whether there is a key is known while the function is traced, so training programs hold no measures.
        if measure is not None and key is None:
            values = {**(values if isinstance(values, Mapping) else {"loss": values}), **measure(out, examples)}
        values = per_example(values, jnp.shape(jax.tree.leaves(examples["x"])[0])[0])
        return {**values, "scores": Scores(out, examples["y"])} if keeps_scores and key is None else values

    return loss_fn

"""This module makes one model of several: an average, an ensemble, a mixture, and a loss to distil an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.models.model import Model
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, in_range, integer, named_arguments, part, positive, truth


def interpolated(a: PyTree, b: PyTree, share: float) -> PyTree:
    """Interpolates between the parameters of two models: share a + (1 - share) b.

    An example is the average of a model that was trained centrally and one that was trained by FL.

    Args:
      a, b: parameters of the same structure, shapes and dtypes.
      share: in [0, 1], a Python number.

    Returns: parameters like `a`. They are `a` itself for share 1 and `b` itself for share 0.

    Guarantees: the parameters equal share a + (1 - share) b up to rounding, and a NaN of the other model does not
    spread at the shares 0 and 1 (tests/models/test_ensemble.py::test_interpolated).

    >>> import jax.numpy as jnp
    >>> interpolated({"w": jnp.ones(1)}, {"w": jnp.zeros(1)}, 0.25)["w"].tolist()
    [0.25]
    """
    in_range("share", share, 0, 1)
    specs = [jax.tree.map(lambda x: (jnp.shape(x), str(jnp.result_type(x))), params) for params in (a, b)]
    if specs[0] != specs[1]:
        fail("b", f"parameters like a, {specs[0]}", specs[1])
    if share in (0, 1):
        return a if share else b
    return jax.tree.map(lambda x, y: (share * x + (1 - share) * y).astype(x.dtype), a, b)


def running_mean(mean: Array, x: Array, number: Array) -> Array:
    """Updates a mean by one more value, x. If all values are equal, the result is exactly their value.

    Args:
      mean: of the values before x.
      x: the new value.
      number: how many values there are, x included.
    """
    return mean + (x - mean) / jnp.maximum(number, 1).astype(mean.dtype)


def _check_stateless(model: Model) -> None:
    """Refuses a model with state, such as one whose parameters are frozen."""
    if jax.tree.leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))[1])):
        hint = "Freeze it: from_fn(init, apply) with the state fixed."
        fail("model", "a model without state", "one with state", hint)


def ensemble(model: Model, num_members: int) -> Model:
    """Makes a model whose output is the mean of its members' outputs. For classifiers this is the mean of the logits.

    Args:
      model: the model of each member, without state.
      num_members: M.

    Returns: a `Model` whose parameters are those of all members, with leaves [M, ...]. `init` draws each member from a
      key of its own.

    Raises: TypeError or ValueError if `model` is not a `Model` or has state, and for a wrong number of members. `init`
    raises ValueError for a model that always starts alike, such as `linear` at 0: equal members have equal gradients,
    and stay equal.

    Guarantees: equal members give exactly their output, and others the mean of NumPy
    (tests/models/test_ensemble.py::test_ensemble); members that start equal are refused
    (::test_equal_components_are_refused).
    """
    part("model", model, Model)
    integer("num_members", num_members)
    _check_stateless(model)

    def init(key):
        return _members(model, key, num_members), ()

    def apply(params, state, x, key, train):
        def output(i, member_params):
            member_key = None if key is None else jax.random.fold_in(key, i)
            return model.apply(member_params, (), x, member_key, train)[0]

        def member(carry, member_params):
            mean, number = carry
            mean = jax.tree.map(lambda m, z: running_mean(m, z, number + 1), mean, output(number, member_params))
            return (mean, number + 1), None

        # Members are scanned, so that the outputs of one member only are in memory at a time.
        output_spec = jax.eval_shape(output, 0, jax.tree.map(lambda x: x[0], params))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), output_spec)
        (mean, _), _ = jax.lax.scan(member, (start, jnp.int32(0)), params)
        return mean, state

    return Model(init, apply)


def _members(model: Model, key: Array, num_members: int) -> PyTree:
    """Draws the parameters of each member from a key of its own, and refuses equal ones; leaves [members, ...]."""
    keys = [jax.random.fold_in(key, i) for i in range(num_members)]
    members = jax.tree.map(lambda *xs: jnp.stack(xs), *(model.init(key)[0] for key in keys))
    if tree.has_equal_rows(members):
        hint = "Equal members are trained alike, and stay equal: take a model that starts from random numbers."
        fail("model", "one whose members start apart", "one that always starts alike", hint)
    return members


@named_arguments
def mixture(model: Model, num_components: int, task: Literal["binary", "classification", "regression"]) -> Model:
    """Makes a model whose prediction is a weighted mean of its components' predictions.

    Args:
      model: the model of each component, without state.
      num_components: M.
      task: what the outputs are. "classification": logits [n, C], whose softmax is averaged; the outputs are the log of
        the mean. "binary": one logit for each example, whose sigmoid is averaged; the output is the logit of the mean.
        "regression": numbers, which are averaged.

    Returns: a `Model` with parameters {"components": leaves [M, ...], "weights": [M]}. The weights are at least 0 and
    add up to 1; `init` makes them equal.

    Raises: TypeError or ValueError if `model` is not a `Model` or has state, for a wrong number, and for another task.

    Guarantees: predictions are NumPy's means, and one component's are its own
    (tests/models/test_ensemble.py::test_mixture).
    """
    part("model", model, Model)
    integer("num_components", num_components)
    _check_stateless(model)

    def init(key):
        weights = jnp.full(num_components, 1 / num_components)
        return {"components": _members(model, key, num_components), "weights": weights}, ()

    def apply(params, state, x, key, train):
        outputs = jax.vmap(lambda component: model.apply(component, (), x, key, train)[0])(params["components"])
        weights = params["weights"].reshape(-1, *(1 for _ in outputs.shape[1:])).astype(outputs.dtype)
        if task == "regression":
            return (weights * outputs).sum(0), state
        log_weights = jnp.log(weights)
        if task == "classification":
            return jax.nn.logsumexp(log_weights + jax.nn.log_softmax(outputs), 0), state
        positive_rate, negative_rate = (
            jax.nn.logsumexp(log_weights + jax.nn.log_sigmoid(sign * outputs), 0) for sign in (1, -1)
        )
        return positive_rate - negative_rate, state

    return Model(init, apply)


def distillation(model: Model, temperature: float = 1.0, *, squared_temperature: bool = True) -> Callable:
    """Makes the loss of a student model, T^2 KL(softmax(t / T) || softmax(z / T)), which pulls it towards a teacher.

    Here z are the logits of the student and t those of the teacher.

    Args:
      model: the student, without state. It runs in evaluation mode.
      temperature: T > 0.
      squared_temperature: True: the factor T^2, by which gradients have about the same size for every T. False: the
        divergence alone.

    Returns: `loss_fn(params, examples, key) -> {"loss": [n]}`, with examples {"x": [n, ...], "teacher": [n, C] logits}.

    Guarantees: loss and gradient are 0 if both have the same logits, and elsewhere the loss is the divergence of NumPy
    (tests/models/test_ensemble.py::test_distillation).

    References: Hinton, Vinyals and Dean 2015, section 2.
    """
    part("model", model, Model)
    positive("temperature", temperature)
    truth("squared_temperature", squared_temperature)
    _check_stateless(model)

    def loss_fn(params: PyTree, examples: Mapping[str, PyTree], key: Array | None = None) -> dict[str, Array]:
        logits, _ = model.apply(params, (), examples["x"], None, False)
        teacher, student = (
            jax.nn.log_softmax(z.astype(jnp.float32) / temperature) for z in (examples["teacher"], logits)
        )
        teacher = jax.lax.stop_gradient(teacher)
        # Dividing the logits by T makes gradients about T^2 times smaller, and the factor T^2 restores their size.
        divergence = (jnp.exp(teacher) * (teacher - student)).sum(-1)
        return {"loss": temperature**2 * divergence if squared_temperature else divergence}

    return loss_fn

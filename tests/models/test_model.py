"""The contract: supervised, per_example, from_fn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, models
from fedjax_sim.models import Model, from_fn, from_linen, linear, per_example, softmax_cross_entropy, supervised
from tests.refusals import refused

KEY = jax.random.key(0)
EXAMPLES = {"x": jnp.ones((3, 2)), "y": jnp.array([0, 1, 1])}


STARTS = {
    "mlp": lambda: models.mlp(input_shape=(7,), num_outputs=3, hidden=(33,)),
    "linear": lambda: linear(input_shape=(7,), num_outputs=3),
    "cnn": lambda: models.cnn(input_shape=(8, 8, 1), num_outputs=3, channels=(3, 5), hidden=(9,)),
    "gru": lambda: models.gru(num_outputs=3, hidden=9, num_layers=2),
    "lstm": lambda: models.lstm(num_outputs=3, hidden=9, num_layers=2),
    "transformer": lambda: models.transformer(num_outputs=3, features=8),
    "gcn": lambda: models.gcn(7, 3),
    "graph_sage": lambda: models.graph_sage(7, 3),
    "gat": lambda: models.gat(7, 3, num_heads=2),
    "rgcn": lambda: models.rgcn(7, 3, num_types=2),
    "vertical_linear": lambda: models.vertical_linear(columns=(3, 4), num_outputs=3),
    "vertical_mlp": lambda: models.vertical_mlp(columns=(3, 4), num_outputs=3),
}


@pytest.mark.optimised
@pytest.mark.default_rows("mlp")
@pytest.mark.parametrize("name", STARTS)
def test_a_quickly_compiled_start_has_the_same_bits(name):
    """Catches a level of the compiler at which a start is rounded otherwise than inside of a user's program."""
    init = STARTS[name]().init
    quick, inside = init(KEY), jax.jit(init)(KEY)
    for x, y in zip(jax.tree.leaves(quick), jax.tree.leaves(inside), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_start_inside_of_a_users_program():
    """Catches compiler options of a program inside of another one, for a key that the outer one holds as a constant."""
    init = models.mlp(input_shape=(3,), num_outputs=2, hidden=(4,)).init
    assert jax.eval_shape(lambda: init(KEY)) == jax.eval_shape(init, KEY)


def test_supervised_trains_iff_a_key_is_given():
    """Catches train=True in evaluation, a key that is not passed on, and outputs and targets exchanged."""

    def apply(params, x, key, train):
        assert (key is not None) == train
        return x @ params["w"] + (jax.random.normal(key, (x.shape[0], 2)) if train else 0)

    params = {"w": jnp.array([[1.0, 2.0], [3.0, -1.0]])}
    loss_fn = supervised(from_fn(lambda key: params, apply), softmax_cross_entropy)
    quiet = softmax_cross_entropy(EXAMPLES["x"] @ params["w"], EXAMPLES["y"])
    noisy = softmax_cross_entropy(EXAMPLES["x"] @ params["w"] + jax.random.normal(KEY, (3, 2)), EXAMPLES["y"])
    for expected, got in ((quiet, loss_fn(params, EXAMPLES, None)), (noisy, loss_fn(params, EXAMPLES, KEY))):
        assert sorted(got) == ["accuracy", "loss"]
        np.testing.assert_allclose(got["loss"], expected["loss"])


def test_gradient_of_the_mean_is_the_mean_of_gradients():
    """Catches a loss that mixes examples: then per-example means and masks would be wrong."""
    model = linear(input_shape=(2,), num_outputs=2)
    loss_fn = supervised(model, softmax_cross_entropy)
    params = {"kernel": jnp.array([[1.0, 2.0], [3.0, -1.0]]), "bias": jnp.array([0.5, 0.0])}
    whole = jax.jit(jax.grad(lambda p: loss_fn(p, EXAMPLES, KEY)["loss"].mean()))(params)
    one = jax.grad(lambda p, e: loss_fn(p, jax.tree.map(lambda a: a[None], e), KEY)["loss"][0])
    parts = jax.jit(jax.vmap(one, (None, 0)))(params, EXAMPLES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.mean(0), atol=1e-6), whole, parts)


def test_supervised_refuses_state_unless_frozen():
    """Catches batch statistics that slip into clients, where padding would change them."""
    model = from_linen(WithStatistics(), EXAMPLES["x"])
    params, state = model.init(KEY)
    with refused("model", rule="without state", hint="frozen_state") as raised:
        supervised(model, softmax_cross_entropy)
    assert "padding" in raised.value.hint and "GroupNorm" in raised.value.hint
    with pytest.raises(ValueError, match="without state"):
        supervised(linear(input_shape=(2,), num_outputs=2), softmax_cross_entropy, {"mean": jnp.zeros(2)})
    with pytest.raises(ValueError, match="frozen_state: expected the model's own"):
        supervised(model, softmax_cross_entropy, frozen_state={})
    state = jax.tree.map(lambda leaf: leaf + 1.5, state)
    loss_fn = supervised(model, softmax_cross_entropy, frozen_state=state)
    evaluated = softmax_cross_entropy(model.apply(params, state, EXAMPLES["x"], None, False)[0], EXAMPLES["y"])
    for key in (None, KEY):  # frozen statistics mix no examples, also in training
        np.testing.assert_allclose(loss_fn(params, EXAMPLES, key)["loss"], evaluated["loss"])


class WithStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (jnp.zeros(()), r"loss_fn\['loss'\]: expected one value per example, \[n\], got \(\).*Do not average"),
        (jnp.zeros((3, 1)), "one value per example"),
        ({"loss": jnp.zeros(3), "accuracy": jnp.zeros(())}, r"loss_fn\['accuracy'\].*\[3\]"),
        ({"mse": jnp.zeros(3)}, 'holds "loss"'),
        (0.5, r"loss_fn\['loss'\]: expected an array \[n\], got 0.5"),
    ],
)
def test_per_example_refuses_what_is_not_one_value_per_example(out, message):
    """Catches a batch mean returned as a loss: it would weigh padding as data."""
    with pytest.raises((ValueError, TypeError), match=message):
        per_example(out)


def test_per_example_knows_the_number_of_examples():
    """Catches a loss whose length is not the batch's (e.g. per token)."""
    assert list(per_example(jnp.zeros(3), 3)) == ["loss"]
    with pytest.raises(ValueError, match=r"\[3\], got \(6,\)"):
        per_example(jnp.zeros(6), 3)


def test_errors_at_build_time():
    """Catches wrong parts that would fail late, deep inside a trace."""
    model = linear(input_shape=(2,), num_outputs=2)
    with refused("model", value="Dense", hint="from_linen", kind=InvalidType):
        supervised(nn.Dense(2), softmax_cross_entropy)
    with pytest.raises(TypeError, match="loss: expected a function"):
        supervised(model, "softmax")
    with pytest.raises(TypeError, match="apply: expected a function"):
        from_fn(lambda key: (), None)
    with refused("examples", rule='"x" and "y"', kind=InvalidType):
        supervised(model, softmax_cross_entropy)({}, (1, 2), None)


def test_from_fn_passes_only_what_is_asked_for():
    """Catches key or train handed to a function that does not name them."""
    model = from_fn(lambda key: {"a": jnp.ones(())}, lambda params, x, **other: x * params["a"] + len(other))
    assert isinstance(model, Model)
    params, state = model.init(KEY)
    assert state == ()
    assert model.apply(params, state, 2.0, KEY, True)[0] == 2.0

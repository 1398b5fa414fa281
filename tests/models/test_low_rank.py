"""LoRA: adapters in place of a model's parameters, which stay frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, round, sampling, tree
from fedjax_sim.engine.jaxpr import walk
from fedjax_sim.models import (
    from_linen,
    gru,
    layer,
    lora,
    merged,
    mlp,
    sequential,
    squared_error,
    supervised,
    transformer,
)
from tests.refusals import refused

KEY = jax.random.key(0)
SMALL = transformer(num_outputs=5, features=8, num_heads=2, num_blocks=1, hidden=12)
NETWORK = mlp(input_shape=(4,), num_outputs=5, hidden=(6,))
TOKENS = np.array([[1, 2, 3, 0], [4, 4, 0, 2]])  # numbers to a network of vectors


def started(model):
    """The model's parameters and state, with matrices B that are not zero."""

    @jax.jit
    def start(key):
        params, state = model.init(key)
        return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(key, leaf.shape), params), state

    return start(KEY)


def outputs(model, params, state, x):
    return jax.jit(lambda params, state: model.apply(params, state, x, None, False)[0])(params, state)


@pytest.mark.default_rows("mlp")
@pytest.mark.parametrize("model", [SMALL, gru(num_outputs=5, hidden=4), NETWORK], ids=["transformer", "gru", "mlp"])
def test_starts_as_the_model(model):
    """Catches a B that is not zero, other frozen leaves than the model's, and a sum in place of two products."""
    adapted = lora(model, rank=2, trained=["output"])
    params, state = jax.jit(adapted.init)(KEY)
    np.testing.assert_array_equal(
        outputs(adapted, params, state, TOKENS), outputs(model, jax.jit(model.init)(KEY)[0], (), TOKENS)
    )
    assert "output" in params and "output" not in state["frozen"]


def test_merged_parameters_give_the_same_logits():
    """Catches a scale that is applied twice or not at all, and a product of A and B the other way round."""
    adapted = lora(NETWORK, rank=3, alpha=6.0, trained=["output/bias"])
    params, state = started(adapted)
    whole = jax.jit(merged)(params, state)
    np.testing.assert_allclose(
        outputs(NETWORK, whole, (), TOKENS), outputs(adapted, params, state, TOKENS), rtol=1e-5, atol=1e-5
    )
    pair = params["hidden_0"]["kernel"]
    change = np.asarray(whole["hidden_0"]["kernel"]) - np.asarray(state["frozen"]["hidden_0"]["kernel"])
    np.testing.assert_allclose(change, 2.0 * np.asarray(pair["a"]) @ np.asarray(pair["b"]), atol=1e-6)
    assert jax.tree.structure(whole) == jax.tree.structure(jax.eval_shape(NETWORK.init, KEY)[0])


@pytest.mark.full
def test_full_rank_is_full_training():
    """With A orthogonal and fixed, r = num_inputs and scale 1, SGD on B from zero is SGD on W: catches a lost term."""
    model = mlp(input_shape=(4,), num_outputs=3, hidden=(6,))
    adapted = lora(model, rank=4, matrices=["hidden_0"])
    params, state = jax.jit(adapted.init)(KEY)
    orthogonal = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0], jnp.float32)
    examples = {"x": jax.random.normal(KEY, (10, 4)), "y": jax.random.normal(KEY, (10, 3))}
    kernels = model.init(KEY)[0]

    def loss_of_b(b):
        at = {"hidden_0": {"kernel": {"a": orthogonal, "b": b}}}
        return squared_error(adapted.apply(at, state, examples["x"], None, False)[0], examples["y"])["loss"].mean()

    def loss_of_kernel(kernel):
        at = kernels | {"hidden_0": kernels["hidden_0"] | {"kernel": kernel}}
        return squared_error(model.apply(at, (), examples["x"], None, False)[0], examples["y"])["loss"].mean()

    b, kernel = params["hidden_0"]["kernel"]["b"], kernels["hidden_0"]["kernel"]
    step_of_b, step_of_kernel = (jax.jit(jax.grad(loss)) for loss in (loss_of_b, loss_of_kernel))
    for _ in range(20):
        b, kernel = b - 0.3 * step_of_b(b), kernel - 0.3 * step_of_kernel(kernel)
    trained = state["frozen"]["hidden_0"]["kernel"] + orthogonal @ b
    np.testing.assert_allclose(trained, kernel, atol=2e-6)
    assert np.abs(kernel - kernels["hidden_0"]["kernel"]).max() > 0.1


@pytest.mark.full  # by default tests/models/test_freezing.py has the law, and the next test the bytes of adapters
def test_frozen_leaves_stay_and_are_in_no_message():
    """Catches frozen leaves that are broadcast, sent, counted as bytes or changed."""
    adapted = lora(mlp(input_shape=(4,), num_outputs=3, hidden=(5,)), rank=2, trained=["output/bias"])
    params, state = jax.jit(adapted.init)(KEY)
    rows = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    clients = population.stored({"x": rows[0], "y": rows[1, :, :3]}, np.arange(7))
    loss_fn = supervised(adapted, squared_error, frozen_state=state)
    algorithm = algorithms.fedavg(loss_fn, sampling.full(6), optax.sgd(0.5), num_steps=2, batch_size=1)
    before = tree.sha256_of(state).hexdigest()

    start = algorithm.init(KEY, params, clients)
    last, info = jax.jit(algorithm.step)(KEY, start, clients)
    seen = jax.eval_shape(lambda state: round.observe(algorithm, KEY, state, clients), start)
    messages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), seen.messages)
    for sent in (seen.broadcast, messages, algorithm.params(last)):
        assert jax.tree.map(jnp.shape, sent) == jax.tree.map(jnp.shape, params)
    assert tree.sha256_of(state).hexdigest() == before
    assert info["uplink_bytes"].total() == 6 * tree.num_bytes(params)
    changed = jax.tree.leaves(
        jax.tree.map(lambda a, b: np.any(a != b), *jax.device_get((algorithm.params(last), params)))
    )
    assert all(map(bool, changed))


@pytest.mark.default_rows("True")
@pytest.mark.parametrize("freeze_a", [True, False])
def test_with_a_frozen_the_mean_is_exact(freeze_a):
    """Two full-batch steps on the factors against NumPy, from a B that is not 0, and what is sent. Catches an A that is
    trained, drawn anew or sent, and a scale that is lost.

    Beside it, adapters of which both factors are trained: the product of their means is not the mean of their products.
    """
    rate, scale, x, y = 0.05, 1.5, *np.random.default_rng(0).normal(size=(2, 5, 6, 4)).astype(np.float32)
    x, y = x[:, :, :3], y[:, :, :2]
    model = mlp(input_shape=(3,), num_outputs=2, hidden=())
    clients = population.from_clients([{"x": x[i], "y": y[i]} for i in range(5)])
    adapted = lora(model, rank=1, alpha=scale, matrices=["output"], freeze_a=freeze_a)
    params, state = jax.device_get(jax.jit(adapted.init)(KEY))
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.3), params)
    whole = jax.eval_shape(merged, params, state)
    pair = {"a": state["a"]["output"]["kernel"]} if freeze_a else params["output"]["kernel"]
    a, b = np.float64(pair["a"]), np.float64(params["output"]["kernel"]["b"])
    products = []
    for i in range(5):
        a_i, b_i = a, b
        for _ in range(2):
            error = x[i] @ (state["frozen"]["output"]["kernel"] + scale * a_i @ b_i) - y[i]
            slope = x[i].T @ error / 6 * scale
            a_i, b_i = a_i - (0 if freeze_a else rate * slope @ b_i.T), b_i - rate * a_i.T @ slope
        products.append(a_i @ b_i)
    loss_fn = supervised(adapted, lambda z, y: {"loss": ((z - y) ** 2).sum(1) / 2}, frozen_state=state)
    algorithm = algorithms.fedavg(loss_fn, sampling.full(5), optax.sgd(rate), num_steps=2)
    last, info = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, params, clients), clients)
    after = jax.device_get(jax.jit(merged)(algorithm.params(last), state))
    change = after["output"]["kernel"] - state["frozen"]["output"]["kernel"]
    found, expected = np.float64(change) / scale, np.mean(products, 0)
    assert jax.tree.structure(whole) == jax.tree.structure(jax.eval_shape(model.init, KEY)[0])
    if freeze_a:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert np.abs(found - expected).max() > 1e-3
    assert info["uplink_bytes"].total() == 5 * 4 * (2 if freeze_a else 3 + 2)


@pytest.mark.full
def test_clients_share_the_frozen_product():
    """Catches a matrix for each client: under a vmap over clients, no equation of the gradient has one."""
    adapted = lora(SMALL, rank=2)
    params, state = jax.eval_shape(adapted.init, KEY)
    num_clients = 17
    of_clients = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_clients, *x.shape), x.dtype), params)
    tokens = jax.ShapeDtypeStruct((num_clients, 2, 4), jnp.int32)

    def loss(params, state, x):
        return jax.nn.logsumexp(adapted.apply(params, state, x, None, False)[0]).sum()

    program = jax.make_jaxpr(jax.vmap(jax.grad(loss), in_axes=(0, None, 0)))(of_clients, state, tokens)
    shapes = {tuple(x.aval.shape) for equation in walk(program) for x in (*equation.invars, *equation.outvars)}
    matrices = {leaf.shape for leaf in jax.tree.leaves(state["frozen"]) if len(leaf.shape) == 2} - {(5, 8)}
    assert (num_clients, 2, 4, 8) in shapes and {(8, 8), (8, 12), (12, 8)} <= matrices
    for rows, columns in matrices:
        for shape in ((num_clients, rows, columns), (num_clients, columns, rows)):
            assert shape not in shapes


def test_error_texts():
    """Catches a path that chooses nothing, a rank without meaning, and a model that would not see its adapters."""
    with refused("rank", value=9, rule="at most 8"):
        lora(SMALL, rank=9)
    with pytest.raises(ValueError, match="rank: expected an integer"):
        lora(SMALL, rank=0)
    with refused("matrices", value="block_1"):
        lora(SMALL, rank=2, matrices=["block_1"])
    with refused("trained", value="outputs", hint="'output'"):
        lora(SMALL, rank=2, trained=["outputs"])
    with refused("trained", rule="not adapted"):
        lora(SMALL, rank=2, trained=["block_0/mlp"])
    with refused("matrices", rule="at least one"):
        lora(mlp(input_shape=(4,), num_outputs=3, hidden=()), rank=2)
    with pytest.raises(TypeError, match="model: expected a Model"):
        lora(None, rank=2)
    transposed = sequential([layer("last", lambda key: {"kernel": jnp.ones((2, 3))}, lambda p, x: x @ p["kernel"].T)])
    adapted = lora(transposed, rank=1, matrices=["last"])
    params, state = adapted.init(KEY)
    with pytest.raises(AttributeError, match=r"last/kernel: .*, got matrix\.T"):
        adapted.apply(params, state, jnp.ones((1, 3)), None, False)


def test_models_that_use_a_matrix_otherwise_are_refused():
    """Catches adapters that a module of flax ignores."""
    from flax import linen

    adapted = lora(from_linen(linen.Dense(3), jax.ShapeDtypeStruct((1, 2), jnp.float32)), rank=1, matrices=["kernel"])
    params, state = adapted.init(KEY)
    with pytest.raises(TypeError, match="LowRankSum"):
        adapted.apply(params, state, jnp.ones((1, 2)), None, False)

"""Drift of any model, measured: against the closed form on quadratics, Taylor remainders, and a real round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.engine import Plan
from fedjax_sim.metrics.clients import VALUES, risk, sum_over_clients
from fedjax_sim.metrics.drift import drift, drift_bias, drift_leading_term
from fedjax_sim.theory.drift import quadratic_drift
from fedjax_sim.types import ClientData

FIELDS = ("gradient", "end_point_gradient", "pseudo_gradient", "bias", "curvature", "heterogeneity", "leading_term")
COUNTS = np.array([1, 4, 2, 3])


def problem():
    rng = np.random.default_rng(5)
    factors = rng.normal(size=(4, 3, 3))
    hessians = factors @ np.swapaxes(factors, 1, 2) / 3 + 0.3 * np.eye(3)
    return hessians, rng.normal(size=(4, 3))


def quadratic():
    return population.quadratic_population(*problem(), counts=COUNTS)


def flat(x):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]).astype(np.float64)


@pytest.mark.default_rows("4")
@pytest.mark.parametrize("num_steps", [1, 4])
def test_closed_form(num_steps):
    """Every field is theory's, by examples and by clients. Catches weights, K off by one, and parts exchanged."""
    point = np.array([0.7, -1.2, 0.4])
    for weighting, shares in (("examples", COUNTS / COUNTS.sum()), ("uniform", np.full(4, 0.25))):
        work = {"step_size": 0.1, "num_steps": num_steps}
        expected = quadratic_drift(*problem(), shares, point=point, **work)
        params = {"w": jnp.asarray(point, jnp.float32)}
        found = drift(population.quadratic_loss, params, quadratic(), weighting=weighting, **work)
        for name in FIELDS:
            np.testing.assert_allclose(getattr(found, name)["w"], getattr(expected, name), atol=5e-6, err_msg=name)
        np.testing.assert_allclose(found.remainder["w"], 0, atol=5e-6)
        leading = drift_leading_term(population.quadratic_loss, params, quadratic(), weighting=weighting, **work)
        np.testing.assert_allclose(leading["w"], expected.leading_term, atol=5e-6)


def test_scalar_numbers_and_chosen_clients():
    """The scalar example by hand, with p by counts; `ids` are a population of their own. Catches padding lanes that
    count."""
    data = population.quadratic_population([1.0, 1, 1, 9], [0.0, 2, 7, 50], counts=[2, 3, 5, 4])
    params = {"w": jnp.ones(1)}
    for num_steps, expected in ((1, 0.31), (5, 1.269481)):
        work = {"step_size": 0.1, "num_steps": num_steps}
        found = drift_bias(population.quadratic_loss, params, data, ids=[0, 1, 2], **work)
        assert found["w"][0] == pytest.approx(expected, abs=2e-6)
    assert drift_bias(population.quadratic_loss, params, data, **work)["w"][0] != pytest.approx(expected, abs=0.1)


def test_no_steps_no_drift():
    """Catches a first step that is always taken."""
    params = {"w": jnp.ones(3)}
    for work in ({"num_steps": 0, "step_size": 0.1}, {"num_steps": 3, "step_size": 0.0}):
        assert not np.any(drift_bias(population.quadratic_loss, params, quadratic(), **work)["w"])


def logistic():
    rng = np.random.default_rng(7)
    clients = [
        {"x": rng.normal(id - 2, 1, (n, 4)).astype(np.float32), "y": rng.integers(0, 3, n).astype(np.int32)}
        for id, n in enumerate((3, 9, 5, 7))
    ]
    model = models.logistic(input_shape=(4,), num_outputs=3)
    loss = models.supervised(model, models.default_loss("classification"))
    return loss, model.init(jax.random.key(0))[0], population.from_clients(clients)


def test_logistic_remainders():
    """The bias less its leading term is O(eta^2), a quarter for half the step; so is the split's remainder."""
    loss, params, data = logistic()
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params)
    rest, remainders = [], []
    for eta in (0.02, 0.01):
        found = drift(loss, params, data, step_size=eta, num_steps=1)
        total = flat(found.curvature) + flat(found.heterogeneity) + flat(found.remainder)
        np.testing.assert_allclose(total, flat(found.bias), atol=1e-6)
        rest.append(np.linalg.norm(flat(found.bias) - flat(found.leading_term)))
        remainders.append(np.linalg.norm(flat(found.remainder)))
    for values in (rest, remainders):
        assert values[0] / values[1] == pytest.approx(4, abs=0.3)


@jax.custom_vjp
def bent(x):
    """A layer with a gradient of its own, as recurrent cells and convolutions have it: it has no jvp."""
    return jnp.tanh(x)


bent.defvjp(lambda x: (jnp.tanh(x), x), lambda x, slope: (slope * (1 - jnp.tanh(x) ** 2),))


def test_layers_without_forward_mode():
    """A network whose layer refuses jvp: leading term against differences. Catches forward-mode products."""

    def loss(params, examples, key):
        return {"loss": (bent(examples["x"] @ params["hidden"]) @ params["output"] - examples["y"]) ** 2}

    rng = np.random.default_rng(0)
    params = {"hidden": rng.normal(size=(3, 4)).astype(np.float32), "output": rng.normal(size=4).astype(np.float32)}
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(bent, (params["output"],), (params["output"],))
    x, y = 0.3 * rng.normal(size=(6, 3)).astype(np.float32), 0.3 * rng.normal(size=6).astype(np.float32)
    data = population.from_clients([{"x": x[rows], "y": y[rows]} for rows in (slice(2), slice(2, 6))])
    leading = drift_leading_term(loss, params, data, step_size=0.02)
    slope = jax.jit(jax.grad(lambda p, id: risk(loss, p, data.client(id))[0]))
    expected = np.zeros_like(flat(leading))
    for id, share in ((0, 1 / 3), (1, 2 / 3)):
        gradient = jax.device_get(slope(params, id))
        ahead, behind = (
            slope(jax.tree.map(lambda w, g, step=step: w + np.float32(step) * g, params, gradient), id)
            for step in (0.01, -0.01)
        )
        expected += share * (flat(behind) - flat(ahead))
    np.testing.assert_allclose(flat(leading), expected, atol=3e-4 * np.abs(expected).max() + 2e-5)
    assert np.abs(expected).max() > 1e-3


def test_pseudo_gradient_is_the_rounds():
    """It is (w - w_next) / eta of a round of FedAvg, not the gradient at the end points. Catches one taken for the
    other."""
    params = {"w": jnp.array([0.7, -1.2, 0.4])}
    algorithm = algorithms.fedavg(
        population.quadratic_loss, sampling.full(4), optax.sgd(0.1), num_steps=4, plan=Plan(4, 4), mesh=None
    )
    state = algorithm.init(jax.random.key(0), params, quadratic())
    state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, quadratic())
    round_gradient = (params["w"] - algorithm.params(state)["w"]) / 0.1
    found = drift(population.quadratic_loss, params, quadratic(), step_size=0.1, num_steps=4)
    np.testing.assert_allclose(found.pseudo_gradient["w"], round_gradient, atol=2e-5)
    assert np.abs(np.asarray(found.pseudo_gradient["w"] - found.end_point_gradient["w"])).max() > 0.1


def test_sums_keep_their_digits():
    """10^5 clients of 0.1, alone and by the hundred. Catches a plain running sum (off by 1e-4), padding that counts."""
    clients = population.generated(100_003, lambda _, id: ClientData({"x": jnp.full(3, 0.1)}, jnp.arange(3) < 1))
    ids = jnp.arange(clients.size, dtype=jnp.int32)

    def each(data):
        return jnp.where(data.mask, data.examples["x"], 0).sum()

    for values in (1, VALUES):
        like = jax.ShapeDtypeStruct((values,), jnp.float32)
        found = jax.jit(lambda ids, like=like: sum_over_clients(each, like, clients, ids))(ids)
        assert float(found) == pytest.approx(0.1 * clients.size, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": -0.1}, "step_size"),
        ({"num_steps": 1.5}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"weighting": "example"}, "weighting"),
        ({"ids": [4]}, "ids"),
        ({"ids": []}, "ids"),
    ],
)
def test_wrong_input(options, message):
    """Catches ids that JAX would clamp, and steps that are no numbers."""
    with pytest.raises((ValueError, TypeError), match=message):
        drift(
            population.quadratic_loss, {"w": jnp.ones(3)}, quadratic(), **{"step_size": 0.1, "num_steps": 1, **options}
        )

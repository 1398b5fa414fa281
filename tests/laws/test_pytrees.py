"""Arbitrary pytrees of parameters, and memory that does not grow with the cohort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, engine, population, sampling, server
from fedjax_sim.types import ClientData
from tests.laws import cases, problems as p


@pytest.mark.optimised(False)  # this law does not depend on the compiler
def test_nested_scalars_and_low_precision():
    """Catches parameters that are flattened, promoted or zipped: a tuple of tuples, a scalar, a bfloat16 leaf, and one
    without numbers."""
    data = population.from_clients([{"a": np.full(n, n, np.float32)} for n in (1, 2, 3, 4)])
    params = ((jnp.zeros((2, 2)), jnp.bfloat16(1)), {"s": jnp.float32(-1)}, [jnp.zeros(()), jnp.zeros((2, 0))])

    def loss(params, x, key):
        return sum(
            ((leaf.astype(jnp.float32).reshape(-1)[:, None] - x["a"][None]) ** 2).sum(0) / 2
            for leaf in jax.tree.leaves(params)
        )

    algorithm = algorithms.fedavg(
        loss, sampling.full(4), optax.sgd(1.0), num_steps=1, plan=engine.Plan(2, 4), mesh=None
    )
    state = algorithm.init(jax.random.key(0), params, data)
    state, info = jax.jit(algorithm.step)(jax.random.key(1), state, data)
    new = algorithm.params(state)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    for leaf, old in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        assert leaf.dtype == old.dtype and leaf.shape == old.shape
        np.testing.assert_allclose(np.asarray(leaf, np.float32), 3.0, rtol=1e-6)  # mean of n by weight n
    assert info["uplink_bytes"].total() == 4 * (4 * 6 + 2)


def _client(parameters, id):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), id), (4, 2048))
    return ClientData({"x": x, "y": x[:, 0]}, jnp.ones(4, bool))


@pytest.mark.full
def test_memory_of_a_round_is_flat_in_the_cohort():
    """16 times the cohort, under 5 % more temporary memory. Catches anything of a client that is kept per slot."""
    data = population.generated(4096, _client)

    def loss(params, examples, key):
        return (examples["x"] @ params - examples["y"]) ** 2

    def temporary(num_slots):
        algorithm = algorithms.federated(
            sampling.uniform(4096, num_slots),
            client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=2)),
            aggregation.mean(),
            server.optimizer(optax.sgd(1.0)),
            plan=engine.Plan(4, 8),
            mesh=None,
        )
        state = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), jnp.zeros(2048), data))
        lowered = jax.jit(algorithm.step).lower(jax.random.key(0), state, data)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(64), temporary(1024)
    per_slot = 1024 * 64  # ids, positions and flags; a client's update is 8 KiB
    assert large <= 1.05 * small + per_slot, (small, large)


# Some read the parameters of their model's layers alone, others train no model.
OF_ANY_PARAMS = [name for name, row in cases.CASES["algorithms"].items() if row.any_params and row.trains]


@pytest.mark.default_rows("fedavg", "dpsgd", "fedbuff", "fedper", "hierarchical_fedavg", "scaffold")
@pytest.mark.parametrize("name", OF_ANY_PARAMS)
def test_an_integer_leaf_is_named(name, monkeypatch):
    """Catches an error of JAX's own, which does not say which leaf has no gradient."""
    loss = p.linear_loss
    monkeypatch.setattr(p, "linear_loss", lambda params, examples, key: loss(params["w"], examples, key))
    algorithm, people = cases.CASES["algorithms"][name](), p.ragged()
    params = {"w": np.array(p.START, np.float32), "rounds": np.int32(3)}
    with pytest.raises(TypeError, match=r"^params.*\['rounds'\]: .*, got 'int32'"):
        state = algorithm.init(jax.random.key(0), params, people)
        jax.eval_shape(algorithm.step, jax.random.key(0), state, people)

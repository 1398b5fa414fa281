"""Clients that train the touched rows of an embedding table only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType
from fedjax_sim.client import local_sgd, private_sgd, scaffold, touched_rows, work
from fedjax_sim.models import layers
from fedjax_sim.types import ClientData
from tests.refusals import refused

V = 101
PARAMS = {
    "embedding": {"table": jax.random.normal(jax.random.key(0), (V, 4))},
    "output": jax.random.normal(jax.random.key(1), (4, 3)),
}


def loss_fn(params, examples, key):
    states = layers.embedding(params["embedding"], examples["x"]).mean(axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(states @ params["output"], examples["y"])


def clients(optimizer, **options):
    dense = local_sgd(loss_fn, optimizer, work(num_steps=3, batch_size=2))
    return dense, touched_rows(dense, **options)


def data(seed=0, dtype=jnp.int32):
    x = jax.random.randint(jax.random.key(seed), (5, 6), 0, V).astype(dtype)
    x = x.at[0, 3:].set(-1).at[1].set(V - 1).at[2, 0].set(0)
    x = x.at[4].set(V + 7)  # padding rows may hold anything
    return ClientData({"x": x, "y": jnp.arange(5) % 3}, jnp.arange(5) < 4)


def apply(client, *, data):
    return jax.jit(lambda d: client.apply(jax.random.key(3), PARAMS, (), d)[0])(data)


OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.3, momentum=0.9),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_dense_client(name):
    """Catches rows exchanged, padding or rest rows that write somewhere, and momentum lost between the steps."""
    dense, compact = (apply(client, data=data()) for client in clients(OPTIMIZERS[name]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), compact, dense)
    moved = np.flatnonzero(np.abs(compact.update["embedding"]["table"]).sum(axis=1))
    touched = np.asarray(data().examples["x"][:4])
    assert set(moved) == set(touched[touched >= 0])


@pytest.mark.full
def test_clients_side_by_side_equal_the_dense_ones():
    """Catches numbering that mixes clients under vmap, and token dtypes that overflow when renumbered."""
    together = jax.tree.map(lambda *x: jnp.stack(x), *(data(seed, jnp.int8) for seed in range(3)))
    dense, compact = clients(optax.sgd(0.3))
    run = lambda client: jax.jit(  # noqa: E731
        jax.vmap(lambda d: client.apply(jax.random.key(3), PARAMS, (), d)[0].update)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        run(compact)(together),
        run(dense)(together),
    )


def test_unknown_tokens_stay_nan():
    """Catches an unknown token that trains another row in silence."""
    spoiled = data()
    spoiled.examples["x"] = spoiled.examples["x"].at[3, 0].set(V)
    assert np.isnan(apply(clients(optax.sgd(0.3))[1], data=spoiled).update["output"]).all()


def test_steps_do_not_see_the_vocabulary():
    """Catches a local step that differentiates and updates the full table."""
    seen = []

    def watched(params, examples, key):
        seen.append(params["embedding"]["table"].shape[0])
        return loss_fn(params, examples, key)

    apply(touched_rows(local_sgd(watched, optax.sgd(0.3), work(num_steps=12, batch_size=2))), data=data())
    assert set(seen) == {data().examples["x"].size}


@pytest.mark.full
def test_many_tokens_leave_the_client_as_it_is():
    """Catches a compact table larger than the full one."""
    x = jax.random.randint(jax.random.key(5), (20, 6), 0, V)
    many = ClientData({"x": x, "y": jnp.arange(20) % 3}, jnp.ones(20, bool))
    dense, compact = (apply(client, data=many) for client in clients(optax.sgd(0.3)))
    jax.tree.map(np.testing.assert_array_equal, dense, compact)


def test_error_texts():
    """Catches a wrong path or name that would train nothing, and state that cannot follow the rows."""
    with pytest.raises(ValueError, match="predicate: expected paths among"):
        apply(clients(optax.sgd(0.3), table="embeding/table")[1], data=data())
    with refused("tokens", value="text", rule="integers", kind=InvalidType):
        apply(clients(optax.sgd(0.3), tokens="text")[1], data=data())
    nested = ClientData({"x": {"word": jnp.zeros((2, 3), jnp.int32)}, "y": jnp.zeros(2)}, jnp.ones(2, bool))
    with refused("tokens", value="x", rule="integers", kind=InvalidType):
        apply(clients(optax.sgd(0.3))[1], data=nested)
    with refused("examples", rule="tokens", kind=InvalidType):
        apply(clients(optax.sgd(0.3))[1], data=ClientData(jnp.zeros((2, 3), jnp.int32), jnp.ones(2, bool)))
    with pytest.raises(ValueError, match="client: expected a client without state"):
        stateful = scaffold(loss_fn, 0.1, work(num_steps=1, weighting="uniform"))
        touched_rows(stateful).init({"params": PARAMS, "control": PARAMS})


def test_unequal_clients_are_packed():
    """Catches the inner client's number of steps lost on the way."""
    inner = local_sgd(lambda params, x, key: x, optax.sgd(0.1), work(num_epochs=1, batch_size=2))
    assert touched_rows(inner, table="a", tokens="b").facts.num_steps is inner.facts.num_steps


def test_noise_on_some_rows_is_refused():
    """Catches an update whose rows without noise name the tokens that a client holds."""
    noisy = private_sgd(lambda params, x, key: x, 1.0, 1.0, 0.1, num_steps=1, batch_size=2, num_examples=4)
    with pytest.raises(ValueError, match="client: expected a client without noise"):
        touched_rows(noisy, table="a", tokens="b")

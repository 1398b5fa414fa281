"""Per-client memory: who is written, who is not, how it is split, and what does not fit."""

from __future__ import annotations

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, algorithms, engine, tree
from fedjax_sim.prng import stream
from fedjax_sim.sampling import uniform, with_dropout
from tests.laws import laws, problems as p
from tests.refusals import refused

STATE = {"c": jnp.array([1.0, -0.0]), "half": jnp.full((2, 1), 3.0, jnp.bfloat16), "n": jnp.int32(3), "on": True}


def memory_of(kind, num_clients, folder, state=None):
    mesh = engine.device_mesh() if kind in ("sharded", "disk on two") else None
    with engine.client_memory("disk" if "disk" in kind else "device", folder / kind.replace(" ", "_")):
        return engine.store(jax.tree.map(jnp.asarray, STATE if state is None else state), num_clients, mesh=mesh)


KINDS = ("device", "sharded", "disk", "disk on two")
take, put = jax.jit(engine.take), jax.jit(engine.put)


@pytest.mark.default_rows("sharded")
@pytest.mark.parametrize("kind", KINDS)
def test_put_leaves_absent_clients_alone(kind, tmp_path):
    """Catches padding that writes, also when it carries a present client's id; catches ids past N wrapping round."""
    memory = memory_of(kind, 5, tmp_path, {"a": jnp.float32(7.0), "b": jnp.zeros(2)})
    ids = jnp.array([1, 3, 1, 0])
    rows = {"a": jnp.array([10.0, 30.0, -1.0, -1.0]), "b": jnp.ones((4, 2))}
    _, memory = take(memory, ids)
    memory = put(memory, ids, rows, jnp.array([True, True, False, False]))
    everybody = jnp.arange(5)
    new, memory = take(memory, everybody)
    assert new["a"].tolist() == [7, 10, 7, 30, 7]
    assert new["b"].sum(1).tolist() == [0, 2, 0, 2, 0]
    memory = put(memory, ids, rows, jnp.zeros(4, bool))
    laws.check_equal_bits(new, take(memory, everybody)[0], "nobody reported")


@pytest.mark.default_rows("sharded")
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_of_equal_ids_writes(kind, tmp_path):
    """Catches an outcome that depends on threads or on the device that holds a slot."""
    memory = memory_of(kind, 7, tmp_path, jnp.float32(0))
    ids = jnp.array([2, 5, 2, 6, 2, 5, 2])
    memory = put(memory, ids, jnp.arange(1.0, 8), jnp.array([True] * 6 + [False]))
    assert take(memory, jnp.arange(7))[0].tolist() == [0, 0, 5, 0, 0, 6, 4]


@pytest.mark.default_rows("sharded")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_every_bit(kind, tmp_path):
    """Random bits in every dtype, over rounds of odd cohorts. Catches -0.0 summed to 0.0, wrong rows."""
    rng, num_clients = np.random.default_rng(0), 13
    memory = memory_of(kind, num_clients, tmp_path)
    model = jax.tree.map(lambda x: np.broadcast_to(x, (num_clients, *np.shape(x))).copy(), STATE)
    for _ in range(4):
        ids = rng.permutation(num_clients)[:5]
        rows = {
            "c": rng.integers(0, 2**32, (5, 2), np.uint32).view(np.float32),
            "half": (rng.integers(-2, 3, (5, 2, 1)) * np.float32(-0.3)).astype(jnp.bfloat16),
            "n": rng.integers(-9, 9, 5).astype(np.int32),
            "on": rng.random(5) < 0.5,
        }
        got, memory = take(memory, jnp.array(ids))
        laws.check_equal_bits(jax.tree.map(lambda x: x[ids], model), got, "rows taken")  # noqa: B023
        memory = put(memory, jnp.array(ids), rows, jnp.ones(5, bool))
        for name, row in rows.items():
            model[name][ids] = row
    laws.check_equal_bits(model, take(memory, jnp.arange(num_clients))[0], "all rows")


def test_keys_are_refused():
    """Catches an error of NumPy's that names neither the argument nor a way out."""
    with refused("client_state", value="key<fry>", hint="jax.random.key_", kind=InvalidType):
        engine.store({"key": jax.random.key(0), "c": jnp.zeros(2)}, 3)


def federation(mesh, num_clients=p.NUM_CLIENTS):
    sampler = with_dropout(uniform(num_clients, 7), 0.2)
    work = {"num_steps": 2, "batch_size": p.BATCH, "weighting": "uniform", "plan": p.PLAN, "mesh": mesh}
    return algorithms.scaffold(p.linear_loss, sampler, optax.sgd(p.RATE), **work)


@pytest.mark.full
@pytest.mark.parametrize("kinds", [("device", "disk on two"), pytest.param(KINDS, marks=pytest.mark.full)], ids=len)
def test_every_kind_gives_the_same_bits(kinds, tmp_path):
    """SCAFFOLD over rounds in one loop. Catches a kind that is part of a result's identity, reads before writes."""
    data, outcomes = p.ragged(), []
    for kind in kinds:
        algorithm = federation(engine.device_mesh() if kind in ("sharded", "disk on two") else None)
        with engine.client_memory("disk" if "disk" in kind else "device", tmp_path / kind.replace(" ", "_")):
            state = algorithm.init(jax.random.key(0), jnp.array(p.START), data)

        @jax.jit
        def run(state, data, algorithm=algorithm):
            def one_round(i, state):
                return algorithm.step(jax.random.fold_in(stream(jax.random.key(0), "rounds"), i), state, data)[0]

            return jax.lax.fori_loop(0, 9, one_round, state)

        state = run(state, data)
        rows, _ = engine.take(state.clients, jnp.arange(p.NUM_CLIENTS))
        outcomes.append((state.server, rows))
    assert np.abs(outcomes[0][1]).max() > 0
    for kind, outcome in zip(kinds[1:], outcomes[1:], strict=True):
        laws.check_equal_bits(*jax.device_get((outcomes[0], outcome)), kind)


def test_sharded_rows_are_split():
    """Catches a copy of everything on every device, at first and after a round."""
    mesh = engine.device_mesh()
    memory = memory_of("sharded", 2001, pathlib.Path(), {"w": jnp.zeros(50)})
    ids = jnp.arange(9)
    after = put(memory, ids, {"w": jnp.ones((9, 50))}, jnp.ones(9, bool))
    for state in (memory, after):
        held = [shard.data.shape for shard in state.rows["w"].addressable_shards]
        assert held == [(-(-2001 // mesh.size), 50)] * mesh.size
    text = put.lower(memory, ids, {"w": jnp.ones((9, 50))}, jnp.ones(9, bool)).compile().as_text()
    assert not any("all-gather" in line and "[2002,50]" in line for line in text.splitlines())


def test_gathered_is_the_same_for_any_number_of_devices():
    """Catches a checkpoint that only the same number of devices can read."""
    split = memory_of("sharded", 5, pathlib.Path())
    one = tree.zeros_like(jax.tree.map(lambda x: jnp.asarray(x)[None], STATE))
    split = put(split, jnp.array([4]), one, jnp.ones(1, bool))
    plain = engine.gathered({"m": split})["m"]
    spec = engine.gathered(split, spec=True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), plain) == jax.tree.map(lambda x: (x.shape, x.dtype), spec)
    assert plain["n"].tolist() == [3, 3, 3, 3, 0]
    back = engine.scattered({"m": plain}, {"m": split})["m"]
    assert jax.tree.structure(back) == jax.tree.structure(split)
    laws.check_equal_bits(engine.gathered(back), plain, "there and back")
    assert back.rows["n"].sharding == split.rows["n"].sharding


def test_store_starts_everyone_alike():
    """Catches a shared buffer between clients, and stateless clients that take memory."""
    memory = engine.store({"c": jnp.array([1.0, 2.0]), "n": jnp.int32(3)}, 4)
    assert np.asarray(memory["c"]).tolist() == [[1, 2]] * 4 and memory["n"].tolist() == [3] * 4
    assert engine.store((), 10**9) == ()


def test_store_refuses_what_does_not_fit(tmp_path):
    """Catches an allocation that would kill the process: the error holds the byte count, and says what else there is.

    With a folder the same memory goes to disk, and only there.
    """
    with pytest.raises(MemoryError, match=r"client memory: .*'4,000,000,000,000,000"):
        engine.store(jnp.zeros(1000), 10**12)
    with engine.client_memory("auto", tmp_path):
        memory = engine.store(jnp.zeros(1000), 10**9)
        assert isinstance(memory, engine.Disk) and not isinstance(engine.store(jnp.zeros(3), 10), engine.Disk)
    with engine.client_memory("device", tmp_path), pytest.raises(MemoryError, match="client_memory='disk'"):
        engine.store(jnp.zeros(1000), 10**12)


@pytest.mark.parametrize(
    "kind, words",
    [("disc", "client_memory: expected one of .* Did you mean 'disk'"), ("disk", "expected a run directory")],
)
def test_wrong_kinds(kind, words):
    with pytest.raises(ValueError, match=words), engine.client_memory(kind):
        pass


def test_only_shared_buffers_are_copied():
    """Catches client memory that is held twice, and a user's model that a block of rounds writes over."""
    params, memory = {"w": jnp.arange(3.0)}, jnp.zeros((1000, 3))
    state = {"server": params["w"], "clients": memory, "again": memory, "host": np.ones(2)}
    own = engine.owned(state, params)
    where = {name: x.unsafe_buffer_pointer() for name, x in own.items()}
    assert memory.unsafe_buffer_pointer() in (where["clients"], where["again"])
    assert len({*where.values(), params["w"].unsafe_buffer_pointer()}) == 5
    assert all((np.asarray(own[name]) == np.asarray(state[name])).all() for name in state)


def test_large_memory_is_announced(monkeypatch):
    """Catches gigabytes that nobody is told of."""
    monkeypatch.setattr(importlib.import_module("fedjax_sim.engine.client_memory.store"), "LARGE", 1000)
    with pytest.warns(UserWarning, match="client memory takes 4,000 bytes"):
        engine.store(jnp.zeros(1), 1000)

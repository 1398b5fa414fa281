"""What was compiled is found by later processes, gives the same bits, and is never another program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fedjax_sim import engine
from fedjax_sim.running import executables, program_files
from fedjax_sim.running.executables import Loaded, compiled
from tests.running.kept_programs import new_cache

pytestmark = pytest.mark.optimised  # programs for several devices, and their bits


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of compiled programs for each test."""
    with new_cache(tmp_path, monkeypatch) as folder:
        yield folder


ROWS = np.arange(8, dtype=np.float32) / 7
KEY = jax.random.key(3)


def program(factor=2.0):
    """A program that takes over its second argument, does not read its third, and splits its last over two devices. A
    part of the second is absent, as parts of states may be."""

    def function(key, state, unread, rows):
        noise = jax.random.normal(key, rows.shape)
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "clients"),
            mesh=engine.device_mesh(),
            in_specs=PartitionSpec("clients"),
            out_specs=PartitionSpec(),
        )(rows)
        return {"state": state["a"] + factor * total}, rows + noise

    rows = jax.device_put(ROWS, jax.NamedSharding(engine.device_mesh(), PartitionSpec("clients")))
    jitted = jax.jit(function, donate_argnums=1, compiler_options=engine.compiler_options())
    return jitted.trace(KEY, {"a": np.float32(1), "absent": None}, np.zeros(3), rows)


def result(call):
    """The results of the program, and whether its state was taken over."""
    placed = call.input_shardings[0]
    state = {"a": jax.device_put(np.float32(1), placed[1]["a"]), "absent": None}
    results = call(jax.device_put(KEY, placed[0]), state, np.zeros(3), jax.device_put(ROWS, placed[3]))
    return results, state["a"].is_deleted()


def test_the_same_bits(cache):
    """Faults: a loaded program with other results, places, structure or memory; buffers that it does not take over;
    arguments of another shape that it reads beyond their end."""
    options = engine.compiler_options()
    (first, name), (again, found) = (compiled(program(), options) for _ in range(2))
    assert not isinstance(first, Loaded) and isinstance(again, Loaded)
    assert [path.name for path in cache.iterdir()] == [name] == [found]
    (expected, taken), (results, is_taken) = result(first), result(again)
    assert taken and is_taken and jax.tree.structure(results) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.committed == y.committed
    assert again.input_shardings[0][2] is None and first.input_shardings[0][2] is None
    assert engine.needs(again) == engine.needs(first)
    with pytest.raises(TypeError, match=r"float32\[8\] was given float32\[7\]"):
        again(KEY, {"a": np.float32(1), "absent": None}, np.zeros(3), ROWS[:7])
    # Arrays that are elsewhere are put where the program reads them.
    elsewhere, _ = again(KEY, {"a": np.float32(1), "absent": None}, np.zeros(3), ROWS)
    assert elsewhere["state"] == expected[0]["state"]


def test_what_a_program_depends_on(cache, monkeypatch):
    """Fault: the program of another text, option, version or setting, loaded as this one's."""
    options = engine.compiler_options()
    _, name = compiled(program(), options)

    def name_of(traced, **more):
        return executables._name_of_program(traced.lower(), traced.out_info, options | more)

    names = [name_of(program()), name_of(program(3.0)), name_of(program(), xla_cpu_enable_fast_min_max="true")]
    assert names[0] == name
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    names += [name_of(program())]
    assert len(set(names)) == len(names) and None not in names
    assert not isinstance(compiled(program(), options)[0], Loaded)


def test_damage_is_mended(cache):
    """Faults: a damaged program that is loaded; one that JAX's cache had, written without the functions that XLA leaves
    out where it writes what it has read; a start that compiles for ever what cannot be written."""
    options = engine.compiler_options()
    _, name = compiled(program(), options)
    content = (cache / name).read_bytes()
    (cache / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    jax.clear_caches()
    assert program_files.read_program(name) is None  # a start that is told what it runs looks here before it traces
    mended, _ = compiled(program(), options)
    assert not isinstance(mended, Loaded)
    again, _ = compiled(program(), options)
    assert isinstance(again, Loaded) and result(again)[0][0]["state"] == result(mended)[0][0]["state"]
    # JAX's cache has a program whose file is gone: it runs, and is not written.
    (cache / name).unlink()
    jax.clear_caches()
    from_jax, found = compiled(program(), options)
    assert not isinstance(from_jax, Loaded) and found is None and not [*cache.iterdir()]


def test_what_is_not_kept(cache, monkeypatch):
    """Faults: a call of the host, or of a library, at the address of another process; results that come back with
    another type; a warning or an error where JAX lacks a method; results that JAX is asked to check."""
    x = np.ones((2, 2), np.float32)
    called = lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    printed = lambda x: (jax.debug.print("{}", x[0, 0]), x)[1]  # noqa: E731
    for function in (called, printed, jnp.linalg.qr, lambda x: jax.random.key(0), lambda x: 1.0):
        assert compiled(jax.jit(function).trace(x), {})[1] is None and not [*cache.iterdir()], function
    with monkeypatch.context() as patch:
        patch.delattr(jax.stages.Compiled, "runtime_executable")
        call, name = compiled(jax.jit(lambda x: x + 1).trace(x), {})
        assert name is None and call(x)[0, 0] == 2 and not [*cache.iterdir()]
    jax.config.update("jax_debug_nans", True)
    try:
        assert compiled(jax.jit(lambda x: x + 2).trace(x), {})[1] is None
    finally:
        jax.config.update("jax_debug_nans", False)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    assert compiled(jax.jit(lambda x: x + 3).trace(x), {})[1] is None and not [*cache.iterdir()]


def test_rounds_are_named_by_their_arguments():
    """Fault: the round of another shape, dtype, structure or place."""
    name = functools.partial(executables.name_of_round, "origin", KEY)
    state, rows = {"a": jnp.zeros(2)}, jnp.asarray(ROWS)
    split = jax.device_put(ROWS, jax.NamedSharding(engine.device_mesh(), PartitionSpec("clients")))
    pairs = [
        (state, rows),
        (state, rows[:4]),
        (state, rows.astype(jnp.int32)),
        (state, split),
        ([*state.values()], rows),
    ]
    names = [name(*pair) for pair in pairs] + [executables.name_of_round("other", KEY, state, rows)]
    assert len(set(names)) == len(names) and name(*pairs[0]) == names[0]
    assert executables.name_of_round(None, KEY, state, rows) is None

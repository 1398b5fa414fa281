"""The native store and the population that stays on the disk."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fedjax_sim import population as field
from fedjax_sim.population.describe import digest
from tests.refusals import refused

pytestmark = pytest.mark.optimised

RNG = np.random.default_rng(0)
SIZES = RNG.integers(0, 6, 40)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
ROWS = {
    "x": RNG.standard_normal((OFFSETS[-1], 3)).astype(np.float32),
    "y": RNG.integers(0, 255, OFFSETS[-1]).astype(np.uint8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "population"
    field.write_store(folder, ROWS, OFFSETS)
    return folder


def masked(data):
    """Valid rows as they are, padding set to zero: what a client may see."""
    return jax.tree.map(
        lambda x: jnp.where(data.mask.reshape(data.mask.shape + (1,) * (x.ndim - data.mask.ndim)), x, 0), data
    )


@functools.partial(jax.jit, static_argnames=("prefetch",))
def scanned(population, ids, prefetch=False):
    """Chunks [chunks, c] read one after the other inside a scan."""
    if prefetch:
        ids = population.announce(ids)
    return jax.lax.scan(lambda carry, chunk: (carry, masked(jax.vmap(population.client)(chunk))), 0, ids)[1]


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


CHUNKS = RNG.integers(0, 40, (4, 15)).astype(np.int32)  # random order, with duplicates


def test_store_round_trip(folder):
    """Catches a leaf, dtype or offset lost on the way to the disk and back."""
    population = field.read_store(folder)
    assert_same(population.examples, ROWS)
    np.testing.assert_array_equal(population.offsets, OFFSETS)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "offsets.npy", "x.npy", "y.npy"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["population"]  # nothing left aside


def test_a_changed_byte_on_the_disk(tmp_path):
    """Catches a store whose rows changed between two starts of a run, while its manifest did not."""
    field.write_store(tmp_path / "toy", ROWS, OFFSETS)
    data = field.FederatedData(
        train=field.host_store(tmp_path / "toy"),
        test=ROWS,
        held_out=None,
        input_shape=(3,),
        num_outputs=255,
        task="classification",
    )
    first = digest(data)
    (tmp_path / "toy").rename(tmp_path / "moved")
    moved = data._replace(train=field.host_store(tmp_path / "moved"))
    assert digest(moved) == first
    path = tmp_path / "moved" / "x.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refused(str(path), value="another", rule="SHA-256"):
        digest(data._replace(train=field.host_store(tmp_path / "moved")))


def test_host_equals_stored(folder):
    """Catches rows put back in the disk's order, an offset by the header, and padding that leaks."""
    stored, host = field.read_store(folder), field.host_store(folder)
    assert (host.size, host.max_examples) == (stored.size, stored.max_examples)
    np.testing.assert_array_equal(host.sizes, stored.sizes)
    assert [x.shape for x in jax.tree.leaves(host)] == [(40,)]  # sizes alone go to the device
    assert_same(scanned(host, CHUNKS), scanned(stored, CHUNKS))
    one = jax.jit(lambda population, id: masked(population.client(id)))
    for id in (0, 39, 40, -1):
        assert_same(one(host, id), one(stored, id))
    assert_same(field.pooled(host), field.pooled(stored))


def test_prefetch_changes_no_bit(folder):
    """Catches an announcement that is dropped, reorders ids, or touches the data."""
    host = field.host_store(folder)
    assert_same(scanned(host, CHUNKS, prefetch=True), scanned(host, CHUNKS))
    many = jnp.arange(40_000, dtype=jnp.int32) % 40  # above the size at which one callback could deadlock
    np.testing.assert_array_equal(jax.jit(lambda host, ids: host.announce(ids))(host, many), many)
    seen = []
    source = host.source
    source.announce, real = (lambda ids: seen.append(ids.size) or real(ids)), source.announce
    jax.block_until_ready(jax.jit(lambda host, ids: host.announce(ids) + 1)(host, jnp.arange(5)))
    assert sum(seen) == 5


def test_a_chunk_is_one_gather(folder):
    """Catches a callback per client, which would read the disk in the cohort's order."""
    host, calls = field.host_store(folder), []
    real = host.source.gather
    host.source.gather = lambda ids, most: calls.append(ids.shape) or real(ids, most)
    jax.block_until_ready(jax.jit(lambda ids: jax.vmap(host.client)(ids))(CHUNKS[0]))
    assert calls == [(15,)]


def test_host_under_shard_map(folder):
    """Catches a deadlock between devices, and results that claim to be equal on all of them."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("clients",), axis_types=(AxisType.Auto,))
    stored, host = field.read_store(folder), field.host_store(folder)
    ids = RNG.integers(0, 40, (2 * devices, 12)).astype(np.int32)

    def total(host, ids):  # the carry must be typed as varying, like real updates
        def body(carry, chunk):
            data = masked(jax.vmap(host.client)(chunk))
            return carry + data.examples["x"].sum(), data

        return jax.lax.scan(body, 0.0 * host.client(ids[0, 0]).examples["x"][0, 0], ids)[1]

    split = PartitionSpec("clients")
    sharded = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=(PartitionSpec(), split), out_specs=split))
    for _ in range(5):
        assert_same(sharded(host, ids), scanned(stored, ids))


def test_gradients_pass_by_the_data(folder):
    """Catches a callback without a derivative in the way of a client's gradient."""
    host = field.host_store(folder)

    def loss(w, id):
        data = host.client(id)
        return jnp.where(data.mask, data.examples["x"] @ w, 0).sum()

    full = int(np.argmax(SIZES))
    gradient = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(jnp.zeros(3), jnp.array([full]))[0]
    np.testing.assert_allclose(gradient, ROWS["x"][OFFSETS[full] : OFFSETS[full + 1]].sum(axis=0), rtol=1e-5)


def test_a_host_is_static_by_content(folder):
    """Catches a program compiled again for the same store."""
    a, b = field.host_store(folder), field.host_store(folder, verify=True)
    assert jax.tree.structure(a) == jax.tree.structure(b) and hash(a.source) == hash(b.source)


def test_too_large_a_chunk_fails_instead_of_hanging(folder):
    host = field.host_store(folder)
    with pytest.raises(Exception, match="Use a smaller chunk"):
        jax.block_until_ready(jax.jit(lambda ids: jax.vmap(host.client)(ids).mask)(jnp.zeros(20_000, jnp.int32)))


def _manifest(folder, edit):
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _x(**facts):
    return lambda folder: _manifest(folder, lambda m: m["files"]["x"].update(facts))


def _truncated(folder):
    with open(folder / "x.npy", "r+b") as file:
        file.truncate(os.path.getsize(folder / "x.npy") - 4)


def _magic(folder):
    with open(folder / "x.npy", "r+b") as file:
        file.write(b"PK\x03\x04")


def _header_shape(folder):
    raw = (folder / "x.npy").read_bytes()
    shape = f"({len(ROWS['x'])}, 3)".encode()
    (folder / "x.npy").write_bytes(raw.replace(shape, b"(9" + b"9" * (len(shape) - 4) + b",)"))


def _pickled(folder):
    size = os.path.getsize(folder / "x.npy")
    np.save(folder / "x.npy", np.array([{"a": 1}] * 4, dtype=object), allow_pickle=True)
    with open(folder / "x.npy", "ab") as file:
        file.write(b"\0" * (size - file.tell()))


def _renamed(name):
    def edit(manifest):
        manifest["files"][name] = manifest["files"].pop("x")

    return lambda folder: _manifest(folder, edit)


def _symlink(folder):
    (folder / "x.npy").rename(folder.parent / "elsewhere.npy")
    (folder / "x.npy").symlink_to(folder.parent / "elsewhere.npy")


def _offsets(folder):
    raw = bytearray((folder / "offsets.npy").read_bytes())
    raw[-1] ^= 1
    (folder / "offsets.npy").write_bytes(raw)


BROKEN = {
    "truncated": (_truncated, "Truncated"),
    "wrong magic": (_magic, "a .npy file of version 1 or 2"),
    "another header": (_header_shape, "a header that says"),
    "pickled": (_pickled, "a header that says|a .npy file"),
    "huge declared shape": (_x(shape=[10**18, 3]), "a file of"),
    "negative shape": (_x(shape=[-1, 3]), "a list of 1 to 32 counts"),
    "object dtype": (_x(dtype="object"), "a bool, integer or float type"),
    "64 bits": (_x(dtype="float64"), "at most 32 bits"),
    "parent path": (_renamed("../x"), "leaf name: expected letters"),
    "absolute path": (_renamed("/etc/x"), "leaf name: expected letters"),
    "missing file": (lambda folder: (folder / "y.npy").unlink(), "a regular file"),
    "a link": (_symlink, "a regular file"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "Use write_store"),
    "no JSON": (lambda folder: (folder / "manifest.json").write_text("{"), "expected JSON"),
    "deep JSON": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "expected JSON"),
    "another schema": (lambda folder: _manifest(folder, lambda m: m.update(schema=2)), "schema 1"),
    "flipped offset": (_offsets, "SHA-256"),
}


@pytest.mark.parametrize("load", [field.read_store, field.host_store])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_stores_are_refused(tmp_path, case, load):
    """Catches a loader that trusts a file: each break must be a clear ValueError before any array is used."""
    folder = tmp_path / "store"
    field.write_store(folder, ROWS, OFFSETS)
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_flipped_byte_is_found(tmp_path):
    folder = tmp_path / "store"
    field.write_store(folder, ROWS, OFFSETS)
    raw = bytearray((folder / "x.npy").read_bytes())
    raw[-7] ^= 1
    (folder / "x.npy").write_bytes(raw)
    for load in (field.read_store, functools.partial(field.host_store, verify=True)):
        with pytest.raises(ValueError, match="changed or damaged"):
            load(folder)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """Catches a store written in place: a full disk must leave neither the folder nor its draft."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        field.write_store(tmp_path / "store", ROWS, OFFSETS)
    assert list(tmp_path.iterdir()) == []


def test_bad_writes_are_refused(folder, tmp_path):
    with pytest.raises(FileExistsError, match="a folder that does not exist"):
        field.write_store(folder, ROWS, OFFSETS)
    for examples, message in [
        ({"../x": ROWS["x"]}, "leaf name"),
        ({"offsets": ROWS["x"]}, "leaf name"),
        ({"x": {"a": ROWS["x"]}}, "a flat dict"),
        (ROWS["x"], "a flat dict"),
        ({"x": np.full_like(ROWS["x"], np.inf)}, "finite features"),
        ({"x": jnp.zeros(int(OFFSETS[-1]), jnp.bfloat16)}, "an extension type"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            field.write_store(tmp_path / "bad", examples, OFFSETS)
    assert list(tmp_path.iterdir()) == []

"""A checkpoint is written completely or not at all, and what is restored is bit for bit what was saved."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.running import checkpoint, checkpoint_format
from fedjax_sim.running.checkpoint import CheckpointError, RunLocked, latest, restore, save
from fedjax_sim.running.files import lock

pytestmark = pytest.mark.optimised

SMALL = {"w": np.arange(3, dtype=np.float32)}


class Killed(BaseException):
    """Stands for kill -9: no handler of the code under test may catch it."""


class Moments(NamedTuple):
    count: object
    mu: object
    nothing: object


def random_state(seed: int) -> dict:
    """A tree with every kind of leaf, its floats made of random bits (NaN payloads, infinities, denormals, -0.0)."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (3, 4), dtype=np.uint32)
    half = rng.integers(0, 2**16, 7, dtype=np.uint16)
    names = sorted(rng.choice(list("abcdefgh"), 3, replace=False).tolist())
    return {
        "params": {name: jnp.asarray(rng.normal(size=(i, 2)), jnp.float32) for i, name in enumerate(names)},
        "bits": bits.view(np.float32),
        "half": jnp.asarray(half.view(jnp.bfloat16)),
        "moments": Moments(jnp.asarray(seed, jnp.int32), [jnp.asarray([True, False]), ()], None),
        "keys": (jax.random.key(seed), jax.random.split(jax.random.key(seed, impl="rbg"), 2)),
        "int8": rng.integers(-128, 128, 5, dtype=np.int8),
        "words": rng.integers(0, 2**32, (2, 1, 2), dtype=np.uint32),
        "int64": np.int64(-7),
        "empty": jnp.zeros((0, 3), jnp.float16),
        "strided": np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3],
        "number": 0.1,
        "flag": True,
        "none": None,
    }


def raw(leaf) -> bytes:
    if jnp.issubdtype(getattr(leaf, "dtype", np.dtype("f4")), jax.dtypes.prng_key):
        return str(leaf.dtype).encode() + np.asarray(jax.random.key_data(leaf)).tobytes()
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype)).tobytes()


@pytest.mark.parametrize("seed", range(8))
def test_roundtrip_is_bit_exact(tmp_path, seed):
    """Fault: a leaf cast, reordered, transposed, or canonicalised (NaN payloads, bf16, keys, empty arrays, strides)."""
    state, meta = random_state(seed), {"config": "ä\n\"'", "offset": 2**53, "best": [0.1, None, True]}
    found, found_meta = restore(save(tmp_path, seed, state, meta), jax.tree.map(lambda x: x, state))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found_meta == {**meta, "round": seed}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert isinstance(a, np.ndarray if isinstance(b, np.ndarray) else jax.Array)
        assert a.shape == np.shape(b) and raw(a) == raw(b)
        assert not hasattr(b, "dtype") or a.dtype == (b.dtype if b.dtype != np.int64 else np.int32)
    assert jax.random.bits(found["keys"][0]) == jax.random.bits(state["keys"][0])


def test_restore_accepts_shapes_in_place_of_a_state_and_keeps_weak_types(tmp_path):
    """Fault: a strong literal after resume, which retraces the round and changes what bf16 promotes to."""
    state = {"count": jnp.asarray(0), "scale": jnp.full((2,), 1.5), "key": jax.random.key(1), "x": jnp.ones(2)}
    assert [x.weak_type for x in (state["count"], state["scale"], state["x"])] == [True, True, False]
    found, _ = restore(save(tmp_path, 1, state, {}), jax.eval_shape(lambda: state))
    for name in state:
        assert raw(found[name]) == raw(state[name])
        assert getattr(found[name], "weak_type", False) == getattr(state[name], "weak_type", False), name


@pytest.mark.parametrize("leaf", [np.int64(2**40), np.array([0.1]), 2**31, "text", np.array(["a"]), object()])
def test_a_leaf_that_jax_would_change_is_refused(tmp_path, leaf):
    """Fault: int64 wrapped to int32, or float64 rounded, without a word; or an object pickled."""
    with pytest.raises((TypeError, ValueError), match=r"state\['x'\]: expected"):
        save(tmp_path, 0, {"x": leaf}, {})
    assert latest(tmp_path) is None


def test_every_flipped_byte_is_detected(tmp_path):
    """Fault: a byte of the prefix, header, leaves or hash that no check covers."""
    path = save(tmp_path, 5, SMALL, {"seed": 1})
    good = path.read_bytes()
    for i in range(len(good)):
        for mask in (0x01, 0xFF):
            path.write_bytes(good[:i] + bytes([good[i] ^ mask]) + good[i + 1 :])
            with pytest.raises(CheckpointError):
                restore(path, SMALL)


def test_every_truncation_is_detected(tmp_path):
    """Fault: a length that is never compared with the file's, or one read past the end as a crash of another type."""
    path = save(tmp_path, 5, SMALL, {"seed": 1})
    good = path.read_bytes()
    for changed in [good[:n] for n in range(len(good))] + [good + b"\0", good + good]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            restore(path, SMALL)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"schema": 2}',
        b'{"schema": 3, "leaves": [], "meta": {}}',
        b"[" * 100_000,
        b'{"schema": 2, "meta": {}, "leaves": [{"path": "[\'w\']", "kind": "float32[3]", "bytes": 99999999999}]}',
        b'{"schema": 2, "meta": {}, "leaves": [{"path": "[\'w\']", "kind": "float32[3]", "bytes": -12}]}',
        b'{"schema": 2, "meta": {}, "leaves": [{"path": ["w"], "kind": "float32[3]", "bytes": 12}]}',
        b'{"schema": 2, "meta": {}, "leaves": [{"path": "[\'w\']", "kind": "float32[3]", "bytes": 8},'
        b' {"path": "[\'w\']", "kind": "float32[3]", "bytes": 4}]}',
        b'{"schema": 2, "meta": 3, "leaves": [{"path": "[\'w\']", "kind": "float32[3]", "bytes": 12}]}',
    ],
)
def test_a_forged_header_is_an_error_and_no_allocation(tmp_path, header):
    """Fault: trusting a hostile file because its hash is right."""
    path = tmp_path / "round_00000001.ckpt"
    path.write_bytes(b"".join(checkpoint_format.encoded(header, [SMALL["w"]])))
    with pytest.raises(CheckpointError):
        restore(path, SMALL)


def test_a_forged_key_implementation_is_refused(tmp_path):
    """Fault: a key restored under another generator than its dtype says."""
    state = {"k": jax.random.key(0, impl="unsafe_rbg")}
    array, entry = checkpoint_format.to_host("['k']", state["k"])
    for name in ("rbg", "threefry2x32", "nonsense", None):
        leaves = [{"path": "['k']", **entry, "key": name}]
        path = tmp_path / "round_00000001.ckpt"
        header = json.dumps({"schema": checkpoint_format.SCHEMA, "leaves": leaves, "meta": {}}).encode()
        path.write_bytes(b"".join(checkpoint_format.encoded(header, [array])))
        with pytest.raises(CheckpointError, match="malformed"):
            restore(path, state)


def test_another_structure_is_refused_with_a_diff(tmp_path):
    """Fault: leaves matched by position, or a broadcast or cast that fits them anyway."""
    path = save(tmp_path, 1, {"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32), "old": np.int32(1)}, {})
    like = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(3, np.int32), "new": jax.random.key(0)}
    with pytest.raises(CheckpointError) as error:
        restore(path, like)
    assert str(error.value).splitlines() == [
        f"{path}: does not fit this run:",
        "  ['new']: missing in the file, key<fry>[] in this run",
        "  ['old']: int32[] in the file, not in this run",
        "  ['a']: float32[2, 3] in the file, float32[3, 2] in this run",
        "  ['b']: float32[3] in the file, int32[3] in this run",
        "  Resume with the configuration that wrote it, or start in a new folder.",
    ]
    with pytest.raises(CheckpointError, match="and 4 more"):
        restore(path, {f"n{i}": np.zeros(()) for i in range(21)})


def test_keep_and_the_order_of_rounds(tmp_path):
    """Fault: names compared as text, or a save that drops itself because a stale later round is in the folder."""
    assert latest(tmp_path / "absent") is None
    for r in (1, 9, 10, 2_000_000_000):
        save(tmp_path, r, SMALL, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round_00000010.ckpt", "round_2000000000.ckpt"]
    assert latest(tmp_path).name == "round_2000000000.ckpt"
    for r in (11, 12):
        save(tmp_path, r, SMALL, {}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round_00000012.ckpt", "round_2000000000.ckpt"]
    with pytest.raises(ValueError, match="keep: expected an integer"):
        save(tmp_path, 1, SMALL, {}, keep=0)
    with pytest.raises(TypeError, match="meta: expected what JSON can hold"):
        save(tmp_path, 1, SMALL, {"x": object()})


def test_keep_drops_only_after_the_commit(tmp_path, monkeypatch):
    """Fault: the only good checkpoint removed before its successor is on disk."""
    save(tmp_path, 1, SMALL, {})
    calls = []
    for name in ("fsync", "replace", "write"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    unlink = checkpoint.Path.unlink
    monkeypatch.setattr(checkpoint.Path, "unlink", lambda p, **k: (calls.append(p.name), unlink(p, **k))[1])
    save(tmp_path, 2, SMALL, {}, keep=1)
    order = [call for call in calls if call != "write" and not call.endswith(".tmp")]
    assert order == ["fsync", "replace", "fsync", "round_00000001.ckpt"]


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_killed_between_any_two_system_calls(tmp_path, monkeypatch, error):
    """Fault: a checkpoint written in place, renamed before it is synced, or old ones lost when the disk is full."""
    old = save(tmp_path, 1, SMALL, {"n": 1}).read_bytes()
    names, outcomes = ("write", "fsync", "replace"), []
    left = [0]

    def counted(real):
        def call(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise error
            return real(*arguments)

        return call

    for step in range(20):
        left[0] = step
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                save(tmp_path, 2, {"w": SMALL["w"] + 1}, {"n": 2})
                break
            except Killed:
                pass
            except CheckpointError as caught:
                assert "No space left" in str(caught) and not list(tmp_path.glob(".*"))
        assert (tmp_path / "round_00000001.ckpt").read_bytes() == old
        _, meta = restore(latest(tmp_path), SMALL)
        outcomes.append(meta["n"])
    assert outcomes == [1] * (len(outcomes) - 1) + [2] and len(outcomes) >= 6  # 4 parts, sync, rename, folder's sync
    save(tmp_path, 3, SMALL, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round_00000002.ckpt", "round_00000003.ckpt"]


def test_real_kills_leave_a_valid_checkpoint(tmp_path):
    """Fault: anything the simulation above does not know. Children save without pause and are killed at random."""
    program = """
        import os, pathlib, random, signal, sys, time
        import numpy as np
        from fedjax_sim.running.checkpoint import latest, save
        folder, random_state = sys.argv[1], random.Random(0)
        for attempt in range(12):
            newest, child = latest(folder), os.fork()
            if not child:
                start = int(newest.stem[6:]) if newest else 0
                for r in range(start + 1, 10**6):
                    save(folder, r, {"w": np.full(50_000, r, np.int32)}, {})
            end = time.monotonic() + 60
            while latest(folder) == newest and time.monotonic() < end:  # a busy machine is slow to begin
                time.sleep(0.001)
            time.sleep(random_state.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child died of something else"
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    state, meta = restore(latest(tmp_path), {"w": np.zeros(50_000, np.int32)})
    assert meta["round"] > 3 and (np.asarray(state["w"]) == meta["round"]).all()


def test_short_writes_are_completed(tmp_path, monkeypatch):
    """Fault: the return value of write ignored (more than 2 GiB, or a nearly full disk)."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    assert restore(save(tmp_path, 1, SMALL, {}), SMALL)[1] == {"round": 1}


def test_a_read_only_folder_is_a_typed_error(tmp_path, monkeypatch):
    """Fault: a bare PermissionError that says nothing about the run."""

    def refuse(*_, **__):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tmp_path, 1, SMALL, {})
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    for use in (lambda p: save(p, 1, SMALL, {}), latest, lambda p: lock(p).__enter__()):
        with pytest.raises(CheckpointError):
            use(tmp_path / "file")


def test_latest_falls_back_only_when_asked(tmp_path):
    """Fault: silent fallback, or a resume from a damaged file."""
    older, newer = save(tmp_path, 1, SMALL, {}), save(tmp_path, 2, SMALL, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path, allow_previous=True) == newer
    newer.write_bytes(newer.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"round_00000002.*one is round_00000001.*allow_previous"):
        latest(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"0002.*Continuing from round_00000001"):
        assert latest(tmp_path, allow_previous=True) == older
    older.write_bytes(b"")
    for allowed in (False, True):
        with pytest.raises(CheckpointError, match="No earlier checkpoint"):
            latest(tmp_path, allow_previous=allowed)


def test_leftovers_are_ignored_and_cleaned(tmp_path):
    """Fault: a half-written temporary file taken for a checkpoint, or left for ever."""
    leftover = tmp_path / ".round_00000009.ckpt.123.tmp"
    leftover.write_bytes(b"half")
    (tmp_path / "round_1.ckpt").write_bytes(b"not ours")
    assert latest(tmp_path) is None
    save(tmp_path, 1, SMALL, {})
    assert not leftover.exists() and latest(tmp_path).name == "round_00000001.ckpt"


def test_a_lock_cleans_up(tmp_path):
    """Fault: temporary files of a killed run that are never removed, or a user's own file that is."""
    for name in (".privacy.json.123.tmp", ".report.html.4.tmp", ".mine.tmp", "report.html"):
        (tmp_path / name).write_text("half")
    with lock(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".mine.tmp", "report.html"]


def test_lock_excludes_a_second_run(tmp_path):
    """Fault: two runs in one folder, a lock that outlives its process, or one that follows a planted link."""
    with lock(tmp_path), pytest.raises(RunLocked, match=f"held by process {os.getpid()} on"), lock(tmp_path):
        pass
    with lock(tmp_path):
        pass
    child = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl; f = open({str(tmp_path / '.lock')!r}, 'r+'); "
         "fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    child.stdout.readline()
    with pytest.raises(RunLocked), lock(tmp_path):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with lock(tmp_path):
        pass
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError), lock(tmp_path / "linked"):
        pass
    assert not (tmp_path / "precious").exists()


def test_host_arrays_come_back_on_the_host(tmp_path):
    """Catches a memory that is split because no device holds it, and is put on one on its way back."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    checkpoint.save(tmp_path, 1, {"rows": rows, "x": jnp.ones(2)}, {})
    like = {"rows": np.broadcast_to(np.float32(0), (4, 3)), "x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    state, _ = checkpoint.restore(checkpoint.latest(tmp_path), like)
    assert type(state["rows"]) is np.ndarray and (state["rows"] == rows).all() and isinstance(state["x"], jax.Array)

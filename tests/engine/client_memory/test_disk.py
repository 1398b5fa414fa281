"""Client memory on disk: rows, holes, versions, and the way back to a commit from any moment."""

from __future__ import annotations

import contextlib
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine.client_memory import disk
from fedjax_sim.engine.client_memory.disk import MemoryFile, MemoryFileError

START = {"c": np.array([1.5, -2.0, 0.0], np.float32), "n": np.int32(7)}
NUM_CLIENTS = 12


def made(folder, num_clients=NUM_CLIENTS):
    return MemoryFile(folder / "clients.mem", START, num_clients)


def read(file, ids=range(NUM_CLIENTS)):
    ids = np.array(ids, np.int32)
    leaves = [np.empty((len(ids), 3), np.float32), np.empty(len(ids), np.int32)]
    file.read(file.version, ids, leaves)
    return np.concatenate([leaves[0], leaves[1][:, None]], 1)


def write(file, ids, value):
    ids = np.array(ids, np.int32)
    file.write(file.version, ids, [np.full((len(ids), 3), value, np.float32), np.full(len(ids), value, np.int32)])


def known(file):
    """What a checkpoint holds of a file, beside its version."""
    return file.mark.hex(), file.written.copy()


def commit(file, keep=2):
    """What a run does at a commit, apart from writing the checkpoint in between."""
    file.sync(file.version)
    file.advance(keep)


def test_rows_come_back_and_holes_take_no_disk(tmp_path):
    """Catches a file that is filled, rows written to the wrong place, an initial state that is taken for zero."""
    file = made(tmp_path, 10**7)
    write(file, [0, 9_999_999, 4_321], 5)
    write(file, [4_321], 6)
    expected = np.array([[5, 5, 5, 5], [1.5, -2, 0, 7], [6, 6, 6, 6], [5, 5, 5, 5], [1.5, -2, 0, 7]])
    assert (read(file, [0, 1, 4_321, 9_999_999, -1]) == expected).all()
    status = os.stat(tmp_path / "clients.mem")
    assert status.st_size > 10**7 * 16 and status.st_blocks * 512 < 100_000


def test_pieces(tmp_path, monkeypatch):
    """Catches rows lost between two pieces of a large cohort, in the file or on the way back."""
    monkeypatch.setattr(disk, "PIECE_BYTES", 3 * 24)
    file = made(tmp_path)
    write(file, range(0, 12, 2), 1)
    commit(file)
    before, then = read(file), known(file)
    write(file, range(11), 2)
    write(file, [], 3)
    assert file.version == 3 and (read(file, range(11)) == 2).all()
    again = made(tmp_path)
    again.resume(1, *then)
    assert (read(again) == before).all()


def test_an_older_state_cannot_go_on(tmp_path):
    """Catches a round that reads rows of its own future."""
    with engine.client_memory("disk", tmp_path):
        memory = engine.store(jnp.zeros(2), 5)
    ids, rows, where = jnp.arange(2), jnp.ones((2, 2)), jnp.ones(2, bool)
    later = engine.put(memory, ids, rows, where)
    assert engine.take(later, ids)[0].tolist() == [[1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match="state of version 1, got one of version 0"):
        jax.block_until_ready(engine.take(memory, ids)[0])
    with pytest.raises(MemoryFileError, match="one timeline"):
        memory.file.check()
    with engine.client_memory("disk", tmp_path):
        other = engine.store(jnp.zeros(2), 5)
    with pytest.raises(RuntimeError, match="File exists"):
        jax.block_until_ready(engine.take(other, ids)[0])


def test_an_error_on_one_of_two_devices_stops_both(tmp_path):
    """Catches a device that waits for ever in a collective, and rows that look right after an error."""
    with engine.client_memory("disk", tmp_path):
        memory = engine.store(jnp.zeros(2), 6, mesh=engine.device_mesh())
    memory = jax.block_until_ready(engine.put(memory, jnp.arange(6), jnp.ones((6, 2)), jnp.ones(6, bool)))
    with open(tmp_path / "clients.mem", "r+b") as out:  # not before the rows are written
        out.seek(disk.RECORDS_START + 1)
        out.write(b"\xff")
    rows, memory = jax.jit(engine.take)(memory, jnp.arange(6))
    assert not np.isfinite(rows[0]).any() and int(memory.version) == -1
    with pytest.raises(MemoryFileError, match="checksum of client 0"):
        memory.file.check()


class Died(BaseException):
    """Stands for kill -9: nothing runs after it, and what was written stays."""


def scenario(folder, keep):
    """Rounds and commits; yields (version, rows) after each commit."""
    file = made(folder)
    file.create()
    commit(file, keep)
    yield known(file), 0, read(file)
    rng = np.random.default_rng(0)
    for round in range(1, 7):
        write(file, rng.permutation(NUM_CLIENTS)[:5], round)
        if round % 2 == 0:
            file.sync(file.version)
            yield known(file), file.version, read(file)  # the checkpoint is written
            file.advance(keep)


# macOS has no `fdatasync`.
CALLS = tuple(name for name in ("pwrite", "fsync", "fdatasync", "ftruncate", "open") if hasattr(os, name))


def dying(monkeypatch, after, calls=CALLS):
    """Lets `after` system calls pass. The next one writes half of its bytes, if it writes, and the process dies."""
    count = [0]

    def patch(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            if count[0] == after:
                count[0] += 1
                if name == "pwrite" and len(args[1]) not in (disk.HEAD.size, disk.PLACE.size):  # less than a sector
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                raise Died
            if count[0] > after:
                raise Died
            count[0] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in calls:
        patch(name)
    return count


def test_killed_between_any_two_system_calls(tmp_path, monkeypatch):
    """Every moment of a run, and every moment of the way back: the newest commit's rows, and the one before it.

    Catches rows overwritten before their old record is safe, a journal dropped before the commit that replaces it.
    """
    after, deaths = 0, 0
    while True:
        folder = tmp_path / str(after)
        folder.mkdir()
        committed, died = [], False
        with monkeypatch.context() as patch:
            dying(patch, after)
            try:
                for commit_made in scenario(folder, 2):
                    committed.append(commit_made)
            except Died:
                died = True
        if not died:
            break
        deaths += 1
        for mark, version, rows in committed[-2:]:
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            if after % 3 == 0:  # and killed again on the way back
                with monkeypatch.context() as patch:
                    dying(patch, after % 17)
                    with contextlib.suppress(Died):
                        made(copy).resume(version, *mark)
            file = made(copy)
            file.resume(version, *mark)
            assert (read(file) == rows).all(), (after, version)
            write(file, [1, 2], 99)  # and on from there
            assert file.version == version + 1 and (read(file, [1, 2]) == 99).all()
            commit(file)
            again = made(copy)
            again.resume(version, *mark)
            assert (read(again) == rows).all(), (after, version)
            shutil.rmtree(copy)
        shutil.rmtree(folder)
        after += 1
    assert deaths > 80


def finished(folder, keep=2):
    return list(scenario(folder, keep))


@pytest.mark.parametrize("keep, kept", [(1, [6]), (2, [4, 6]), (9, [0, 2, 4, 6])])
def test_journals_are_kept_like_checkpoints(tmp_path, keep, kept):
    """Catches a checkpoint that is kept and cannot be gone back to, and journals that pile up."""
    commits = finished(tmp_path, keep)
    assert sorted(made(tmp_path).journals()) == kept
    for mark, version, rows in reversed(commits):
        file = made(tmp_path)
        if version in kept:
            file.resume(version, *mark)
            assert (read(file) == rows).all()
        else:
            with pytest.raises(MemoryFileError, match=f"lead to version {version}|could not be opened"):
                file.resume(version, *mark)


def test_damage_is_found(tmp_path):
    """Every byte of head and journals flipped, every file cut; a flipped row. Catches a wrong row that looks right."""
    commits = finished(tmp_path)
    mark, version, rows = commits[-2]
    paths = [tmp_path / "clients.mem", *made(tmp_path).journals().values()]

    def outcome():
        file = made(tmp_path)
        file.resume(version, *mark)
        return read(file)

    originals = {path: path.read_bytes() for path in paths}
    for path, bytes in originals.items():
        meaningful = [*range(disk.HEAD.size), *range(512, 512 + disk.PLACE.size)]
        places = range(len(bytes)) if "undo" in path.name else [*meaningful, *range(disk.RECORDS_START, len(bytes), 7)]
        for place in places:
            path.write_bytes(bytes[:place] + bytes[place : place + 1].translate(FLIP) + bytes[place + 1 :])
            try:
                assert (outcome() == rows).all(), (path.name, place)  # a record that was restored anyway
                assert "undo" not in path.name and place >= disk.RECORDS_START
            except MemoryFileError:
                pass
            for other, original in originals.items():
                other.write_bytes(original)
        for size in (0, 10, len(bytes) // 2, len(bytes) - 1):
            path.write_bytes(bytes[:size])
            with pytest.raises(MemoryFileError):
                outcome()
            for other, original in originals.items():
                other.write_bytes(original)
    assert (outcome() == rows).all()


FLIP = bytes(255 - i for i in range(256))


def test_a_lost_record_is_no_hole(tmp_path):
    """Catches a client whose record became zeros and that trains on from the initial state, before and after a resume;
    and a record where no client was written."""
    file = made(tmp_path)
    write(file, [3, 4], 5)
    commit(file)
    then, place = known(file), disk.RECORDS_START + 3 * file.format.record_bytes
    good = (tmp_path / "clients.mem").read_bytes()
    lost = good[:place] + bytes(file.format.record_bytes) + good[place + file.format.record_bytes :]
    (tmp_path / "clients.mem").write_bytes(lost)
    for again in (file, made(tmp_path)):
        if again is not file:
            again.resume(1, *then)
        for use in (read, lambda file: write(file, [3], 6)):
            with pytest.raises(MemoryFileError, match="record of client 3 was lost"):
                use(again)
    (tmp_path / "clients.mem").write_bytes(good)
    again.resume(1, then[0], np.zeros_like(then[1]))
    with pytest.raises(MemoryFileError, match="client 3 was lost, or is one"):
        read(again)
    (tmp_path / "clients.mem").unlink()
    with pytest.raises(MemoryFileError, match="deleted or replaced during the run"):
        file.sync(1)


def test_another_file_is_refused(tmp_path):
    """Catches the memory of another run, another population, or of an earlier time."""
    commits = finished(tmp_path)
    mark, version, _ = commits[-1]
    with pytest.raises(MemoryFileError, match="of this run, got another run's"):
        made(tmp_path).resume(version, "00" * 16, mark[1])
    with pytest.raises(MemoryFileError, match="of this algorithm and population"):
        made(tmp_path, NUM_CLIENTS + 1).resume(version, *mark)
    with pytest.raises(MemoryFileError, match="got those of versions 6 to 6"):
        made(tmp_path).resume(8, *mark)
    (tmp_path / "clients.mem").unlink()
    with pytest.raises(MemoryFileError, match="could not be opened"):
        made(tmp_path).resume(version, *mark)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    """Catches a short write taken for success, and a commit that a later failure has spoilt."""
    file = made(tmp_path)
    write(file, [1, 2, 3], 1)
    commit(file)
    rows, then, real = read(file), known(file), os.pwrite

    def full(descriptor, data, place):
        if place > 2000 or len(data) > 300:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(file, range(12), 2)
    monkeypatch.undo()
    again = made(tmp_path)
    again.resume(1, *then)
    assert (read(again) == rows).all()


def test_several_processes_are_refused(tmp_path, monkeypatch):
    """Catches rows that one process writes and another never sees."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with engine.client_memory("disk", tmp_path), pytest.raises(ValueError, match="one process for memory on disk"):
        engine.store(jnp.zeros(2), 5)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_callbacks_of_accelerators(tmp_path, monkeypatch, devices):
    """The way that GPUs take, on CPU with small rows. Catches results in another order, calls that are left out."""
    with engine.client_memory("disk", tmp_path):
        memory = engine.store(jnp.zeros(2), 6, mesh=engine.device_mesh(devices))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    @jax.jit
    def rounds(memory):
        def one(i, memory):
            ids = (jnp.arange(3) + i) % 6
            rows, memory = engine.take(memory, ids)
            return engine.put(memory, ids, rows + 1, jnp.ones(3, bool))

        return jax.lax.fori_loop(0, 6, one, memory)

    memory = rounds(memory)
    assert engine.take(memory, jnp.arange(6))[0].tolist() == [[3, 3]] * 6 and int(memory.version) == 6


def test_a_traced_start_is_good_for_shapes_alone(tmp_path):
    """Catches an initial state that is silently taken for zero; planning needs its shapes only."""
    with engine.client_memory("disk", tmp_path):
        spec = jax.eval_shape(lambda x: engine.store(x, 5), jnp.ones(2))
        memory = jax.jit(lambda x: engine.store(x, 5))(jnp.ones(2))
    assert spec.version.shape == () and not (tmp_path / "clients.mem").exists()
    with pytest.raises(RuntimeError, match="Call it outside jit"):
        jax.block_until_ready(engine.take(memory, jnp.arange(2))[0])


def test_power_is_lost_between_a_commit_and_its_journal(tmp_path, monkeypatch):
    """Only what was synced is there. Catches a place in the journal that is on disk before the journal's bytes are."""
    (tmp_path / "run").mkdir()
    file, durable = made(tmp_path / "run"), {}
    file.create()
    commit(file)
    at_start = known(file)

    def noting(name):
        real = getattr(os, name)

        def call(descriptor):
            real(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isfile(path):
                with open(path, "rb") as there:
                    durable[os.path.basename(path)] = there.read()

        monkeypatch.setattr(os, name, call)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell files by their descriptors")
    for path in (tmp_path / "run").iterdir():
        durable[path.name] = path.read_bytes()
    noting("fsync")
    noting("fdatasync")
    write(file, [1, 2], 1)
    write(file, [1, 2], 2)  # the journal has their old records: an empty batch
    file.sync(2)
    for version, value, then in ((2, 2, known(file)), (0, 1.5, at_start)):
        copy = tmp_path / str(version)
        copy.mkdir()
        for name, there in durable.items():
            (copy / name).write_bytes(there)
        again = made(copy)
        again.resume(version, *then)
        assert read(again, [1])[0, 0] == value

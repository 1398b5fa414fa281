"""Files of compiled programs are read only as they were written, by their owner, in a folder of the owner's own."""

import os
import warnings

import numpy as np
import pytest

from fedjax_sim.running import program_files
from fedjax_sim.running.files import write_atomically

META, ARRAYS = {"words": ["a", 1]}, [np.arange(5, dtype=np.uint8), np.full((2, 3), 0.5, np.float32)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder of its own for each test."""
    monkeypatch.delenv("FEDJAX_SIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return program_files.folder()


def kept(name="a"):
    assert program_files.write_program(name, META, ARRAYS)
    return program_files.folder() / name


def test_what_is_written_is_read(place):
    """Fault: another dtype or shape, or a file that others may read."""
    assert program_files.read_program("a") is None
    path = kept()
    meta, arrays = program_files.read_program("a")
    assert meta == META and place.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    for found, written in zip(arrays, ARRAYS, strict=True):
        assert found.dtype == written.dtype and np.array_equal(found, written)


def test_damage(place):
    """Fault: a byte that changed, or an end that is missing, in a program that is run."""
    content = kept().read_bytes()
    changed = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(len(content))]
    for damaged in [*changed, *(content[:i] for i in range(0, len(content), 7)), content + b"\0", b""]:
        (place / "a").write_bytes(damaged)
        assert program_files.read_program("a") is None
    kept()
    assert program_files.read_program("a") is not None


def test_a_file_has_its_name(place):
    """Fault: the program of another run, which a copy or a repair of the disk put in this one's place."""
    (place / "a").write_bytes(kept("b").read_bytes())
    assert program_files.read_program("a") is None and program_files.read_program("b") is not None


def test_files_of_others(place, monkeypatch):
    """Faults: a program that others own, may write, or have put behind a link or a pipe."""
    kept().chmod(0o620)
    assert program_files.read_program("a") is None
    kept("b")
    (place / "a").unlink()
    (place / "a").symlink_to("b")
    assert program_files.read_program("a") is None and program_files.read_program("b")
    (place / "a").unlink()
    os.mkfifo(place / "a")
    assert program_files.read_program("a") is None
    kept()
    owner = os.getuid()
    with monkeypatch.context() as patch:
        # The folder is looked at first: it is another's too.
        patch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.warns(RuntimeWarning, match="others may use it"):
            assert program_files.read_program("a") is None
        patch.setattr(program_files, "folder", lambda: place)
        assert program_files.read_program("a") is None


def test_a_shared_folder_is_not_used(place, monkeypatch):
    """Faults: programs read from a folder that others may write to, or written there; a warning at each look."""
    path = kept()
    place.chmod(0o770)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert program_files.read_program("a") is None and not program_files.write_program("b", META, ARRAYS)
    assert [warning.category for warning in caught] == [RuntimeWarning] and str(place) in str(caught[0].message)
    assert [*place.iterdir()] == [path]
    place.chmod(0o700)
    assert program_files.read_program("a") is not None
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    assert program_files.folder() is None and program_files.read_program("a") is None
    assert not program_files.write_program("b", META, ARRAYS) and [*place.iterdir()] == [path]


def test_two_write_at_once(place, monkeypatch):
    """Fault: a file of two halves, of processes that write the same program at the same time."""
    content = kept().read_bytes()

    def parts(process):
        yield content[:20]
        if process:
            # Another process writes the whole file between two parts of this one.
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: process)
                write_atomically(place / "a", [content])
        yield content[20:]

    write_atomically(place / "a", parts(os.getpid() + 1))
    assert program_files.read_program("a") is not None and [*place.iterdir()] == [place / "a"]


def test_the_oldest_go_first(place, monkeypatch):
    """Faults: a cache that grows for ever; a program that was read just now and goes before others."""
    for second, name in enumerate("abc"):
        os.utime(kept(name), (second, second))
    size = (place / "a").stat().st_size
    assert program_files.read_program("a")
    program_files.make_room(2 * size)
    assert {path.name for path in place.iterdir()} == {"a", "c"}
    monkeypatch.setattr(program_files, "MOST_BYTES", size)
    kept("d")
    assert {path.name for path in place.iterdir()} == {"d"}

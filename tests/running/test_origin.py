"""The origin of a run's programs changes with all that decides them, and is unknown where a part of it is."""

import os
import sys
import time
import types

import jax
import numpy as np
import pytest

import fedjax_sim
from fedjax_sim.running import origin
from fedjax_sim.running.origin import origin_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one file in the place of this one's, and a module of the user's, none changed since the start."""
    monkeypatch.delenv("FEDJAX_SIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("RATE = 1\n")
    (tmp_path / "mine.py").write_text("RATE = 1\n")
    monkeypatch.setattr(fedjax_sim, "__file__", str(folder / "__init__.py"))
    mine = types.ModuleType("mine")
    mine.__file__ = str(tmp_path / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", mine)
    monkeypatch.setattr(origin, "_process_began", lambda: time.time_ns() + 10**12)
    return tmp_path


def test_the_same_is_the_same(package):
    """Fault: a digest that no other process would find."""
    data = {"x": np.arange(3.0)}
    assert origin_of({"a": 1, "b": None}, data) == origin_of({"b": None, "a": 1}, {"x": np.arange(3.0)})


def test_what_is_made_from_counts(package):
    """Faults: another value or array, or one that cannot be read, such as a function, that finds the same program."""
    values = [({"rate": 0.1},), ({"rate": 0.2},), ({"rate": 0.1}, np.zeros(2)), ({"rate": 0.1}, np.ones(2))]
    values += [({"rate": 0.1}, np.ones(2, np.float32)), ({"rate": np.float32(0.5)}, ()), ({"names": ("a", "b")},)]
    assert len({origin_of(*value) for value in values}) == len(values)
    assert origin_of({"loss": print}) is None and origin_of(object()) is None


@pytest.mark.parametrize("name", ["package/__init__.py", "mine.py"])
def test_a_changed_line_counts(package, name):
    """Fault: the program of a line that was changed since, in this package or in a module of the user's."""
    before = origin_of(1)
    (package / name).write_text("RATE = 2\n")
    changed = origin_of(1)
    (package / name).write_text("RATE = 1\n")
    assert None not in (before, changed) and changed != before == origin_of(1)


def test_an_edited_package_counts(package, monkeypatch):
    """Fault: the program of a line that was changed since in an installed package, such as an optimiser's."""
    place = package / "site-packages" / "optimiser.py"
    place.parent.mkdir()
    place.write_text("RATE = 1\n")
    optimiser = types.ModuleType("optimiser")
    optimiser.__file__ = str(place)
    monkeypatch.setitem(sys.modules, "optimiser", optimiser)
    before, status = origin_of(1), place.stat()
    place.write_text("RATE = 2\n")
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert None not in (before, origin_of(1)) and before != origin_of(1)


def test_bytecode_counts(package):
    """Fault: the program of old bytecode, which Python took for that of a new source of the same size and time."""
    sys.modules["mine"].__cached__ = str(package / "mine.pyc")
    (package / "mine.pyc").write_bytes(b"old")
    before = origin_of(1)
    (package / "mine.pyc").write_bytes(b"new")
    assert None not in (before, origin_of(1)) and before != origin_of(1)


def test_a_new_file_counts(package):
    """Fault: a file of the package that nobody looks at."""
    before = origin_of(1)
    (package / "package" / "part.txt").write_text("1")
    assert origin_of(1) != before
    (package / "mine.py").unlink()
    assert origin_of(1) is None


def test_code_that_may_not_be_loaded_is_unknown(package, monkeypatch):
    """Fault: a digest of a file that was edited after it was loaded, beside the program of what was loaded."""
    monkeypatch.setattr(origin, "_process_began", lambda: time.time_ns() - 10**12)
    assert origin_of(1) is None


def test_packages_and_machine_count(package, monkeypatch):
    """Faults: the program of another version, flag, setting, processor, or number of devices."""
    found = {origin_of(1)}

    def differs():
        digest = origin_of(1)
        is_new = digest is not None and digest not in found
        found.add(digest)
        return is_new

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert differs()
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    assert differs()
    monkeypatch.setattr(origin, "_processor", lambda: ["flags: none"])
    assert differs()
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    assert differs()
    rank = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    try:
        assert differs()
    finally:
        jax.config.update("jax_numpy_rank_promotion", rank)
    monkeypatch.syspath_prepend(package)
    (package / "other-1.0.dist-info").mkdir()
    assert differs()
    (package / "other-1.0.dist-info").rename(package / "other-1.1.dist-info")
    assert differs()


def test_no_origin_where_nothing_is_kept(package, monkeypatch):
    """Fault: files that are read and hashed where the cache is off."""
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    assert origin_of(1) is None

"""The cache of compiled programs that the tests share: its owner's alone, and bounded."""

import os
import stat

import jax
import pytest

from tests import compiled, compiler, conftest
from tests.laws import laws


def test_the_tests_use_it():
    """Fault: a plugin that imports JAX before conftest.py sets the environment, so that nothing is kept."""
    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_a_folder_that_others_may_write_is_refused(tmp_path, monkeypatch):
    """Fault: programs of another user, run as ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compiled.folder()
    assert made.is_relative_to(tmp_path) and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert compiled.folder() == made
    made.chmod(0o770)
    with pytest.raises(RuntimeError, match="its owner's alone"):
        compiled.folder()


def test_what_was_read_longest_ago_makes_room(tmp_path, monkeypatch):
    """Fault: a cache that fills the disk, or that drops what the last run used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = [compiled.folder() / f"{i}-cache" for i in range(6)]
    for i, path in enumerate(files):
        path.write_bytes(bytes(10))
        os.utime(path, (i, i))
    compiled.make_room(60)
    assert all(path.exists() for path in files)
    compiled.make_room(40)
    assert [path.exists() for path in files] == [False] * 4 + [True] * 2


def test_the_longest_files_are_there():
    """Fault: a renamed file that loses its place at the front, so that one worker ends alone."""
    assert all((conftest.ROOT / "tests" / name).is_file() for name in conftest.LONGEST)


def test_bits_are_compared_in_programs_of_users_alone():
    """Fault: a law about bits of quickly compiled programs, or a version of JAX that compiles none quickly."""
    assert compiler.known()
    compiler.choose(optimised=False, on_purpose=False)
    with pytest.raises(RuntimeError, match=r"marked `pytest\.mark\.optimised`"):
        laws.check_equal_bits(1, 1, "one")
    compiler.choose(optimised=True, on_purpose=True)
    laws.check_equal_bits(1, 1, "one")

"""A cache of compiled programs for tests of one: JAX's and this package's, both new."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedjax_sim.running import program_files


def _use(folder, least_seconds):
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)


@contextlib.contextmanager
def new_cache(folder, monkeypatch):
    """Yields the folder of compiled programs, which is empty."""
    monkeypatch.delenv("FEDJAX_SIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    _use(str(folder / "xla"), 0)
    try:
        yield program_files.folder()
    finally:
        _use(*before)

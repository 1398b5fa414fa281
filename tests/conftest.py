"""Two virtual CPU devices, strict rank promotion, one private compilation cache for the whole run."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", "2")))
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / ".pytest_cache" / "xla"  # compiled programs: trusted code, so the folder is the owner's alone
CACHE.mkdir(parents=True, exist_ok=True)
CACHE.chmod(0o700)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The team's small real data sets; tests that need them skip where they are absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data sets beside the checkout, absent here: {SHARED_DATA}")
    return SHARED_DATA

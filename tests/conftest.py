"""Two virtual CPU devices, strict rank promotion, one compilation cache for all runs of the tests on a machine.

What is compiled quickly is written for one of the devices, too, unless a test is about several: a program for two takes
a fifth longer.
"""

import contextlib
import gc
import os
import pathlib

import pytest

from tests import compiled

ROOT = pathlib.Path(__file__).resolve().parents[1]

if hasattr(os, "SCHED_BATCH"):  # so too
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.environ.setdefault("NPROC", "8")  # threads of XLA:CPU, as the command line has them; last bits depend on them
os.environ.setdefault("XLA_FLAGS", "--xla_disable_hlo_passes=cpu-parallel-task-assigner")  # as the command line has it
# In the environment, for the processes that tests start. Every program is kept: most take less than JAX's threshold.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled.folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("FEDJAX_SIM_CACHE", "off")  # rounds are kept for code on the disk; tests change it in memory

import jax  # noqa: E402  (reads the environment, unless a plugin imported it before)

jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update(
    "jax_persistent_cache_min_compile_time_secs", float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
)
from tests import compiler  # noqa: E402

compiler.install()
jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", "2")))
jax.config.update("jax_numpy_rank_promotion", "raise")
from fedjax_sim import engine  # noqa: E402  (the library, after all of that is set)
from tests import pictures  # noqa: E402

LONGEST = (  # in tests/
    "laws/test_devices.py",
    "laws/test_programs_of_devices.py",
    "laws/test_members.py",
    "running/test_loop.py",
    "sweeps/test_sweep.py",
    "config/test_document.py",
    "test_docs.py",
    "command/test_app.py",
    "test_types.py",
    "running/test_privacy_ledger.py",
    "running/test_distributed.py",
    "running/test_same_program.py",
    "running/test_client_memory.py",
    "test_notebooks.py",
    "test_site.py",
    "privacy/test_audit.py",
    "faults/test_planted.py",
    "test_benchmarks.py",
)
# Linux lets a process have 65,530 maps of memory, and a test in `-m full` may leave a hundred of compiled programs.
MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 30_000
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser):
    parser.addoption("--optimised", action="store_true", help="compile every program as users do")


def _optimised(node) -> bool | None:
    """Whether a test or a file is compiled as users compile; None where nothing says so."""
    mark = node.get_closest_marker("optimised")
    if mark is not None and not node.config.getoption("--optimised"):
        return mark.args != (False,)
    folder = node.path.relative_to(ROOT / "tests").parts[0]
    return True if folder in ("laws", "engine") or node.config.getoption("--optimised") else None


def _waiting_rows(items) -> list:
    """The rows of parametrised tests that wait for `-m full`, by the mark `default_rows`.

    Raises: UsageError for a mark that names a row that is not there, or leaves no row to wait.
    """
    tests = {}
    for item in items:
        if (mark := item.get_closest_marker("default_rows")) is not None:
            tests.setdefault((item.path, item.originalname), (mark.args, []))[1].append(item)
    waiting = []
    for (path, name), (kept, rows) in tests.items():
        if len(kept) == 1 and isinstance(kept[0], int):
            # Rows that wait by themselves are none of the first ones.
            waiting += [row for row in rows if row.get_closest_marker("full") is None][kept[0] :]
            continue
        ids = [row.callspec.id.split("-") for row in rows]
        rows_are_named = any("[" in argument for argument in rows[0].config.args)
        if missing := [word for word in kept if not any(word in words for words in ids) and not rows_are_named]:
            raise pytest.UsageError(f"{path}::{name} has no row {missing}")
        waiting += [row for row, words in zip(rows, ids, strict=True) if not set(kept) & set(words)]
    return waiting


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One compiler after the other, and what takes long before the rest, so that no worker ends alone."""
    for item in _waiting_rows(items):
        item.add_marker("full")
    order = {path: place for place, path in enumerate(LONGEST)}

    def place(item):
        file = item.getparent(pytest.Module)
        return not _optimised(file), order.get(str(item.path.relative_to(ROOT / "tests")), len(order))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Leaves devices out of programs that are compiled quickly, those of fixtures too, and out of laws, which name the
    meshes that they are about."""
    is_law = item.path.relative_to(ROOT / "tests").parts[0] == "laws"
    several = (_optimised(item) and not is_law) or item.get_closest_marker("devices") is not None
    with contextlib.nullcontext() if several else engine.one_device():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Chooses the compiler before any fixture of the test compiles, and which figures are drawn; what the command line
    sets for its process, a test before this one may have set."""
    jax.config.update("jax_default_matmul_precision", None)
    optimised = _optimised(item)
    compiler.choose(bool(optimised), optimised is not None)
    pictures.choose(item.get_closest_marker("pictures"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Forgets compiled programs between files, before they fill the process."""
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if is_last_of_file and MAPS.is_file() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


def pytest_collection_finish(session):
    """A tenth of the time went into looking for garbage among modules that stay."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_sessionfinish():
    """pytest would look for garbage once more."""
    gc.freeze()


def pytest_sessionstart(session):
    """Bounds the cache, in one process."""
    if not hasattr(session.config, "workerinput") and compiled.root().is_dir():
        compiled.make_room()


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Small real data sets from outside of the repository; tests that need them skip where they are absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data sets beside the checkout, absent here: {SHARED_DATA}")
    return SHARED_DATA

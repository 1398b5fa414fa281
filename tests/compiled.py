"""Where compiled programs wait for the next run of the tests, whose time is the compiler's for the most part."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import stat

MOST_BYTES = 1 << 30


def root() -> pathlib.Path:
    """Outside of the clone, so that the next clone finds it."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fedjax_sim" / "tests"


def folder() -> pathlib.Path:
    """The folder for this jaxlib and this processor, made where it is absent; the clone's own where none can be made.

    Raises: RuntimeError where others may write to it, for what lies there is run.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    processor = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]
    name = f"jaxlib-{importlib.metadata.version('jaxlib')}-{processor}"
    try:
        return _private(_private(root()) / name)
    except OSError:
        return _private(pathlib.Path(__file__).resolve().parents[1] / ".pytest_cache" / "xla")


def _private(path: pathlib.Path) -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RuntimeError(f"{path}: expected a folder that is its owner's alone; its programs are run as they are")
    return path


def make_room(most_bytes: int = MOST_BYTES) -> None:
    """Drops the programs that were read longest ago, those of other versions too, until half of the room is free."""
    files = []
    for path in root().rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run makes room, too
            status = path.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in files) - most_bytes
    if excess > 0:
        excess += most_bytes // 2
        for _, size, path in sorted(files):
            if excess > 0:
                path.unlink(missing_ok=True)
                excess -= size


if __name__ == "__main__":
    print(folder())

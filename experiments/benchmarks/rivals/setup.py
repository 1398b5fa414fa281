"""Makes a virtual environment for each rival: `python -m experiments.benchmarks.rivals.setup [NAME...]`.

They install by name from the package index that pip is set up with. What fails is written down, and the benchmark
reports it instead of a number.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import venv

VENVS = pathlib.Path(__file__).resolve().parent / "venvs"
PACKAGES = {
    "fedjax": ["fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2"],  # the same JAX as fedjax_sim on Python 3.11
    "drjax": ["drjax==0.2.1", "jax==0.10.2", "jaxlib==0.10.2"],
    "pfl": ["pfl[pytorch]==0.6.0", "torch==2.13.0"],
    "flower": ["flwr[simulation]==1.41.0"],
    "byzfl": ["byzfl==0.0.11", "torch==2.13.0"],  # robust rules alone (p18)
    "pfllib": ["torch==2.13.0", "h5py==3.15.1", "matplotlib", "scikit-learn", "torchvision"],  # p26
    "flgo": ["flgo==0.4.4", "torch==2.15.0"],  # asynchronous simulation alone (p20)
}


def python_of(name: str, folder: pathlib.Path = VENVS) -> pathlib.Path:
    """The interpreter of a rival's environment."""
    return folder / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install(name: str, folder: pathlib.Path = VENVS) -> str:
    """Makes one environment anew; returns "" or why it failed."""
    venv.create(folder / name, with_pip=True, clear=True)
    command = [str(python_of(name, folder)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *PACKAGES[name]], capture_output=True, text=True)
    why = " ".join(done.stderr.replace(str(folder), "VENVS").split())[-400:] if done.returncode else ""
    (folder / name / "failed.txt").write_text(why, encoding="utf-8")
    return why


def main() -> int:
    """Installs the named rivals, all by default; the exit code is the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.rivals.setup", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PACKAGES, []], default=[], metavar="NAME")
    parser.add_argument("--venvs", type=pathlib.Path, default=VENVS, help="folder of the environments")
    options = parser.parse_args()
    failures = 0
    for name in options.names or PACKAGES:
        why = install(name, options.venvs)
        failures += bool(why)
        print(f"{name}: {why or 'installed'}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())

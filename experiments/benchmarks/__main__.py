"""`python -m experiments.benchmarks NAME...`: p0 ... p26, `all`, `list`, or `readme` (writes README.md from the JSON).

Each benchmark runs in a process of its own, which uses every core the way `fedjax-sim run` does. `--accelerator`,
without names, measures on the accelerator that JAX sees, in cohorts that fill it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

from fedjax_sim.running.environment import prepare

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Runs what the arguments name; the exit code is the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--accelerator", action="store_true", help="the cohorts of an accelerator, and no names")
    parser.add_argument("--venvs", type=pathlib.Path, help="folder of the rivals' environments, for --accelerator")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its numbers mean nothing")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder of the results")
    options = parser.parse_args(arguments)
    if bool(options.names) == options.accelerator:
        parser.error("expected names of benchmarks (list shows them), or --accelerator alone")
    os.environ.setdefault("FEDJAX_SIM_CACHE", "off")  # so that compile times are those of a first run
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # rivals run beside this process on one card
    prepare()
    from experiments.benchmarks import harness, report

    known = harness.modules()
    if options.names == ["list"]:
        for name in known:
            print(f"{name:4} {harness.load(name).__doc__.splitlines()[0]}")
        return 0
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its numbers must not replace the results")
    out = options.out or RESULTS
    if options.accelerator:
        _run_on_accelerator(report, options.venvs, out, options.quick)
        return 0
    if options.names == ["readme"]:
        report.write_readme(out)
        return 0
    names = list(known) if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"NAME: expected all, list, readme or one of {', '.join(known)}, got {', '.join(unknown)}")
    if len(names) == 1:
        _run(harness, report, names[0], out, options.quick)
        return 0
    command = [sys.executable, "-m", "experiments.benchmarks", "--out", str(out), *["--quick"] * options.quick]
    return sum(subprocess.run([*command, name]).returncode != 0 for name in names)


def _run(harness, report, name: str, out: pathlib.Path, quick: bool) -> None:
    module = harness.load(name)
    print(f"{name}: {module.__doc__.splitlines()[0]}", flush=True)
    report.run_and_write(module, lambda: module.measure(quick=quick), out / harness.modules()[name], quick)


def _run_on_accelerator(report, venvs: pathlib.Path | None, out: pathlib.Path, quick: bool) -> None:
    """Measures on the accelerator that JAX sees; the file has its name."""
    import jax

    from experiments.benchmarks import accelerator
    from experiments.benchmarks.rivals.setup import VENVS

    device = jax.devices()[0]
    if device.platform == "cpu" and not quick:
        raise SystemExit("--accelerator: JAX sees no accelerator; --quick --out FOLDER tries the script on a CPU")
    name = re.sub(r"\W+", "_", device.device_kind.lower())
    measure = lambda: accelerator.measure(venvs or VENVS, quick)  # noqa: E731
    report.run_and_write(accelerator, measure, out / f"on_{name}", quick)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m experiments.benchmarks.rivals`: the other frameworks beside fedjax_sim; writes results/rivals.json."""

from __future__ import annotations

import argparse
import os
import pathlib

from fedjax_sim.running.environment import prepare

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """Measures what `setup` installed."""
    os.environ.setdefault("FEDJAX_SIM_CACHE", "off")
    prepare()
    from experiments.benchmarks import report
    from experiments.benchmarks.rivals import beside, setup

    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.rivals", description=beside.__doc__)
    parser.add_argument("--venvs", type=pathlib.Path, default=setup.VENVS, help="folder of the environments")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean nothing")
    options = parser.parse_args()
    if options.quick and options.out == RESULTS:
        parser.error("--quick needs --out: its numbers must not replace the results")
    report.run_and_write(
        beside, lambda: beside.measure(options.venvs, options.quick), options.out / "rivals", options.quick
    )


if __name__ == "__main__":
    main()

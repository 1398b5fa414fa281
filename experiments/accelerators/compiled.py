"""Rounds compiled for accelerators that are not here: compiled.json, and a picture beside what an H100 measured.

    pip install -e '.[plot,cuda,tpu]'          # Python 3.12 or 3.13
    python -m experiments.accelerators.compiled

Nothing is run. Each row is the least time of a round's program, as `fedjax-sim plan --target` states it. Rows with a
measured time are of the programs that `h100.json` timed, in the precision that these had.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
import warnings

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = ("chip", "devices", "workload", "clients", "lanes")  # what tells the rows of compiled.json apart
# workload, clients a round, lanes, measured milliseconds on one H100 at commit 94004cc or, if marked, at fd54382. Lanes
# are those of that time, which the plan may have chosen.
MEASURED = [
    ("mlp", 10_000, 10_000, 1.917),
    ("mlp", 10_000, 3_334, 2.42),
    ("mlp", 10_000, 512, 3.622),
    ("mlp", 10_000, 64, 12.506),
    ("mlp", 1_000, 1_000, 0.545),  # fd54382
    ("softmax", 10_000, 4_000, 0.47),
    ("softmax", 10_000, 512, 1.56),
    ("softmax", 10_000, 64, 6.2),
    ("large_mlp", 1_000, 500, 10.357),
    ("lstm", 500, 250, 24.905),  # fd54382
    ("cifar_cnn", 50, 50, 12.035),
    ("cifar_cnn", 50, 25, 13.148),
    ("femnist_cnn", 100, 100, 27.443),
    ("femnist_cnn", 100, 64, 35.678),
    ("femnist_cnn", 100, 25, 29.849),
]
# chip, devices, workload, clients a round, lanes
FORECAST = [
    ("h100", 1, "mlp", 4_096, 512),
    ("h100", 4, "mlp", 4_096, 512),
    ("h100", 8, "mlp", 4_096, 512),
    ("h100", 1, "mlp", 4_096, None),
    ("h200", 1, "mlp", 4_096, None),
    ("a100", 1, "mlp", 4_096, None),
    ("v5e", 1, "mlp", 4_096, None),
    ("v6e", 1, "mlp", 4_096, None),
    ("h100", 1, "massive", 1_000_000, None),
    ("v5e", 256, "massive", 1_000_000, 3_907),
    ("h100", 1, "lstm", 500, None),
    ("h100", 1, "cifar_cnn", 50, None),
    ("h100", 1, "femnist_cnn", 100, None),
]


def row(chip_name: str, num_devices: int, name: str, cohort_size: int, lanes: int | None) -> dict:
    """Compiles a round of a workload for a chip and reads its program."""
    import jax

    from experiments.benchmarks.workloads import algorithm, massive, workload
    from fedjax_sim import engine
    from fedjax_sim.instruments.chips import CHIPS, chip_devices
    from fedjax_sim.instruments.target_forecast import forecast_on

    chip = CHIPS[chip_name]
    devices = chip_devices(chip, num_devices)
    plan = None if lanes is None else engine.Plan.checked(lanes)
    with engine.compiling_for(chip.platform, devices, chip.usable_bytes):
        if name == "massive":
            job = massive(cohort_size, cohort_size, plan=plan)
            made, params, data = job.algorithm, job.params, job.data
        else:
            work = workload(name, cohort_size=cohort_size, num_clients=cohort_size)
            made, params, data = algorithm(work, plan=plan), work.params, work.data
        found = forecast_on(chip, devices, made, key=jax.random.key(5), params=params, population=data)
    program = found.program
    kernels = sorted(program.kernels, key=lambda kernel: -kernel.times * kernel.memory_bytes)
    return {
        "chip": chip.title, "devices": num_devices, "workload": name, "clients": cohort_size,
        "lanes": lanes or "automatic", "least_ms": round(1e3 * found.round_seconds, 4),
        "parts_ms": {name: round(1e3 * seconds, 4) for name, seconds in found.seconds.items()},
        "kernels": program.num_launches, "memory_mb": round(program.memory_bytes / 1e6, 2),
        "gflops": {name: round(flops / 1e9, 3) for name, flops in program.flops.items()},
        "exchanges": sum(exchange.times for exchange in program.collectives),
        "loops_of_unknown_length": len(program.open_loops), "host_calls": program.num_host_calls,
        "device_memory_mb": round(found.memory_bytes / 1e6, 2), "compile_seconds": round(found.compile_seconds, 1),
        "most_traffic": [
            {"kernel": x.name, "times": x.times, "mb": round(x.memory_bytes / 1e6, 2), "of": x.source}
            for x in kernels[:8]
        ],
    }  # fmt: skip


def main(only: list[str]) -> None:
    import jax

    from fedjax_sim.running.environment import versions

    jax.config.update("jax_enable_compilation_cache", False)
    warnings.simplefilter("ignore", UserWarning)  # of idle devices
    path = HERE / "compiled.json"
    found: dict = json.loads(path.read_text()) if only else {"measured": [], "forecast": []}
    compiled_now = versions("jax", "jaxlib") | {"date": time.strftime("%Y-%m-%d")}

    def add(kind: str, values: dict) -> None:
        """Keeps a row in place of an earlier one, and writes all rows so far: a large program compiles for minutes."""
        rows = {tuple(row[name] for name in PROGRAM): row for row in [*found[kind], values | compiled_now]}
        found[kind] = list(rows.values())
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(*(values[name] for name in ("chip", "devices", "workload", "clients", "lanes", "least_ms")), flush=True)

    for name, cohort_size, lanes, milliseconds in MEASURED:
        if name not in only and only:
            continue
        # The benchmarks were timed in JAX's own precision for this card.
        try:
            add("measured", row("h100", 1, name, cohort_size, lanes) | {"measured_ms": milliseconds})
        except jax.errors.JaxRuntimeError as error:
            # XLA finds no kernel for some products without the card, on which it would try several.
            print(f"{name}, {lanes} lanes: not compiled, {str(error).splitlines()[0][:200]}", flush=True)
    draw(found["measured"])
    jax.config.update("jax_default_matmul_precision", "highest")
    for chip, num_devices, name, cohort_size, lanes in FORECAST:
        if name in only or not only:
            add("forecast", row(chip, num_devices, name, cohort_size, lanes))


def draw(rows: list[dict]) -> None:
    """Writes the picture: measured time beside the least time of the same program."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5), layout="constrained")
    for name in dict.fromkeys(x["workload"] for x in rows):
        of_name = [x for x in rows if x["workload"] == name]
        axes.scatter([x["least_ms"] for x in of_name], [x["measured_ms"] for x in of_name], label=name, zorder=2)
        for x in of_name:
            words = f"{x['lanes']:,} lanes"
            axes.annotate(words, (x["least_ms"], x["measured_ms"]), (5, -3), textcoords="offset points", fontsize=7)
    ends = [min(x["least_ms"] for x in rows) / 1.5, max(x["measured_ms"] for x in rows) * 1.5]
    for factor, style in ((1, "-"), (2, "--"), (4, ":")):
        axes.plot(
            ends, [factor * x for x in ends], style, color="0.6", lw=1, zorder=1, label=f"{factor} times the least"
        )
    axes.set(xscale="log", yscale="log", xlabel="least milliseconds a round, from the compiled program")
    axes.set_ylabel("measured milliseconds a round, one H100")
    axes.legend(fontsize=8)
    figure.savefig(HERE / "compiled.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="*", help="workloads; by default all, of which the CNNs compile for long")
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(parser.parse_args().only)

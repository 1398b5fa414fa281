"""Convolutional networks: FEMNIST, and the CIFAR benchmark of pfl-research.

Two 3 x 3 convolutions (32, 64), a max pool, 128 hidden units; FEMNIST: 28 x 28, 62 classes, d = 1,206,590, 10 clients
a round, 5 steps of 20. CIFAR as in pfl-research's benchmark: 1,000 users of 50 images 32 x 32 x 3, d = 1,626,442, 50
users a round, 5 steps of 10. The pixels are synthetic. FLOPs count the multiply-adds that training needs (forward,
gradient of the weights, gradient of each layer's input but the first), nothing that im2col adds. Beside it, in turns:
the machine's fastest float32 matrix product on all cores, centralised SGD over the same examples with XLA's library
convolutions outside of any loop, and the loops; those of the CIFAR model train 10 clients instead of 50.
"""

from __future__ import annotations

from functools import partial

import jax

from experiments.benchmarks import baselines, harness, side_by_side
from experiments.benchmarks.p02_emnist import one_model
from experiments.benchmarks.side_by_side import Other
from experiments.benchmarks.workloads import algorithm, small_cnn_logits, workload
from fedjax_sim import models


def measure(quick: bool = False) -> dict:
    """Client updates a second, and the share of the machine's peak."""
    rows, ratios, notes = [], [], []
    for name, title, some in (("femnist_cnn", "FEMNIST", 10), ("cifar_cnn", "CIFAR", 10)):
        work = workload(name, **({"cohort_size": 2, "num_clients": 4} if quick else {}))
        few = work._replace(cohort_size=min(some, work.cohort_size))
        others = _others(few, quick)
        side = 512 if quick else baselines.gemm_side()
        peaks, flops = baselines.gemm_peak(side), 2 * side**3
        turns = others | {what: Other(call, 1, len(jax.devices())) for what, call in peaks.items()}
        ours, theirs, _ = side_by_side.take_turns(
            algorithm(work), work.params, work.data, turns, rounds=1, passes=1 if quick else 4
        )
        cores, seconds = len(jax.devices()), ours.median / work.cohort_size
        rows.append(
            harness.row(f"{title}: fedjax_sim.run", ours, "clients/s", per=work.cohort_size, ours=True, cores=cores)
        )
        for what, other in others.items():
            line = harness.row(f"{title}: {what}", theirs[what], "clients/s", per=few.cohort_size, cores=other.cores)
            rows.append(line)
        speeds = {}
        for what in peaks:
            times = cores if "every" in what else 1
            line = harness.row(f"{title}: GEMM {what}", theirs[what], "GFLOP/s", per=flops * times / 1e9, cores=cores)
            speeds[what] = line["value"]
            rows.append(line)
        central = min(theirs[what].median / few.cohort_size for what in others if what.startswith("centralised"))
        bare = min(theirs[what].median / few.cohort_size for what in others if not what.startswith("centralised"))
        reached = work.client_flops / seconds / 1e9
        ratios += [
            harness.ratio(f"{title}: GFLOP/s", reached),
            harness.ratio(f"{title}: share of the GEMM peak", reached / max(speeds.values()), at_least=0.45),
            harness.ratio(f"{title}: time against centralised SGD of equal FLOPs", seconds / central, at_most=1.0),
            harness.ratio(f"{title}: time against the best loop", seconds / bare),
        ]
        notes.append(f"{title}: d = {work.num_params:,}, {work.client_flops / 1e9:.2f} GFLOP a client.")
    goal = "at least 45 % of the GEMM peak, and no slower than centralised big-batch SGD with library convolutions."
    return harness.result("P3", "CNNs of FEMNIST and CIFAR", goal=goal, rows=rows, ratios=ratios, notes=notes)


def _others(work, quick: bool) -> dict[str, Other]:
    """Makes centralised SGD and loops over one cohort, with library convolutions where no loop is around them.

    Args:
      work: the workload, with m clients a round.
      quick: small batches for centralised SGD.

    Returns: by name, what runs, with its rounds and the processor cores that it uses.
    """
    key, data, cores = jax.random.key(1), baselines.dense_clients(work), len(jax.devices())
    with_library, with_im2col = (_with_method(work, method) for method in ("native", "im2col"))
    ids = baselines.cohorts(work, 1)
    others = one_model(work, work.num_steps * work.batch_size * (1 if quick else 5), with_library.loss_fn)
    for what, words in ((work, "canonical gradients"), (with_im2col, "im2col")):
        loop = baselines.hand_written(baselines.equal_client(what), lanes=1, devices=cores)
        others[f"bare jitted loop, {words}, one client at a time, {cores} devices"] = Other(
            lambda loop=loop: loop(key, work.params, data, ids), 1, cores
        )
    for per_step, what in ((False, work), (True, with_library)):
        calls = baselines.dispatched(what, per_step=per_step)
        words = "local step, library convolutions" if per_step else "client, canonical gradients"
        others[f"Python loop, a jitted call for each {words}"] = Other(
            lambda calls=calls: calls(key, work.params, *data, ids[0]), 1, cores
        )
    return others


def _with_method(work, method: str):
    """The workload with convolutions of one method."""
    model = models.from_fn(
        lambda key: work.params,
        lambda params, x: small_cnn_logits(params, x, partial(models.layers.convolution, method=method)),
    )
    return work._replace(loss_fn=models.supervised(model, models.softmax_cross_entropy))


def plot(axes, result: dict) -> None:
    """Client updates a second of both models."""
    from experiments.benchmarks.report import bars

    bars(axes, [row for row in result["rows"] if row["unit"] == "clients/s"])

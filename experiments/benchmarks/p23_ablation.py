"""Where a round's time and its compiler's go: rounds with one thing left out at a time, beside the best loop by hand.

Each row is the compiled rounds of the same job, in turns with the others, and keeps the metrics of every round, as a
run does. What is left out is patched away while the program is traced, so its result means nothing: only its time does.
The last variant leaves five things out together. The loop is P0's: cohorts drawn beforehand, float sums, no checks.
Compiling is one reading each, from the call to the executable: tracing, lowering and XLA, without any cache.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.benchmarks import baselines, harness
from experiments.benchmarks.workloads import Workload, algorithm, workload
from fedjax_sim import engine
from fedjax_sim.running.environment import matmul_precision

JOBS = {"softmax": 50, "mlp": 5, "femnist_cnn": 1, "lstm": 1}  # workload -> rounds of a turn
WARM_UP, ALL, LOOP, COMPILING = "warm-up", "all on", "hand-written loop", "compiling"


def measure(quick: bool = False) -> dict:
    """Seconds a round of each job in each variant; each ratio is a variant's time over that of the whole round."""
    rows, ratios = [], []
    for name, rounds in {"softmax": 1}.items() if quick else JOBS.items():
        work = workload(name, **({"cohort_size": 8, "num_clients": 16} if quick else {}))
        _rounds(work, rounds, contextlib.nullcontext)  # JAX's own first steps are in nobody's time
        made = {ALL: _rounds(work, rounds, contextlib.nullcontext)}
        made |= {variant: _rounds(work, rounds, *left_out) for variant, left_out in VARIANTS.items()}
        # The first call of a turn comes after a garbage collection, and is slower.
        calls = {WARM_UP: made[ALL][0]} | {title: call for title, (call, _) in made.items()}
        calls |= {f"{LOOP}, {lanes} at a time": _loop(work, rounds, lanes) for lanes in (1, 4, 9, 20, 50)}
        timings = harness.interleaved(calls, repeats=3 if quick else 15)
        loop = min((t for title, t in timings.items() if title.startswith(LOOP)), key=lambda t: t.median)
        shown = {title: timings[title] for title in (ALL, *VARIANTS)} | {LOOP: loop}
        for title, timing in shown.items():
            per_round = harness.Timing(timing.first, tuple(x / rounds for x in timing.seconds))
            rows.append(harness.row(f"{name}: {title}", per_round, "s", ours=title != LOOP))
            if title != ALL:
                value = timing.median / timings[ALL].median
                ratios.append(harness.ratio(f"{name}: {title}, of the whole round", value))
        compiling = {title: seconds for title, (_, seconds) in made.items()} | {LOOP: loop.first - loop.median}
        for title, seconds in compiling.items():
            timing = harness.Timing(seconds, (seconds,))
            rows.append(harness.row(f"{name}: {COMPILING}, {title}", timing, "s", ours=title != LOOP))
            if title not in (ALL, LOOP):
                ratios.append(harness.ratio(f"{name}: {COMPILING}, {title}, of all", seconds / compiling[ALL]))
        beside_loop = compiling[ALL] / compiling[LOOP]
        ratios.append(harness.ratio(f"{name}: {COMPILING}, of the {LOOP}'s", beside_loop, at_most=3))
    goal = "a program that compiles in three times a loop's time; what parts cost, so that a new cost is seen."
    notes = ["One program for each row; rounds of the same job, without log and checkpoints."]
    return harness.result("P23", "what a round's parts cost", goal=goal, rows=rows, ratios=ratios, notes=notes)


def _rounds(work: Workload, num_rounds: int, without: Callable, metrics: bool = True) -> tuple[Callable, float]:
    """Compiles rounds of FedAvg inside of `without()`; returns the call, and the seconds until it was compiled.

    Args:
      work: the workload, with m clients a round.
      num_rounds: T rounds of a call.
      without: () -> a context in which a part of a round is patched away.
      metrics: whether the call keeps the rounds' metrics.
    """
    made, key = algorithm(work), jax.random.key(5)
    state = jax.jit(made.init)(key, work.params, work.data)

    def program(key, state, data):
        def one_round(state, i):
            state, info = made.step(jax.random.fold_in(key, i), state, data)
            return state, info if metrics else {}

        return jax.lax.scan(one_round, state, jnp.arange(num_rounds))

    jax.clear_caches()  # or a part that was traced before would come without the patches
    start = time.perf_counter()
    with without(), jax.default_matmul_precision(matmul_precision()):
        lowered = jax.jit(program).lower(key, state, work.data)
    compiled = lowered.compile(compiler_options=engine.compiler_options())
    seconds = time.perf_counter() - start
    jax.clear_caches()
    key_there, state_there, data_there = (jax.device_put(x, s) for x, s in zip(
        (key, state, work.data), compiled.input_shardings[0], strict=True))  # fmt: skip
    return lambda: compiled(key_there, state_there, data_there), seconds


def _loop(work: Workload, num_rounds: int, lanes: int) -> Callable:
    """Rounds of the hand-written loop on every device."""
    loop = baselines.hand_written(
        baselines.equal_client(work), lanes=lanes, devices=len(jax.devices()), num_rounds=num_rounds
    )
    key, data, ids = jax.random.key(1), baselines.dense_clients(work), baselines.cohorts(work, num_rounds)
    return lambda: loop(key, work.params, data, ids)


@contextlib.contextmanager
def _patched(*patches: tuple[str, str, object]) -> Iterator[None]:
    """Replaces names of modules inside of the block."""
    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(importlib.import_module(f"fedjax_sim.{module}"), name, value))
        yield


CHECKS = (
    ("engine", "largest_magnitude", lambda x: jnp.zeros((), x.dtype)),
    ("engine", "all_finite", lambda tree: jnp.asarray(True)),
)
BINS = (
    ("engine.arithmetic.exact_sum", "_highest_bin", lambda x: jnp.zeros(x.shape[1:], jnp.int32)),
    ("engine.arithmetic.exact_sum", "MIN_BIN", 6),  # holds magnitudes up to 2^13
)
FLOAT_SUMS = (("engine.arithmetic.exact_sums", "is_fast", lambda: True),)
ROUNDING = (("engine", "reproducible", lambda function, *shared: function),)
ORDER = (("engine", "shuffle", lambda key, mask: lambda epoch, positions: positions % mask.shape[0]),)
VARIANTS: dict[str, tuple] = {  # arguments of `_rounds`
    "no checks for non-finite numbers": (lambda: _patched(*CHECKS),),
    "bins are never looked for": (lambda: _patched(*BINS),),
    "float sums": (lambda: _patched(*FLOAT_SUMS),),
    "rounding left to the compiler": (lambda: _patched(*ROUNDING),),
    "examples in their stored order": (lambda: _patched(*ORDER),),
    "no metrics": (contextlib.nullcontext, False),
    "fast arithmetic": (engine.fast_arithmetic,),
    "checks, exact sums, rounding, order and metrics": (
        lambda: _patched(*CHECKS, *FLOAT_SUMS, *ROUNDING, *ORDER),
        False,
    ),
}


def plot(axes, result: dict) -> None:
    """Time of each variant, as a share of the whole round's."""
    from experiments.benchmarks.report import bars

    shares = [
        {
            "name": x["name"].removesuffix(", of the whole round"),
            "value": x["value"],
            "unit": "of the whole round's time",
        }
        for x in result["ratios"]
        if COMPILING not in x["name"]
    ]
    bars(axes, [x | {"ours": LOOP not in x["name"]} for x in shares])

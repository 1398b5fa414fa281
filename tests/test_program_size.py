"""Rounds of eight recipes are counted: a user waits for the compiler, whose time grows with the program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_sim import aggregation, algorithms, engine, transform
from fedjax_sim.engine.jaxpr import walk
from fedjax_sim.types import Algorithm
from tests.laws import cases, device_rows, problems as p

pytestmark = [
    pytest.mark.optimised,
    pytest.mark.skipif(jax.__version__ != "0.10.2", reason="another version of JAX traces and fuses otherwise"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the program differs by platform"),
]
# XLA's instructions for which it compiles no code of their own.
NO_KERNELS = {
    "after-all", "bitcast", "call", "conditional", "constant", "copy", "get-tuple-element", "parameter", "partition-id",
    "replica-id", "tuple", "while",
}  # fmt: skip


def fedavg_of_mlp() -> Algorithm:
    return algorithms.fedavg(
        p.mlp_loss, cases.SAMPLER, optax.sgd(p.RATE), num_epochs=1, batch_size=p.BATCH, **cases.RUN
    )


def private() -> Algorithm:
    noised_clip = transform.chain(transform.clip(1.0), transform.gaussian_mechanism(1.0, 1.0))
    return device_rows.star(transform=noised_clip, aggregator=aggregation.fixed_mean(float(p.SLOTS)))


def compressed() -> Algorithm:
    return device_rows.star(transform=transform.error_feedback(transform.top_k(count=1)))


def secure() -> Algorithm:
    rule = aggregation.secure_sum(aggregation.modular_sum(float(p.SLOTS)), 1)
    return device_rows.star(transform=transform.quantize(8, range=1.0, integers=True), aggregator=rule)


RECIPES = {  # the most operations (equations of the traced program) and kernels that a round may have
    "fedavg of an MLP": (fedavg_of_mlp, 2573, 131),
    "private": (private, 3136, 164),
    "scaffold": (cases.CASES["algorithms"]["scaffold"], 2602, 154),
    "compressed": (compressed, 2395, 153),
    "robust": (lambda: device_rows.star(aggregator=aggregation.trimmed_mean(1)), 2545, 163),
    "secure": (secure, 3636, 132),
    "asynchronous": (cases.CASES["algorithms"]["fedbuff"], 3475, 242),
    "gossip": (cases.CASES["algorithms"]["dpsgd"], 2460, 124),
}
RENEW = "Write the new number into RECIPES, and tell in the commit why the program has grown."


def traced(name: str):
    """The traced round of a recipe."""
    algorithm, data = RECIPES[name][0](), p.ragged()
    params = p.mlp_params() if name == "fedavg of an MLP" else jnp.array(p.START)
    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, params, data)
    return jax.jit(algorithm.step, compiler_options=engine.compiler_options()).trace(key, state, data)


def num_kernels(text: str) -> int:
    """The instructions of a compiled program outside of its fusions, for each of which XLA:CPU compiles code."""
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    # What a reduction, a sort or a scatter applies to two numbers is compiled with it.
    fused |= {found[2] for found in re.finditer(r" ([a-z][\w-]*)\(.*to_apply=%?([\w.-]+)", text) if found[1] != "call"}
    count, region = 0, ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            region = header[1]
        elif region not in fused and (instruction := re.search(r"^  .* = .*? ([a-z][\w-]*)\(", line)):
            count += instruction[1] not in NO_KERNELS
    return count


@pytest.mark.default_rows("fedavg of an MLP", "private", "compressed", "secure", "asynchronous")
@pytest.mark.parametrize("name", RECIPES)
def test_operations_of_a_round(name):
    """Catches a part that is traced twice, a cast of what has the type already, a branch that can never be taken."""
    most, seen = RECIPES[name][1], sum(1 for _ in walk(traced(name).jaxpr))
    assert seen <= most, f"{name}: {seen} operations, not at most {most}. {RENEW}"


@pytest.mark.default_rows("fedavg of an MLP")
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_of_a_round(name):
    """Catches a barrier with work of its own, reductions in windows, and values that are computed apart."""
    most, seen = RECIPES[name][2], num_kernels(traced(name).lower().compile().as_text())
    assert seen <= most, f"{name}: {seen} kernels, not at most {most}. {RENEW}"

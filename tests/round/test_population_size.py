"""The work of a round does not grow with the number of clients in the population."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, population, sampling
from fedjax_sim.running import blocks
from tests.laws import problems as p

NUM_CLIENTS = 100_000
LARGE = NUM_CLIENTS // 32  # words that hold a bit for each client
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}  # they move no number
IN_PLACE = {"scatter", "dynamic-update-slice"}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\S+) ([\w-]+)\((?:.*calls=%?([\w.-]+))?", re.MULTILINE)


def large_operations(text: str) -> list[str]:
    """Names of the operations of a compiled program that write arrays of N numbers, or of a bit for each client."""
    roots = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(?:  [^\n]*\n)*?  ROOT %?[\w.-]+ = \S+ ([\w-]+)\(", text, re.M))
    found = []
    for shape, name, called in INSTRUCTION.findall(text):
        sizes = [int(np.prod([int(d) for d in dims.split(",")])) for dims in re.findall(r"\[([\d,]+)\]", shape)]
        name = roots.get(called, name) if name == "fusion" else name
        if max(sizes, default=0) >= LARGE and name not in FREE | IN_PLACE:
            found.append(name)
    return found


def counting_all_bits(sampler):
    """Counts the clients that took part from all bits, in place of adding to the count of the round before."""
    counted = sampling.with_distinct_clients(sampler)

    def sample(key, state):
        cohort, state = counted.sample(key, state)
        return cohort, state._replace(count=jax.lax.population_count(state.bits).astype(jnp.int32).sum())

    return counted._replace(sample=sample)


@pytest.mark.default_rows("with_distinct_clients")
@pytest.mark.parametrize(
    "wrapped, grows", [(lambda x: x, False), (sampling.with_distinct_clients, False), (counting_all_bits, True)]
)
def test_no_operation_of_a_round_grows_with_the_population(wrapped, grows, monkeypatch):
    """Fault: an operation over all N clients in each round, or a copy of what the sampler keeps of them; the last row.

    Arrays of N numbers are read and written at the cohort's places only.
    """
    rows = {"x": np.ones((NUM_CLIENTS, p.WIDTH), np.float32), "y": np.ones(NUM_CLIENTS, np.float32)}
    clients = population.stored(rows, np.arange(NUM_CLIENTS + 1))
    sampler = wrapped(sampling.uniform(NUM_CLIENTS, 4))
    algorithm = algorithms.fedavg(
        p.linear_loss, sampler, optax.sgd(0.1), num_steps=1, plan=engine.Plan(2, 2), mesh=None
    )
    key = jax.random.key(0)
    state = algorithm.init(key, jnp.array(p.START), clients)
    texts = []
    compiled = jax.stages.Lowered.compile

    def kept(lowered, *args):
        program = compiled(lowered, *args)
        texts.append(program.as_text())
        return program

    monkeypatch.setattr(jax.stages.Lowered, "compile", kept)
    blocks.compiled_block(blocks.traced_round(algorithm, key, state, clients), key, state, clients)
    assert bool(large_operations(texts[-1])) == grows, large_operations(texts[-1])

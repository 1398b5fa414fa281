"""DESIGN's skeletons run as printed: whoever copies one starts from code that works."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, run, sampling, server
from fedjax_sim.population.protocol import sizes_of

DESIGN = pathlib.Path(__file__).resolve().parents[1] / "DESIGN.md"


@pytest.fixture(scope="module")
def skeletons():
    """Every public name of the blocks; each block runs alone, so that it must hold its own imports."""
    text = DESIGN.read_text(encoding="utf-8").partition("## Skeletons")[2].partition("\n## ")[0]
    found = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        names = {"__name__": "skeleton"}
        exec(compile(block, "DESIGN.md", "exec"), names)
        found |= names
    return found


def test_parts_of_a_round(skeletons):
    """Catches a skeleton without its imports, one that no round takes, and a largest update that is an absent one's."""
    slopes, x = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, 1.0, 1.5])
    clients = skeletons["Lines"](slopes, x, 4)
    assert sizes_of(clients).tolist() == [1, 2, 3, 1]
    algorithm = algorithms.federated(
        sampler=sampling.full(4),
        client=skeletons["sign_descent"](lambda w, rows, key: (w * rows["x"] - rows["y"]) ** 2, 0.5),
        transform=skeletons["halve"](),
        aggregator=skeletons["largest"](),
        server=server.optimizer(optax.sgd(1.0)),
        mesh=None,
    )
    state, history = run(jax.random.key(0), algorithm, jnp.zeros(()), clients, 2)
    assert float(algorithm.params(state)) == 0.5 and history.records[1]["local_loss"] < history.records[0]["local_loss"]
    rule = skeletons["largest"]()
    carry = rule.init(jax.ShapeDtypeStruct((2,), jnp.float32), 2)
    messages = carry | {"updates": jnp.array([[-1.0, 2.0], [0.0, 0.0]]), "weights": jnp.array([1.0, 0.0])}
    np.testing.assert_array_equal(rule.finalize(jax.random.key(0), None, messages)[0], [-1.0, 2.0])


def test_the_study(skeletons):
    """Catches a study whose theory misses, that draws nothing, or that fails what every study must do."""
    found = skeletons["step_size"](step_sizes=[0.3])
    assert [row["holds"] for row in found.rows()] == [True] and found.draw().axes
    with pytest.raises(TypeError, match="step_sizes: expected a list"):
        skeletons["step_size"](step_sizes=3)

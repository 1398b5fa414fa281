"""An update that is not what the server takes is refused before anything compiles: it would be broadcast in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim import aggregation
from fedjax_sim.types import ClientUpdate, Report
from tests.laws import cases, problems as p
from tests.refusals import refused

PARAMS = {"kernel": jnp.zeros((4, 5)), "bias": jnp.zeros(5, jnp.bfloat16)}


def sending(update) -> ClientUpdate:
    """A client that sends ones of these shapes and dtypes."""

    def apply(key, broadcast, state, data):
        return Report(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), update), jnp.float32(1), {}), state

    return ClientUpdate(lambda params: (), apply)


def start(server, update, aggregator=None):
    """The first state, and the shapes of the next."""
    federation = p.Federation(client=sending(update), server=server, aggregator=aggregator or aggregation.mean())
    state = federation.init(PARAMS)
    jax.eval_shape(federation.algorithm.step, jax.random.key(0), state, p.ragged())


def foreign(spec, every_shape: bool):
    """One leaf at a time of another shape or dtype; another structure."""
    leaves, structure = jax.tree.flatten(spec)
    for i, x in enumerate(leaves):
        shapes = {(), (1,), x.shape[1:], (1,) * len(x.shape), (3, *x.shape)}
        other = jnp.float16 if x.dtype == jnp.float32 else jnp.float32
        shapes = sorted(shapes - {x.shape})[: None if every_shape else 1]
        for leaf in (*(jax.ShapeDtypeStruct(s, x.dtype) for s in shapes), jax.ShapeDtypeStruct(x.shape, other)):
            yield structure.unflatten([*leaves[:i], leaf, *leaves[i + 1 :]])
    yield {"more": spec}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", cases.CASES["server"])
def test_foreign_updates_are_refused(name):
    """Catches (1, 1), (10,) or () for [64, 10], which the server adds to every weight, and counts as few bytes."""
    row = cases.CASES["server"][name]
    server = row() if row.of_part is None else row.of_part("bias")
    takes = server.expects(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS))
    start(server, takes)
    others = [PARAMS] if jax.tree.structure(takes) != jax.tree.structure(PARAMS) else []
    for update in [*foreign(takes, every_shape=row.every_shape), *others]:
        federation = p.Federation(client=sending(update), server=server, aggregator=aggregation.mean())
        with pytest.raises((TypeError, ValueError), match=r"^update.*: expected "):
            federation.init(PARAMS)


def test_what_the_aggregator_makes_decides():
    """Catches a rule that returns one number for all weights, and refuses none that restores the model's shape."""
    mean = cases.CASES["server"]["optimizer"]()
    wide = {"kernel": jax.ShapeDtypeStruct((2, 4, 5), jnp.float32), "bias": PARAMS["bias"]}

    def halves(key, updates, weights, ids):
        return {"kernel": updates["kernel"].mean((0, 1)), "bias": updates["bias"].mean(0)}

    def number(key, updates, weights, ids):
        return jax.tree.map(jnp.mean, updates)

    start(mean, wide, aggregation.gather(halves))
    with refused("update['bias']", value="()", rule="(5,)"):
        start(mean, PARAMS, aggregation.gather(number))

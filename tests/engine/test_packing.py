"""Packing of unequal clients: each once, beside clients of like size, with like work on every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.engine.packing import pack
from fedjax_sim.population.arrays import capacities

packed = jax.jit(pack, static_argnums=(1, 2, 3))


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("largest", [50, 5000])
def test_each_slot_has_one_place_among_its_like(largest, devices):
    """Catches slots lost at the border of two classes, a chunk of two classes, places that two slots share."""
    rng = np.random.default_rng(largest)
    for trial in range(5):
        sizes = np.minimum(rng.pareto(1.0, 97) * 10, largest).astype(np.int32) * (rng.random(97) < 0.9)
        sizes[0] = largest
        classes = capacities(sizes)
        got = packed(jnp.array(sizes), classes, 4, devices)
        source, place = np.asarray(got.source), np.asarray(got.place)
        assert sorted(source[source < 97].tolist()) == list(range(97)), trial
        assert source.reshape(-1)[place].tolist() == list(range(97))
        kind = np.searchsorted(classes, sizes)
        for device in range(devices):
            for chunk, own in zip(source[device], np.asarray(got.kind)[device], strict=True):
                assert (kind[chunk[chunk < 97]] == own).all()


@pytest.mark.default_rows("lognormal")
@pytest.mark.parametrize(
    "draw, share, balance",
    [
        (lambda rng: np.exp(rng.normal(np.log(50), 1, 1000)), 0.96, 0.98),
        (lambda rng: 10 + 10 * rng.pareto(1.1, 1000), 0.9, 0.95),
    ],
    ids=["lognormal", "power law"],
)
def test_little_is_wasted(draw, share, balance):
    """Useful over executed steps of ten examples, and the mean over the largest device. Catches chunks by slot."""
    sizes = np.minimum(np.ceil(draw(np.random.default_rng(0))), 5000).astype(np.int32)
    classes = capacities(sizes)
    got = packed(jnp.array(sizes), classes, 4, 2)
    steps = -(-np.append(sizes, 0) // 10)[np.asarray(got.source)]
    alone = np.array(classes)[np.asarray(got.kind)] > 256
    executed = np.where(alone, steps.sum(2), 4 * steps.max(2)).sum(1)
    assert steps.sum() / executed.sum() > share
    assert executed.mean() / executed.max() > balance
    chaos = steps.reshape(-1)[np.random.default_rng(1).permutation(steps.size)].reshape(-1, 4)
    assert chaos.sum() / (4 * chaos.max(1)).sum() < 0.6

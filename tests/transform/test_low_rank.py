"""Matrices as thin products, against the singular value decomposition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.transform import block_k, cast, chain, clip, low_rank, quantize, random_k, threshold, top_k
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Wire
from tests.laws import problems as p

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def sent(member, update):
    return jax.jit(lambda update: member.on_client(KEY, update, (), ())[0])(update)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_best_approximation(scale):
    """Catches factors that are not orthonormal, power iterations that do nothing, and squares out of range."""
    left, right = RNG.normal(size=(20, 2)), RNG.normal(size=(2, 12))
    low = (scale * left @ right).astype(np.float32)
    np.testing.assert_allclose(np.asarray(sent(low_rank(2), low)), low, atol=2e-6 * np.abs(low).max())
    full = (scale * RNG.normal(size=(20, 12)) * np.geomspace(1, 0.01, 12)).astype(np.float32)
    values = np.linalg.svd(full.astype(np.float64), compute_uv=False)
    best = np.sqrt((values[3:] ** 2).sum())
    once, often = (np.linalg.norm(np.float64(sent(low_rank(3, num_iterations=n), full)) - full) for n in (1, 30))
    assert best * (1 - 1e-5) <= often <= best * (1 + 1e-4) < once < np.linalg.norm(np.float64(full))


@pytest.mark.full
def test_projection():
    """Applied to its own output it changes nothing but the random start; never longer; vectors, scalars, small matrices
    and zeros are kept. Catches a flattened convolution, NaN from a zero matrix, dtypes lost."""
    kernel = jnp.array(RNG.normal(size=(3, 3, 8, 16)), jnp.float32)
    update = {
        "kernel": kernel,
        "bias": jnp.arange(16.0),
        "scalar": jnp.float32(3),
        "small": jnp.ones((2, 2)),
        "zero": jnp.zeros((30, 30)),
        "half": jnp.array(RNG.normal(size=(40, 30)), jnp.bfloat16),
        "none": jnp.zeros((0, 5)),
    }
    member = low_rank(2)
    message = sent(member, update)
    for name in ("bias", "scalar", "small", "zero", "none"):
        assert np.asarray(message[name]).tolist() == np.asarray(update[name]).tolist()
    assert np.linalg.matrix_rank(np.asarray(message["kernel"]).reshape(72, 16), tol=1e-4) == 2
    assert message["half"].dtype == jnp.bfloat16 and message["kernel"].shape == kernel.shape
    again = sent(member, message)
    np.testing.assert_allclose(again["kernel"], message["kernel"], atol=1e-5)
    for name in ("kernel", "half"):
        u, x = p.flat(update[name]), p.flat(message[name])
        assert np.linalg.norm(x) <= np.linalg.norm(u) * (1 + 1e-2 * (name == "half") + 1e-6)
        assert 0 < ((x - u) ** 2).sum() <= float(member.squared_error({"w": np.asarray(update[name], np.float32)}))
    assert not member.facts.unbiased and not member.facts.exact_error
    broken = sent(member, {"w": kernel.at[0, 0, 0, 0].set(jnp.nan)})
    assert not bool(jnp.isfinite(broken["w"]).all())


def test_wire():
    """Catches factors counted at 16 bits though they are computed in 32, and quantising after it counted as before it;
    and numbers picked from the product, at the factors' bits a number: they are plain floats."""
    spec = {"w": jax.ShapeDtypeStruct((30, 20), jnp.float32), "b": jax.ShapeDtypeStruct((20,), jnp.float32)}
    assert wire_of(low_rank(2), spec) == Wire(620, 32 * (2 * 50 + 20))
    half = jax.ShapeDtypeStruct((30, 20), jnp.bfloat16)
    assert wire_of(low_rank(2), half) == Wire(600, 32 * 100)
    assert wire_of(low_rank(20), spec) == Wire(620, 32 * 620)
    assert wire_of(chain(low_rank(2), quantize(8)), spec).payload_bits == 8 * 620
    assert wire_of(chain(cast("bfloat16"), low_rank(2)), spec).bits == 32 * 120
    for picked in (top_k(count=10), random_k(count=10), block_k(count=10, block_size=1)):
        assert wire_of(chain(low_rank(2), picked), spec).payload_bits == 32 * 10
        assert wire_of(chain(low_rank(2), clip(1.0), picked, picked), spec).payload_bits == 32 * 10
    assert wire_of(chain(low_rank(2), top_k(0.9)), spec).payload_bits == 32 * 120  # the factors cost less
    assert wire_of(chain(low_rank(2), threshold(1.0)), spec) == Wire(620, 32 * 120, 620)
    assert wire_of(chain(low_rank(2), quantize(4), top_k(count=10)), spec).payload_bits == 4 * 10


@pytest.mark.parametrize("kwargs", [{"rank": 0}, {"rank": 1.0}, {"rank": True}, {"num_iterations": 0}])
def test_wrong_numbers(kwargs):
    """Catches ranks of nothing."""
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(kwargs))}: "):
        low_rank(**kwargs)

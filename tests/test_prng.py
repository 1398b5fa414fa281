"""Keys by name and identity, and draws."""

from __future__ import annotations

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim
from fedjax_sim.prng import (
    below,
    client_key,
    counter_bits,
    dither,
    fast,
    fold_in,
    init_key,
    normal,
    random_bits,
    stochastic_round,
    stream,
    threefry,
)
from fedjax_sim.running.arguments import check_run_numbers
from tests.refusals import refused

pytestmark = pytest.mark.optimised(False)  # integers, but for normal draws


def test_stage_names_do_not_collide():
    """Catches two stages that read one stream: every name used in the package, and 2,000 others."""
    source = pathlib.Path(fedjax_sim.__path__[0]).rglob("*.py")
    names = {name for path in source for name in re.findall(r'stream\([^()]*, "([^"]+)"\)', path.read_text())}
    assert {"sampling", "client", "aggregation", "server", "loss"} <= names
    key = jax.random.key(0)
    everything = sorted(names | {f"stage {i}" for i in range(2000)})
    assert len({tuple(np.asarray(jax.random.key_data(stream(key, name))).tolist()) for name in sorted(names)}) == len(
        names
    )
    import zlib

    assert len({zlib.crc32(name.encode()) for name in everything}) == len(everything)


def test_streams_survive_the_process():
    """Catches Python's salted hash() in place of a checksum: the bits are fixed for ever."""
    data = np.asarray(jax.random.key_data(stream(jax.random.key(0), "client")))
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 3343123541))
    assert data.tolist() == np.asarray(expected).tolist()


def test_no_round_has_the_key_of_init():
    """Fault: an initial state that shares its randomness with a round that a run may have."""
    key = jax.random.key(7)
    with pytest.raises(ValueError, match="num_rounds"):
        check_run_numbers(
            num_rounds=2**31,
            evaluate_every=1,
            checkpoint_every=None,
            keep_checkpoints=1,
            directory=None,
            resume=False,
        )
    last = 2**31 - 2  # of the most rounds that a run may have
    assert (init_key(key) == jax.random.fold_in(key, last + 1)).all()
    assert (init_key(key) != jax.random.fold_in(key, last)).all()


def test_client_keys_are_independent_of_the_batch():
    """Catches generators whose vmapped draws depend on the batch, and splitting by slot."""
    key = jax.random.key(3)
    ids = jnp.array([5, 0, 2**31 - 1, 7])
    together = jax.vmap(lambda id: jax.random.bits(client_key(key, id), (3,)))(ids)
    for row, id in zip(together, ids, strict=True):
        assert row.tolist() == jax.random.bits(client_key(key, id), (3,)).tolist()


def chi_square(counts, total, cells) -> float:
    expected = total / cells
    return (sum((count - expected) ** 2 for count in counts) + (cells - len(counts)) * expected**2) / expected


def test_counter_bits_are_uniform():
    """Bytes of words, differences of neighbouring counters and of neighbouring keys; and single bits that flip.

    Chi-square of 256 cells over 2^18 draws: P(statistic > 400) < 1e-8. Each input bit flips each output bit half of the
    time: 2^15 trials, 6 deviations. Catches one finaliser without its key, and a counter that is only multiplied.
    """

    def cells(words):
        return max(chi_square(np.bincount(words >> s & 255, minlength=256), words.size, 256) for s in (0, 8, 16, 24))

    keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros(64, jnp.uint32), jnp.arange(64, dtype=jnp.uint32)], 1))
    counters = jnp.arange(4096, dtype=jnp.uint32)
    words = np.asarray(jax.vmap(counter_bits, (0, None))(keys, counters))
    assert cells(words.ravel()) < 400
    assert cells((words[:, 1:] - words[:, :-1]).ravel()) < 400
    assert cells((words[1:] ^ words[:-1]).ravel()) < 400
    assert len(np.unique(words[0])) == 4096
    limit = 6 * 0.5 / math.sqrt(2**15)
    base = np.asarray(counter_bits(keys[3], jnp.arange(2**15, dtype=jnp.uint32)))
    for bit in range(32):
        flipped = np.asarray(counter_bits(keys[3], jnp.arange(2**15, dtype=jnp.uint32) ^ jnp.uint32(1 << bit)))
        shares = ((base ^ flipped)[:, None] >> np.arange(32) & 1).mean(0)
        assert np.abs(shares - 0.5).max() < limit, bit


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_generators_that_mix_clients_are_refused(impl):
    """Fault: a client's draws that depend on the other clients of a batch, without an error."""
    with pytest.raises(ValueError, match="key: expected a threefry key"):
        client_key(jax.random.key(0, impl=impl), jnp.int32(3))


def test_dither_is_uniform_and_uncorrelated():
    """Chi-square of bytes, serial correlation at lags 1, 2, 64, correlation of clients with neighbouring ids.

    2^18 words each. P(chi-square of 256 cells > 400) < 1e-8; 6 deviations of a correlation, P < 2e-9 each. Words that
    are not mixed (the counter times a constant) fail: planted below. Catches clients that share their words.
    """
    size = 2**18
    limit = 6 / math.sqrt(size)

    def correlations(words):
        u = words.astype(np.float64) / 2**32 - 0.5
        return [abs(12 * (u[lag:] * u[:-lag]).mean()) for lag in (1, 2, 64)]

    key = jax.random.key(4)
    draw = jax.jit(lambda id: dither(client_key(key, id), (4, size // 4)))
    clients = [np.asarray(draw(jnp.int32(id))).ravel() for id in range(3)]
    for words in clients:
        assert max(chi_square(np.bincount(words >> s & 255, minlength=256), size, 256) for s in (0, 8, 16, 24)) < 400
        assert max(correlations(words)) < limit
    u = np.stack(clients).astype(np.float64) / 2**32 - 0.5
    assert np.abs(12 * u @ u.T / size - np.eye(3)).max() < limit
    plain = np.arange(size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    assert max(correlations(plain)) > 10 * limit


def test_dither_avalanche():
    """Each of the key's 64 bits flips each output bit half of the time: 2^15 trials, 6 deviations, 2,048 pairs
    (P < 5e-6 that any fails). Catches half of the key left out, or added at the end."""
    words = np.asarray(jax.random.key_data(jax.random.key(6))).astype(np.uint32)
    size = 2**15
    draw = jax.jit(lambda data: dither(jax.random.wrap_key_data(data), (size,)))
    base = np.asarray(draw(words))
    for bit in range(64):
        other = words.copy()
        other[bit // 32] ^= np.uint32(1 << bit % 32)
        shares = ((base ^ np.asarray(draw(other)))[:, None] >> np.arange(32) & 1).mean(0)
        assert np.abs(shares - 0.5).max() < 6 * 0.5 / math.sqrt(size), bit


@pytest.mark.optimised
def test_fast_draws_are_independent_of_batch_and_devices():
    """Catches a generator whose bits change under vmap, in chunks, or when a mesh of devices shares the work."""
    from jax.sharding import AxisType, PartitionSpec

    key = jax.random.key(9)

    def draws(id):
        own = client_key(key, id)
        return jax.random.bits(fast(own), (5,)), normal(own, (7,)), dither(own, (7,))

    ids = jnp.arange(40, 48)
    one = jax.jit(draws)
    expected = [np.stack(leaf) for leaf in zip(*(map(np.asarray, one(id)) for id in ids), strict=True)]
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("clients")
    shared = jax.shard_map(jax.vmap(draws), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    chunks = lambda ids: jax.lax.map(draws, ids, batch_size=4)  # noqa: E731
    for together in (shared, chunks):  # both vmapped
        for got, want in zip(jax.jit(together)(ids), expected, strict=True):
            assert np.array_equal(got, want)


def test_fast_keys_keep_every_bit():
    """Catches a key that is folded to 32 bits, and generators that mix clients."""
    words = np.zeros((64, 2), np.uint32)
    words[np.arange(64), np.arange(64) // 32] = np.uint32(1) << (np.arange(64, dtype=np.uint32) % 32)
    made = fast(jax.random.wrap_key_data(words))
    data = np.asarray(jax.random.key_data(made))
    assert data.shape == (64, 4) and np.array_equal(data[:, :2], words)
    assert str(jax.random.key_impl(fast(made))) == "threefry4x32"
    assert len({tuple(row) for row in np.asarray(jax.vmap(lambda k: jax.random.bits(k, (2,)))(made)).tolist()}) == 64
    with pytest.raises(ValueError, match="key: expected a threefry key"):
        fast(jax.random.key(0, impl="rbg"))


def test_fast_is_threefry4x32():
    """Catches a version of JAX that draws other bits: these are fixed for ever."""
    assert np.asarray(jax.random.bits(fast(jax.random.key(1)), (4,))).tolist() == [
        4071088796,
        2120266937,
        2944376718,
        3607691219,
    ]


def normal_statistics(x: np.ndarray) -> dict[str, float]:
    """Deviations from the standard normal law, each in its own standard deviations, and a chi-square of 64 cells."""
    from statistics import NormalDist

    n = x.size
    edges = [NormalDist().inv_cdf(i / 64) for i in range(1, 64)]
    counts = np.bincount(np.searchsorted(edges, x), minlength=64)
    tails = {f"beyond {z}": (np.abs(x) > z).sum() for z in (3, 4)}
    chances = {name: 2 * NormalDist().cdf(-float(name.split()[1])) for name in tails}
    return {
        "mean": x.mean() * math.sqrt(n),
        "variance": (np.square(x).mean() - 1) * math.sqrt(n / 2),
        "third": (x**3).mean() * math.sqrt(n / 15),
        "fourth": ((x**4).mean() - 3) * math.sqrt(n / 96),
        "serial": (x[1:] * x[:-1]).mean() * math.sqrt(n),
        **{name: (count - n * chances[name]) / math.sqrt(n * chances[name]) for name, count in tails.items()},
        "chi-square": (chi_square(counts, n, 64) - 63) / math.sqrt(126),
    }


def judge_normal(draws: int, off: float):
    """The draws pass at 6 deviations (8 statistics, P < 1e-6 by the normal law; chi-square 6 deviations, P < 1e-6), and
    the same draws made longer by `off` do not."""
    x = np.asarray(jax.jit(lambda key: normal(key, (draws,)))(jax.random.key(12)), np.float64)
    found = normal_statistics(x)
    assert max(map(abs, found.values())) < 6, found
    assert max(map(abs, normal_statistics(x * (1 + off)).values())) > 6


@pytest.mark.optimised
def test_normal_draws():
    """Moments, tails and shape of 10^6 draws. Catches noise 1 % too small, which a privacy budget would not forgive."""
    judge_normal(10**6, -0.01)


@pytest.mark.slow
@pytest.mark.optimised
def test_many_normal_draws():
    """The same at 10^7 draws, where 0.3 % show."""
    judge_normal(10**7, -0.003)


def test_stochastic_round_is_unbiased():
    """Means within 6 deviations of 2^18 draws at each fraction; a value off by 0.02 is rejected by the same bound.

    Catches rounding to nearest, a draw of 1.0, and integers that move (127 must not become 128).
    """
    x = jnp.array([-126.75, -0.5, 0.001, 0.25, 63.9, 127.0, -128.0], jnp.float32)
    n = 2**18
    got = np.asarray(jax.jit(lambda key: stochastic_round(key, jnp.broadcast_to(x, (n, 7))))(jax.random.key(2)))
    fraction = np.asarray(x) - np.floor(x)
    deviation = np.sqrt(fraction * (1 - fraction) / n)
    assert np.isin(got - np.floor(x)[None], [0, 1]).all()
    assert (np.abs(got.mean(0, dtype=np.float64) - np.asarray(x)) <= 6 * deviation + 1e-7).all()
    assert (6 * deviation < 0.02).all()
    assert (got[:, 5:] == np.asarray(x)[5:]).all()


def test_below_is_the_product_of_64_bits():
    """Catches a carry between the words that is lost: Python's integers give floor(U n / 2^64) for the same words."""
    for n in (1, 62, 2**16 + 1, 2**31 - 1):
        key = jax.random.fold_in(jax.random.key(1), n)
        high, low = np.asarray(jax.random.bits(key, (2, 1000), jnp.uint32)).astype(object)
        assert below(key, n, (1000,)).tolist() == ((high * 2**32 + low) * n >> 64).tolist()


def largest_excess(draw, n=2 * 10**9, number=100_000):
    """Standard deviations by which the ids below 2^32 mod n come too often: those that 32 bits would prefer."""
    preferred = 2**32 % n
    share = preferred / n
    drawn = jax.jit(draw, static_argnums=(1, 2))(jax.random.key(5), n, number)
    hits = (np.asarray(drawn) < preferred).sum()
    return (hits - number * share) / math.sqrt(number * share * (1 - share))


def test_draws_among_many_are_uniform():
    """Catches 32 bits modulo N, which draws some of 2 x 10^9 ids half as often again as the others.

    Five standard deviations: the right law passes but with chance 6e-7; the old one lies 52 of them away.
    """
    from fedjax_sim import sampling

    def cohort(key, n, number):
        return sampling.with_replacement(n, number).sample(key, ())[0].ids

    def by_modulus(key, n, number):
        return jax.random.randint(key, (number,), 0, n, jnp.int32)

    for draw in (cohort, lambda key, n, number: below(key, n, (number,))):
        assert abs(largest_excess(draw)) < 5
    assert largest_excess(by_modulus) > 20
    with refused("n", value=0, rule="[1, 2147483647]"):
        below(jax.random.key(0), 0)


@pytest.mark.default_rows("True")
@pytest.mark.parametrize("partitionable", [True, False])
def test_threefry_is_that_of_jax(partitionable):
    """Also of a key alone and of another generator. Catches a rotation or a key word out of place."""
    ids = jnp.array([0, 1, 2**31 - 1, -1], jnp.int32)
    for seed in (0, 2**31):
        key = jax.random.key(seed, impl="threefry2x32")
        found = threefry(jax.random.key_data(key), jnp.zeros(4, jnp.uint32), ids.astype(jnp.uint32))
        folded = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, ids))
        np.testing.assert_array_equal(jnp.stack(found, -1), folded)
        # A key of JAX's older kind has no type.
        for made in (key, fast(key), jax.random.key_data(key)):
            expected = [jax.random.fold_in(made, id) for id in ids]
            for found in (list(fold_in(made, ids)), [fold_in(made, id) for id in ids]):
                assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(found, expected, strict=True))
        with jax.threefry_partitionable(partitionable):
            for made in (key, fast(key)):
                np.testing.assert_array_equal(random_bits(made, 77), jax.random.bits(made, (77,), jnp.uint32))

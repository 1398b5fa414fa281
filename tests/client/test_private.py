"""DP-SGD in a client: bounded contributions, the right noise, the right batches, and plain SGD without privacy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import client, privacy
from fedjax_sim.client.clipping import clipped_sum
from fedjax_sim.types import ClientData
from tests.laws import cases, problems as p

KEY = jax.random.key(4)
CLIP = 0.5


def inner_product(params, examples, key):
    """A loss whose gradient is the example."""
    return examples @ params


def work(**options):
    """A private client of the laws' linear problem, at most six rows."""
    given = {"num_steps": 3, "batch_size": 2, "num_examples": 6} | options
    return client.private_sgd(
        given.pop("loss_fn", p.linear_loss),
        given.pop("clip_norm", CLIP),
        given.pop("noise_multiplier", 0.0),
        given.pop("learning_rate", 0.1),
        **given,
    )


def rows(count=6, valid=6, seed=0):
    """Data of the laws' linear problem with NaN behind the valid rows."""
    rng = np.random.default_rng(seed)
    mask = np.arange(count) < valid
    x = np.where(mask[:, None], rng.normal(size=(count, p.WIDTH)), np.nan)
    y = np.where(mask, rng.normal(size=count), np.nan)
    return ClientData({"x": jnp.array(x, jnp.float32), "y": jnp.array(y, jnp.float32)}, jnp.array(mask))


def update(made, data, key=KEY):
    return np.asarray(jax.jit(made.apply)(key, jnp.array(p.START), (), data)[0].update)


@pytest.mark.optimised
def test_contributions_are_bounded():
    """Gradients from 1e-38 to 1e38, of 3 and of 200,000 numbers, NaN and infinity: at most C (1 + 1e-6), never NaN.

    Short gradients stay as they are, long ones keep their direction. Catches overflowing squares, and scaling up to C.
    """
    rng = np.random.default_rng(0)

    @jax.jit
    def alone(x):
        data = ClientData(x[None], jnp.ones(1, bool))
        return clipped_sum(inner_product, jnp.zeros(x.shape), data, KEY, clip_norm=CLIP)[0]

    for size in (3, 200_000):
        for scale in (0.0, 1e-38, 1e-6, 1e-4, 1.0, 1e18, 3e37):
            x = np.float32(scale * np.clip(rng.normal(size=size), -3, 3))
            sent = np.float64(alone(x))
            length, before = np.linalg.norm(sent), np.linalg.norm(np.float64(x))
            assert length <= CLIP * (1 + 1e-6), (size, scale)
            if before < CLIP * (1 - 1e-4) and scale >= 1e-30:
                np.testing.assert_array_equal(sent, x)
            elif before > CLIP:
                assert length > CLIP * (1 - 1e-4) and sent @ np.float64(x) > (1 - 1e-5) * length * before
    for value in (np.nan, np.inf, -np.inf):
        assert (np.asarray(alone(np.float32([1, value, 2]))) == 0).all()


def test_leaves_are_clipped_together():
    """(3, 4) over two leaves, C = 1: (0.6, 0.8). Catches a clip for each leaf, of sensitivity sqrt(2) C."""

    def loss(params, examples, key):
        return 3 * params["a"] * examples + 4 * params["b"] * examples

    data = ClientData(jnp.ones(1), jnp.ones(1, bool))
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    total, means = jax.jit(lambda params, data: clipped_sum(loss, params, data, KEY, clip_norm=1.0))(params, data)
    np.testing.assert_allclose([total["a"], total["b"]], [0.6, 0.8], rtol=2e-5)
    assert float(means["clipped_share"].total) == 1


@pytest.mark.optimised
def test_neighbouring_records():
    """10^4 pairs: a record removed moves the sum by at most C, a record replaced by at most 2 C; both are reached.

    A record may be anything: lengths over twelve orders of magnitude, NaN among them. Catches a mean over the batch,
    and a clip of the sum.
    """
    rng = np.random.default_rng(1)
    shape = (10_000, 6)
    x = rng.normal(size=(*shape, p.WIDTH)) * 10 ** rng.uniform(-6, 6, (*shape, 1))
    other = np.where(rng.random((shape[0], 1)) < 0.5, -x[:, 0], np.nan)

    @jax.jit
    @jax.vmap
    def sums(x, other):
        mask = jnp.ones(6, bool)

        def total(x, mask):
            return clipped_sum(inner_product, jnp.zeros(p.WIDTH), ClientData(x, mask), KEY, clip_norm=CLIP)[0]

        return total(x, mask), total(x, mask.at[0].set(False)), total(x.at[0].set(other), mask)

    whole, without, replaced = (np.float64(s) for s in sums(np.float32(x), np.float32(other)))
    removed, swapped = (np.linalg.norm(whole - s, axis=1) / CLIP for s in (without, replaced))
    assert removed.max() <= 1 + 1e-5 and swapped.max() <= 2 + 1e-5  # rounding of a sum of six
    assert removed.max() > 0.999 and swapped.max() > 1.99


@pytest.mark.parametrize("num_steps", cases.rows([1, 2], [2]))
def test_noise_level(num_steps):
    """Chi-square over 10^6 numbers: std z C lr / B sqrt(K), not 1 % more or less, each wrong with P < 1e-6.

    Catches noise once for all steps, z squared, noise on the mean, and noise divided by the batch that was drawn.
    """
    made = work(
        loss_fn=lambda w, x, key: 0 * x * w["a"][0],
        noise_multiplier=1.5,
        learning_rate=0.2,
        batch_size=4,
        num_steps=num_steps,
    )
    params = {"a": jnp.zeros(500_000), "b": jnp.zeros((500, 1000))}
    apply = jax.jit(made.apply)
    report, _ = apply(KEY, params, (), ClientData(jnp.zeros(6), jnp.ones(6, bool)))
    drawn = p.flat(report.update) / (1.5 * CLIP * 0.2 / 4 * math.sqrt(num_steps))
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], drawn.size)
    assert low < (drawn**2).sum() < high
    for off in (0.99, 1.01):
        assert not low < (drawn**2).sum() * off**2 < high
    assert abs(np.corrcoef(drawn[:500_000], drawn[500_000:])[0, 1]) < 5 / math.sqrt(500_000)
    again = apply(jax.random.key(9), params, (), ClientData(jnp.zeros(6), jnp.ones(6, bool)))[0].update
    assert abs(np.corrcoef(drawn, p.flat(again))[0, 1]) < 5e-3


@pytest.mark.parametrize("num_steps", cases.rows([5, 12], [12]))
def test_without_privacy_it_is_sgd(num_steps):
    """z = 0 and a clip that never cuts: `local_sgd` on the same batches, written out and in a loop.

    Catches a wrong divisor, batches that overlap within an epoch, and a gradient taken at stale parameters.
    """
    how = {"num_steps": num_steps, "batch_size": 2}
    plain = client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(**how))
    data = rows()
    private = work(clip_norm=1e6, sampling="shuffled", **how)
    np.testing.assert_allclose(update(private, data), update(plain, data), atol=1e-6)
    if num_steps == 12:
        return
    whole = client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=3))
    np.testing.assert_allclose(update(work(clip_norm=1e6, batch_size=6), data), update(whole, data), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("size, sampling", [pytest.param(1, "poisson", marks=pytest.mark.full), (4, "shuffled")])
def test_microbatches(size, sampling):
    """The same update up to rounding, with noise too. Catches rows of the last, partial microbatch that are lost."""
    how = {"noise_multiplier": 0.3, "batch_size": 5, "sampling": sampling, "num_steps": 2}
    whole, parts = (update(work(microbatch_size=s, **how), rows(valid=5)) for s in (None, size))
    np.testing.assert_allclose(parts, whole, atol=1e-6)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("count, valid, batch_size", [(8, 8, 4), (120, 100, 6)])
def test_records_are_drawn_by_poisson(count, valid, batch_size):
    """4,000 clients: each record with chance q, pairs independent, batch sizes binomial; five deviations each.

    Once with a slot for every row, once with fewer, where rows are padded. Catches batches of a fixed size, a rate that
    follows the client's size, and rows that never come.
    """
    made = work(
        loss_fn=inner_product, clip_norm=2.0, learning_rate=batch_size, num_steps=1,
        batch_size=batch_size, num_examples=count,
    )  # fmt: skip
    assert (made.facts.noise.details["max_batch_size"] < count) == (count == 120)
    data = ClientData(jnp.eye(count), jnp.arange(count) < valid)
    keys = jax.random.split(KEY, 4000)
    taken = -np.asarray(jax.jit(jax.vmap(lambda key: made.apply(key, jnp.zeros(count), (), data)[0].update))(keys))
    assert set(np.unique(taken.round(4))) == {0.0, 1.0} and (taken[:, valid:] == 0).all()
    taken, rate = taken[:, :valid].round(), batch_size / count
    assert abs(taken.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / taken.size)
    assert (np.abs(taken.mean(0) - rate) < 5 * math.sqrt(rate * (1 - rate) / 4000)).all()
    pairs = np.cov(taken.T) / (rate * (1 - rate))
    assert np.abs(pairs - np.diag(np.diag(pairs))).max() < 6.5 / math.sqrt(4000)
    sizes = taken.sum(1)
    assert abs(sizes.var() / (valid * rate * (1 - rate)) - 1) < 5 * math.sqrt(3 / 4000)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("rate, verdict", [(0.5, "confirmed"), (0.25, "violated")])
def test_an_audit_of_one_record(rate, verdict):
    """What a message reveals of one record is what rate, clip and noise claim, and not what a lower rate would claim.

    Catches faults between the parts: a batch drawn twice, noise that depends on the batch.
    """
    made = work(
        loss_fn=inner_product, clip_norm=CLIP, noise_multiplier=0.8, learning_rate=3.0 / CLIP, num_steps=1, batch_size=3
    )

    def release(key, with_canary):
        data = ClientData(jnp.zeros((6, 2)).at[0].set(5.0), (jnp.arange(6) > 0) | with_canary)
        return -made.apply(key, jnp.zeros(2), (), data)[0].update.sum() / math.sqrt(2)

    claim = privacy.gaussian_claim(0.8, sampling_rate=rate)
    found = privacy.audit_release(KEY, release, claim, num_releases=60_000, chunk=20_000, tolerance=0.2)
    assert found.verdict == verdict, found.text()


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("sampling", cases.rows(["poisson", "shuffled"], ["poisson"]))
def test_padding(sampling):
    """Rows behind the mask, and how many there are, change no bit. Catches draws addressed from the last row."""
    made = work(noise_multiplier=0.5, sampling=sampling, num_steps=1)
    short = rows(count=4, valid=4)
    padded = ClientData(
        {name: jnp.concatenate([x, jnp.full((2, *x.shape[1:]), np.nan)]) for name, x in short.examples.items()},
        jnp.arange(6) < 4,
    )
    first, second = (jax.jit(made.apply)(KEY, jnp.array(p.START), (), data)[0] for data in (short, padded))
    np.testing.assert_allclose(first.update, second.update, atol=1e-6)
    np.testing.assert_allclose(first.metrics["local_loss"].weight, second.metrics["local_loss"].weight)


def test_what_the_message_reveals():
    """Weight 1 and noise, with or without examples; a record that overflows does not cause a message to be dropped.

    Catches a weight that counts records, and a NaN that one record can cause.
    """
    made = work(noise_multiplier=1.0, num_steps=1)
    apply = jax.jit(made.apply)
    empty, full = (apply(KEY, jnp.array(p.START), (), rows(valid=v))[0] for v in (0, 6))
    assert float(empty.weight) == float(full.weight) == 1 and (np.asarray(empty.update) != 0).all()
    counting = work(weighting="examples", num_steps=1)
    weight = jax.jit(lambda data: counting.apply(KEY, jnp.array(p.START), (), data)[0].weight)
    assert float(weight(rows(valid=4))) == 4
    data = rows()
    spoilt = data._replace(examples=data.examples | {"x": data.examples["x"].at[0].set(jnp.inf)})
    report = apply(KEY, jnp.array(p.START), (), spoilt)[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(report))


def test_narrow_parameters():
    """bfloat16 parameters keep their dtype; sums and noise are in float32. Catches noise that underflows."""
    made = work(loss_fn=lambda w, x, key: x @ w.astype(jnp.float32), noise_multiplier=1.0, batch_size=6, num_steps=1)
    data = ClientData(jnp.ones((6, 3)), jnp.ones(6, bool))
    report, _ = jax.jit(made.apply)(KEY, jnp.zeros(3, jnp.bfloat16), (), data)
    assert report.update.dtype == jnp.bfloat16 and np.isfinite(np.float32(report.update)).all()
    spec = jax.eval_shape(lambda: clipped_sum(inner_product, jnp.zeros(3, jnp.bfloat16), data, KEY, clip_norm=1.0)[0])
    assert spec.dtype == jnp.float32


def test_what_an_accountant_reads():
    """Catches a rate or a number of steps that the client does not run."""
    noise = work(noise_multiplier=1.5, num_steps=7, batch_size=5, num_examples=1000).facts.noise
    assert (noise.unit, noise.place, noise.multiplier, noise.clip_norm) == ("record", "local", 1.5, CLIP)
    details = noise.details
    assert (details["sampling"], details["rate"], details["steps"]) == ("truncated_poisson", 0.005, 7)
    slots = details["max_batch_size"]
    assert stats.binom.sf(slots, 1000, 0.005) < 1e-9 <= stats.binom.sf(slots - 1, 1000, 0.005)
    assert work(num_examples=6).facts.noise.details["sampling"] == "poisson"
    assert work(sampling="shuffled").facts.noise.details["sampling"] == "shuffled"


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"clip_norm": 0.0}, "clip_norm: expected a finite number > 0"),
        ({"clip_norm": math.inf}, "clip_norm: expected"),
        ({"noise_multiplier": -1.0}, "noise_multiplier: expected"),
        ({"noise_multiplier": math.nan}, "noise_multiplier: expected"),
        ({"learning_rate": -0.1}, "learning_rate: expected"),
        ({"num_steps": 0}, "num_steps: expected"),
        ({"num_steps": True}, "num_steps: expected"),
        ({"batch_size": 7}, "batch_size: expected"),
        ({"microbatch_size": 0}, "microbatch_size: expected"),
        ({"sampling": "poison"}, "Did you mean 'poisson'"),
        ({"weighting": "example"}, "weighting: expected one of"),
    ],
)
def test_wrong_input(wrong, words):
    """Catches options for which the accountant's figures would not hold."""
    with pytest.raises((ValueError, TypeError), match=words):
        work(**wrong)


def test_more_rows_than_accounted_for():
    """Catches a rate that is smaller than the true one."""
    with pytest.raises(ValueError, match="num_examples: expected at least 8, got 6"):
        jax.eval_shape(work().apply, KEY, jnp.array(p.START), (), rows(count=8))

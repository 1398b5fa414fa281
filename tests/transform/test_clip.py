"""Clipping: what is sent is no longer than the norm, in the dtype in which it is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, transform
from fedjax_sim.transform import chain, clip, gaussian_mechanism, personal_clip, stateless
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.transform.clip import clip_metrics
from fedjax_sim.types import Received, Wire
from tests.laws import cases, laws, problems as p

KEY = jax.random.key(0)
SPEC = {"a": jax.ShapeDtypeStruct((4,), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}
RNG = np.random.default_rng(0)


def norm(values) -> float:
    """In float64, over all leaves."""
    return float(np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(values))))


def send(member, update, state=(), key=KEY):
    return member.on_client(key, update, state, member.init_client(update))[0]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "dtype, per",
    [
        *((jnp.float32, "vector"), (jnp.bfloat16, "vector"), (jnp.float16, "leaf")),
        *(pytest.param(dtype, "leaf", marks=pytest.mark.full) for dtype in (jnp.float32, jnp.bfloat16)),
        pytest.param(jnp.float16, "vector", marks=pytest.mark.full),
    ],
)
@pytest.mark.optimised
def test_no_message_is_longer_than_the_bound(dtype, per):
    """Catches a bound that rounding breaks (a nearest bfloat16 can be 0.4 % longer), squares that overflow or vanish, 0
    / 0, an empty leaf, and a message cut far below its bound."""
    limit = 0.7
    shapes = {"a": (700, 3), "b": (), "c": (0, 2), "d": (129,)}
    member = clip(limit, per=per)
    act = jax.jit(lambda update: member.on_client(KEY, update, (), ())[::2])
    longest = 0.0
    for scale in (0.0, 1e-38, 1e-20, 1e-8, 1e-3, 0.02, 1.0, 1e3, 1e18, 1e38):
        for kind in range(3):  # spread, all equal (rounded all one way), one large entry
            draw = {k: RNG.uniform(-1, 1, s) if kind == 0 else np.full(s, 0.7001) for k, s in shapes.items()}
            if kind == 2:
                draw = {k: x * 1e-3 for k, x in draw.items()}
                draw["a"][5] = 1.0
            with np.errstate(over="ignore"):
                update = {k: jnp.asarray(np.float32(scale * x)).astype(dtype) for k, x in draw.items()}
            if not all(np.isfinite(np.float32(x)).all() for x in update.values()):
                continue
            message, measured = act(update)
            before, after = norm(update), norm(message)
            assert all(message[k].dtype == dtype and message[k].shape == shapes[k] for k in shapes)
            assert np.isfinite(after) and after <= limit and after <= before
            assert np.isfinite(float(clip_metrics(measured)["unclipped_norm"]))
            if per == "vector" and dtype == jnp.float32 and before > 1e-30:
                assert after >= min(before, limit) * (1 - 3e-5)
            longest = max(longest, after)
    assert longest > limit * (0.9999 if dtype == jnp.float32 else 0.99)


@pytest.mark.full
@pytest.mark.optimised
def test_nearest_rounding_would_lengthen():
    """Guards the test above: an update for which the nearest bfloat16 of the clipped one is longer than the bound."""
    update = jnp.full(1000, 1.0)
    naive = (update * (1 / norm(update))).astype(jnp.bfloat16)
    assert norm(naive) > 1.0005
    assert norm(send(clip(1.0), update.astype(jnp.bfloat16))) <= 1


def test_hand_computed():
    """(3, 4). Catches "scale to C", which lengthens short updates, and a norm of one leaf alone."""
    update = {"a": jnp.array([3.0]), "b": jnp.float32(4)}
    message = send(clip(1.0), update)
    np.testing.assert_allclose([message["a"][0], message["b"]], [0.6, 0.8], rtol=2e-5)
    for limit in (5.001, 10.0, 1e9):
        same = send(clip(limit), update)
        assert float(same["a"][0]) == 3 and float(same["b"]) == 4
    on_the_bound = send(clip(5.0), update)
    np.testing.assert_allclose([on_the_bound["a"][0], on_the_bound["b"]], [3, 4], rtol=2e-5)
    by_leaf = send(clip(1.0, per="leaf"), update)
    np.testing.assert_allclose([by_leaf["a"][0], by_leaf["b"]], [0.5**0.5] * 2, rtol=2e-5)
    _, _, measured = clip(4.5, per="leaf").on_client(KEY, update, (), ())
    metrics = clip_metrics(measured)
    assert float(metrics["clipped_update_share"]) == 0.5  # 4 is past 4.5 / sqrt(2), 3 is not
    np.testing.assert_allclose(metrics["unclipped_norm"], 5, rtol=1e-6)


@pytest.mark.full
def test_matches_an_independent_implementation():
    """optax's global-norm clip, to 2e-5. Catches a factor of the wrong power."""
    update = {
        "a": jnp.asarray(RNG.normal(size=(40, 5)), jnp.float32),
        "b": jnp.asarray(RNG.normal(size=7), jnp.float32),
    }
    for limit in (0.1, 3.0, 100.0):
        ours, theirs = clip(limit), optax.clip_by_global_norm(limit)
        both = jax.jit(lambda x, a=ours, b=theirs: (send(a, x), b.update(x, optax.EmptyState())[0]))
        for x, y in zip(*map(jax.tree.leaves, both(update)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5)


def distances(member, state=(), cohorts: int = 10_000, size: int = 8):
    """How far the sum of a cohort moves, in clip norms 1, when one client leaves, and when it is replaced."""
    aggregator = aggregation.fixed_mean(1.0)
    scale = 10.0 ** RNG.uniform(-6, 6, (cohorts, size + 1, 1))
    update = np.float32(RNG.normal(size=(cohorts, size + 1, 5)) * scale)
    update[:, 1] = np.where(np.arange(cohorts)[:, None] % 2, -update[:, 0], update[:, 1])  # replaced by its opposite
    updates = {"a": jnp.asarray(update[..., :4]), "b": jnp.asarray(update[..., 4])}

    @jax.jit
    @jax.vmap
    def sums(updates):
        messages = jax.vmap(lambda update: send(member, update, state))(updates)

        def total(weights):
            received = Received(messages, weights, jnp.arange(size + 1), jnp.arange(size + 1))
            carry = aggregator.accumulate(KEY, None, aggregator.init(SPEC, size + 1), received)
            aggregate = aggregator.finalize(KEY, None, carry)[0]
            return jnp.concatenate([aggregate["a"], aggregate["b"][None]])

        out, other = (jnp.ones(size + 1).at[i].set(0) for i in (0, 1))
        return total(other), total(out.at[1].set(0)), total(out)

    with_one, without, replaced = (np.asarray(x, np.float64) for x in sums(updates))
    return np.linalg.norm(with_one - without, axis=1), np.linalg.norm(with_one - replaced, axis=1)


MECHANISMS = {
    "clip": lambda: (clip(1.0), ()),
    "leaf": lambda: (clip(1.0, per="leaf"), ()),
    "gaussian_mechanism": lambda: (gaussian_mechanism(1.0, 1.0), ()),
    "after a longer one": lambda: (
        chain(stateless(lambda key, x: jax.tree.map(lambda y: 3 * y, x)), clip(1.0)),
        ((),) * 2,
    ),
    "adaptive_clip": lambda: (transform.adaptive_clip(1.0, initial_clip_norm=9.0, quantile_noise=9.0), jnp.float32(1)),
}


@pytest.mark.default_rows("leaf")
@pytest.mark.parametrize("name", cases.rows(MECHANISMS, ["after a longer one", "leaf"]))
@pytest.mark.optimised
def test_neighbouring_cohorts(name):
    """10^4 cohorts of 8 over twelve decades, no violation: a client more or less moves the sum by C, another one by
    2 C, and no less at most. Catches a clip after the sum, of each leaf to C, or at the client's own scale."""
    member, state = MECHANISMS[name]()
    removed, replaced = distances(member, state)
    assert removed.max() <= 1 + 1e-6 and replaced.max() <= 2 + 1e-6  # the sum itself rounds to float32
    assert removed.max() > 0.999 and replaced.max() > 1.99


@pytest.mark.full
def test_neighbours_reject_faults():
    """Guards the law above: clipping each leaf to C, and scaling by an own threshold, are found."""
    by_leaf = stateless(lambda key, update: jax.tree.map(lambda x: send(clip(1.0), x), update))
    assert distances(by_leaf, cohorts=100)[0].max() > 1.2
    assert distances(personal_clip(0.1), cohorts=100)[0].max() > 100


def test_declared_error():
    """Catches an error that forgets the other leaves, or is there for short updates."""
    for per, limit in (("vector", 2.0), ("leaf", 2.0), ("vector", 50.0)):
        member = clip(limit, per=per)
        update = {"a": jnp.asarray(RNG.normal(size=30), jnp.float32), "b": jnp.float32(0.5)}
        message = send(member, update)
        real = norm(jax.tree.map(jnp.subtract, update, message)) ** 2
        np.testing.assert_allclose(jax.jit(member.squared_error)(update), real, rtol=1e-4, atol=1e-5 * limit**2)
        as_numpy = jax.tree.map(lambda x: np.asarray(x, np.float64), update)
        np.testing.assert_allclose(member.squared_error(as_numpy), real, rtol=1e-4, atol=1e-5 * limit**2)
        assert member.facts.exact_error and not member.facts.unbiased


@pytest.mark.optimised
@pytest.mark.full  # as are the clips of tests/laws/test_compositions.py and test_devices.py
def test_devices_and_chunks():
    """Trained updates, clipped by leaf and then as a whole, on one device and on two in other chunks: the same bits.

    Catches a norm whose last bit depends on how a compiler sums: it would change every number of the message.
    """
    outcomes = []
    for plan, mesh in ((p.PLAN, None), (engine.Plan(2, 2), engine.device_mesh(2))):
        work = client.local_sgd(p.mlp_loss, optax.sgd(p.RATE), client.work(num_epochs=1, batch_size=p.BATCH))
        twice = chain(clip(0.1, per="leaf"), clip(0.02))
        parts = {"client": work, "transform": twice, "aggregator": aggregation.fixed_mean(10.0)}
        federation = p.Federation(**parts, plan=plan, mesh=mesh)
        outcomes.append(p.outcome(*federation.run(p.COHORT, params=p.mlp_params(), num_rounds=3)))
    laws.check_equal_bits(*outcomes, "devices")
    assert outcomes[0][1][-1]["member_1_clipped_update_share"] > 0.2  # of leaves


def test_personal_thresholds_bound_nothing():
    """Catches a study that an accountant could mistake for a mechanism (the threshold follows the data)."""
    member, update = personal_clip(0.25), {"a": jnp.array([3.0, -4.0]), "b": jnp.array([1e6], jnp.bfloat16)}
    message = send(member, update)
    assert message["a"].tolist() == [0.75, -1] and message["b"].dtype == jnp.bfloat16
    facts = member.facts
    assert facts.l2_bound is None and facts.noise is None and facts.nonexpansive and not facts.unbiased
    np.testing.assert_allclose(member.squared_error({"a": jnp.array([3.0, 4.0])}), 0.75**2 * 25, rtol=1e-6)


def test_non_finite_updates_stay_so():
    """Catches a NaN or infinity that clipping turns into a number, which would hide it from the round."""
    for bad in (np.nan, np.inf, -np.inf):
        for dtype in (jnp.float32, jnp.bfloat16):
            message = send(clip(1.0), jnp.array([1.0, bad, 2.0], dtype))
            assert not np.isfinite(np.float32(message)).all()


def test_clip_norms_may_be_swept():
    """Catches a check or a constant that needs a Python number."""
    update = jnp.array([3.0, 4.0])
    swept = jax.jit(jax.vmap(lambda limit: send(clip(limit), update)))(jnp.array([1.0, 2.0, 50.0]))
    np.testing.assert_allclose(np.linalg.norm(swept, axis=1), [1, 2, 5], rtol=2e-5)


def test_wire_pays_for_the_factor():
    """Catches a scaled code for free, and a factor paid for floats that bear it themselves."""
    half = stateless(
        lambda key, x: x, wire=lambda spec, wire: Wire(wire.values, wire.values * 8, 32, 20), unbiased=True
    )
    assert wire_of(clip(1.0), SPEC) == plain_wire(SPEC)
    assert wire_of(chain(half, clip(1.0)), SPEC) == Wire(5, 40, 64, 52)
    assert wire_of(chain(half, clip(1.0, per="leaf")), SPEC) == Wire(5, 40, 96, 84)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-12, 1e12, True, "1"])
def test_wrong_norms_are_refused(value):
    """Catches a clip norm that bounds nothing, or everything."""
    with pytest.raises((ValueError, TypeError), match="clip_norm: expected"):
        clip(value)
    with pytest.raises((ValueError, TypeError), match="clip_norm: expected"):
        gaussian_mechanism(value, 1.0)


def test_wrong_options_are_refused():
    """Catches factors above one, and misspelt groups."""
    with pytest.raises(ValueError, match="per: expected one of 'vector', 'leaf'"):
        clip(1.0, per="leaves")
    for factor in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="factor: expected"):
            personal_clip(factor)


def test_derivative():
    """Fault: NaN as the derivative of a clipped update, at zero above all; a branch of the exact norm followed."""
    update, direction = np.array([3.0, -1.0, 0.5]), np.array([1.0, 2.0, 3.0])

    def ends(norm, x):
        return (clip(norm).on_client(jax.random.key(0), {"w": x}, (), ())[0]["w"] * direction).sum()

    length = np.linalg.norm(update)
    unit = update / length
    expected = 0.8 / length * (direction - unit * (unit @ direction))
    slopes = jax.jit(jax.grad(ends, (0, 1)))
    by_norm, by_update = slopes(0.8, np.float32(update))
    np.testing.assert_allclose(by_update, expected, rtol=1e-5)
    np.testing.assert_allclose(by_norm, unit @ direction, rtol=1e-5)
    for short in (np.zeros(3), 0.1 * update):
        np.testing.assert_allclose(slopes(0.8, np.float32(short))[1], direction, rtol=1e-6)

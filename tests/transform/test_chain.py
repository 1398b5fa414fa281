"""Composition of transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType
from fedjax_sim.transform import (
    chain,
    clip,
    discrete_gaussian_mechanism,
    drive,
    identity,
    low_rank,
    natural_compression,
    personal_clip,
    quantize,
    random_k,
    stateless,
    top_k,
)
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.types import Mean, Noise, TransformFacts, UpdateTransform, Wire
from tests.laws import laws, problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)


def both_ends(name: str) -> UpdateTransform:
    """Doubles at the client, adds 1 at the server, counts rounds, remembers a client's last update."""
    return UpdateTransform(
        init=lambda spec: jnp.zeros((), jnp.int32),
        init_client=lambda spec: jnp.zeros(spec.shape),
        on_client=lambda key, update, state, memory: (2 * update, update, {name: Mean(update.sum(), jnp.ones(()))}),
        on_server=lambda key, cohort, aggregate, state, measured, sensitivity: (
            aggregate + 1,
            state + 1,
            {name: measured[name].total},
        ),
        wire=lambda spec, wire: Wire(wire.values, 7),
        facts=TransformFacts(mirrored=False),
    )


def run(transform):
    update = jnp.ones(3)
    memory, state = transform.init_client(SPEC), transform.init(SPEC)
    message, memory, measured = transform.on_client(KEY, update, state, memory)
    aggregate, state, metrics = transform.on_server(KEY, None, message, state, measured, None)
    return message, aggregate, metrics, jax.tree.leaves((state, memory))


def test_chain_is_closed():
    """Catches a chain that is no transform, and nesting that changes order or state."""
    a, b, c = (both_ends(name) for name in "abc")
    for nested, plain in ((chain(a, chain(b, c)), chain(a, b, c)), (chain(a, chain()), chain(a))):
        one, other = run(nested), run(plain)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert np.asarray(x).tolist() == np.asarray(y).tolist()
    message, aggregate, metrics, _ = run(chain(a, b))
    assert message.tolist() == [4] * 3 and aggregate.tolist() == [6] * 3
    assert metrics == {"a": 3, "b": 6}
    assert run(chain())[0].tolist() == [1] * 3


def test_server_ends_run_in_reverse():
    """Catches an outer code removed before the inner one: (2u + 1) comes back to u only in reverse."""

    def pair(client, server):
        return stateless(lambda key, x: client(x))._replace(
            on_server=lambda key, cohort, x, state, measured, sensitivity: (server(x), state, {})
        )

    twice, plus = pair(lambda x: 2 * x, lambda x: x / 2), pair(lambda x: x + 1, lambda x: x - 1)
    assert run(chain(twice, plus))[1].tolist() == [1] * 3


def test_members_draw_from_their_own_streams():
    """Catches two members that add the same noise."""
    noise = stateless(lambda key, update: update + jax.random.normal(key, update.shape))
    seen = []
    spy = stateless(lambda key, update: seen.append(update) or update)
    chain(noise, spy, noise, spy).on_client(KEY, jnp.zeros(3), ((),) * 4, ((),) * 4)
    first, second = seen[0], seen[1] - seen[0]
    assert np.abs(first - second).min() > 1e-4


@pytest.mark.full
@pytest.mark.optimised
def test_identity_changes_no_bit():
    """Catches an identity that rounds or re-keys: the round equals the one under an empty chain."""
    with_identity = p.Federation(transform=identity()).run(p.COHORT)
    with_chain = p.Federation(transform=chain()).run(p.COHORT)
    without = p.Federation().run(p.COHORT)
    for other in (with_identity, with_chain):
        laws.check_equal_bits(without[0].server, other[0].server, "model")
        assert without[1][0]["uplink_bytes"].total() == other[1][0]["uplink_bytes"].total()


def test_plain_wire_counts_every_leaf():
    """Catches 32 bits assumed for every scalar, scalars left out, and members that do not count in turn."""
    spec = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": (jnp.zeros(5, jnp.bfloat16), jnp.int8(1))}
    plain = plain_wire(spec)
    assert plain == Wire(12, 6 * 32 + 5 * 16 + 8) and isinstance(plain.bits, int)
    assert wire_of(chain(), spec) == wire_of(identity(), spec) == plain
    half = stateless(lambda key, x: x, wire=lambda spec, wire: Wire(wire.values // 2, wire.payload_bits // 2, 5))
    assert wire_of(chain(identity(), both_ends("a")), spec).bits == 7
    assert wire_of(chain(half, half), spec) == Wire(3, plain.bits // 4, 5)
    assert Wire(1, 8, 2, 6).coded == 6 and Wire(1, 8, 2, 60).coded == 10 == Wire(1, 8, 2).coded


@pytest.mark.parametrize(
    "member",
    [clip(1.0), personal_clip(0.5), quantize(8), natural_compression(), drive(), low_rank(1), random_k(count=2)],
    ids=["clip", "personal_clip", "quantize", "natural_compression", "drive", "low_rank", "random_k"],
)
def test_whole_numbers_are_refused_where_they_would_be_cut(member):
    """Catches an int32 leaf that comes back as an int32 leaf: every fraction cut off, unbiased or not."""
    update = {"a": jnp.ones(3), "b": jnp.arange(4)}
    with refused("update", value="a leaf of int32", kind=InvalidType):
        member.on_client(KEY, update, (), ())
    kept = top_k(count=2).on_client(KEY, update, (), ())[0]  # sends numbers as they are
    assert kept["b"].tolist() == [0, 0, 2, 3] and kept["b"].dtype == jnp.int32


@pytest.mark.default_rows("clip", "discrete_gaussian_mechanism")
@pytest.mark.parametrize(
    "member",
    [clip(1.0), clip(1.0, per="leaf"), natural_compression(), discrete_gaussian_mechanism(1.0, 1.0, 4, bits=20)],
    ids=["clip", "clip by leaf", "natural_compression", "discrete_gaussian_mechanism"],
)
def test_doubles_beside_floats(member):
    """Catches float32 leaves taken for narrow ones beside a double, constants past 32 bits, and loops of two dtypes."""
    with jax.enable_x64(True):
        update = {"a": jnp.full((4, 3), 1.5, jnp.float64), "b": jnp.full(3, -1.5, jnp.float32)}
        message, _, _ = jax.jit(lambda key, x: member.on_client(key, x, (), ()))(jax.random.key(0), update)
        assert all(np.isfinite(np.asarray(x)).all() and np.any(np.asarray(x)) for x in jax.tree.leaves(message))
        if member.facts.integer_range is None:
            assert [str(x.dtype) for x in jax.tree.leaves(message)] == ["float64", "float32"]
        if member.facts.l2_bound is not None:
            norm = np.linalg.norm(np.concatenate([np.float64(x).reshape(-1) for x in jax.tree.leaves(message)]))
            assert 0.999 * member.facts.l2_bound < norm <= member.facts.l2_bound


def test_facts_of_a_chain():
    """Catches a bound that survives a lengthening member, and one that a nonexpansive member loses."""
    bound = stateless(lambda key, x: x, l2_bound=2.0)
    shrink = stateless(lambda key, x: x / 2, nonexpansive=True)
    longer = stateless(lambda key, x: 3 * x)
    assert chain(longer, bound, shrink).facts.l2_bound == 2.0
    assert chain(bound, longer).facts.l2_bound is None
    assert chain(bound, clip(5.0)).facts.l2_bound == 2.0
    assert chain(longer, clip(5.0), longer, bound).facts.l2_bound == 2.0
    assert chain().facts.nonexpansive and chain(shrink, shrink).facts.nonexpansive
    assert not chain(shrink, longer).facts.nonexpansive
    release = identity().stating(releases_when_empty=True)
    assert chain(identity(), release).facts.releases_when_empty and not chain().facts.releases_when_empty


def test_errors_of_a_chain():
    """Catches a bias that later members hide, and an error declared for what nobody knows."""
    noisy = stateless(lambda key, x: x, unbiased=True, squared_error=lambda x: 2.0, exact_error=True)
    bound = stateless(lambda key, x: x, squared_error=lambda x: 3.0)
    assert chain(identity(), noisy).squared_error(0) == 2.0
    assert chain(noisy).facts.exact_error and chain(noisy).facts.unbiased
    assert chain(bound, identity()).squared_error(0) == 3.0
    assert not chain(bound).facts.exact_error and not chain(bound, noisy).facts.unbiased
    assert chain(noisy, bound).squared_error is None and not chain(noisy, bound).facts.exact_error
    assert chain().squared_error(0) == 0 and chain(identity()).facts.exact_error


def test_orders_that_break_a_promise_are_refused():
    """Catches an update lengthened after the clip that noise relies on, two mechanisms, and broken integers."""
    clip = {"nonexpansive": True, "l2_bound": 1.0}
    central = stateless(lambda key, x: x, **clip, noise=Noise("gaussian", "central", 1.0, 1.0, "client"))
    share = stateless(lambda key, x: x, noise=Noise("gaussian", "distributed", 1.0, 1.0, "client"))
    local = stateless(lambda key, x: x, noise=Noise("gaussian", "local", 1.0, 1.0, "client"))
    longer, shrink = stateless(lambda key, x: 3 * x), stateless(lambda key, x: x / 2, nonexpansive=True)
    integers = stateless(lambda key, x: x, integer_range=(-3, 3))
    assert chain(longer, central, shrink).facts.noise is central.facts.noise and chain(central).facts.l2_bound == 1.0
    assert chain(shrink, integers).facts.integer_range == (-3, 3)
    assert chain(local, longer).facts.noise is local.facts.noise
    with refused("transforms[1]", rule="never lengthens", hint="put it before"):
        chain(central, longer)
    with refused("transforms[1]", rule="nothing after noise"):
        chain(share, shrink)
    with pytest.raises(ValueError, match="one member with noise, got 2"):
        chain(central, shrink, local)
    with pytest.raises(ValueError, match="integers from the last member only"):
        chain(integers, shrink)
    mirrored = stateless(lambda key, x: x, mirrored=True)
    assert chain(longer, mirrored, identity()).facts.mirrored
    with pytest.raises(ValueError, match=r"transforms\[0\]: .* wrap the whole chain"):
        chain(mirrored, shrink)


@pytest.mark.parametrize("wrong", [None, identity, lambda key, update: update, "identity"])
def test_members_must_be_transforms(wrong):
    """Catches a factory that was not called."""
    with refused("transforms[1]", rule="UpdateTransform", hint="stateless", kind=InvalidType):
        chain(identity(), wrong)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_are_positive(bound):
    """Catches a bound that means nothing."""
    with pytest.raises(ValueError, match="l2_bound: expected"):
        stateless(lambda key, x: x, l2_bound=bound)

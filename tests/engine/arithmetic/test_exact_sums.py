"""Sums over clients against rational arithmetic: order, chunks, padding, range, and what is not finite."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedjax_sim import engine, tree
from fedjax_sim.engine.arithmetic import barrier, exact_sum, exact_sums
from tests import compiler
from tests.refusals import refused

ROWS, WIDTH = 12, 3  # one compiled shape for all examples
SPEC = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
SMALLEST = 2.0**-126  # values below count as zero

add = jax.jit(exact_sums.add)
merge = jax.jit(exact_sums.merge)
total = jax.jit(exact_sums.total)

finite = st.one_of(
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.sampled_from([0.0, -0.0, 1e-38, -1e-38, 1e-45, 1e38, -1e38, 1.0, -1.0, 2.0**24, -(2.0**24), 2.0**-24, 3e38]),
    st.floats(-1, 1, width=32),
)
matrices = st.lists(st.lists(finite, min_size=WIDTH, max_size=WIDTH), min_size=ROWS, max_size=ROWS).map(
    lambda rows: np.array(rows, np.float32)
)
extremes = settings(max_examples=60, deadline=None)


def chunks(values, sizes):
    """Sum of the rows taken in chunks of these sizes, each padded with zero rows to one shape."""
    acc, start = exact_sums.zeros(SPEC), 0
    for size in sizes:
        block = np.zeros((ROWS, WIDTH), np.float32)
        block[: len(values[start : start + size])] = values[start : start + size]
        acc, start = add(acc, jnp.array(block)), start + size
    return acc


def bits(acc):
    """The bits of a sum: its words with all carries moved, and its total."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((merge(acc, exact_sums.zeros(SPEC)), total(acc)))]


def check(result, values):
    """Within n halves of the last kept digit of the largest addend and two units in the last place."""
    for column in range(values.shape[1]):
        addends = [float(x) for x in values[:, column]]
        truth = sum((Fraction(x) for x in addends), Fraction(0))
        allowed = len(addends) * max(abs(x) for x in addends) * 2.0**-23
        allowed += 2 * float(np.spacing(np.float32(min(abs(float(truth)), 3e38)))) + len(addends) * SMALLEST
        got = float(result[column])
        if abs(truth) > 3.4e38:
            assert not math.isfinite(got) or abs(Fraction(got) - truth) <= allowed
        else:
            assert abs(Fraction(got) - truth) <= Fraction(allowed), (addends, got, float(truth))


@extremes
@given(matrices, st.permutations(range(ROWS)), st.lists(st.integers(1, 5), min_size=ROWS, max_size=ROWS))
def test_any_order_and_chunking_gives_the_same_bits(values, order, sizes):
    """Catches float sums, digits that depend on what came before, and padding that counts."""
    expected = bits(chunks(values, [ROWS]))
    assert bits(chunks(values[list(order)], [ROWS])) == expected
    assert bits(chunks(values, sizes)) == expected


@extremes
@given(matrices, st.integers(1, ROWS - 1))
def test_merge_is_the_union(values, cut):
    """Catches merging sums that stand at different bins."""
    parts = chunks(values[:cut], [cut]), chunks(values[cut:], [ROWS])
    assert bits(merge(*parts)) == bits(merge(*parts[::-1])) == bits(chunks(values, [ROWS]))


@extremes
@given(matrices)
def test_matches_rational_arithmetic(values):
    """Catches lost carries, wrong signs of digits and a wrong scale, from 1e-38 to 3e38 with cancellation."""
    check(np.asarray(total(chunks(values, [ROWS]))), values)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_poison(value):
    """Catches a NaN that becomes a number; other coordinates are unharmed, and nothing heals it."""
    values = np.ones((ROWS, WIDTH), np.float32)
    values[4, 1] = value
    acc = add(chunks(values, [3] * 4), jnp.ones((ROWS, WIDTH)))
    assert np.isnan(total(acc)).tolist() == [False, True, False]
    healthy = chunks(np.ones((ROWS, WIDTH), np.float32), [ROWS])
    assert np.isnan(total(merge(acc, healthy))).tolist() == [False, True, False]
    assert float(total(acc)[0]) == 2 * ROWS


def test_denormals_and_negative_zero():
    """Catches 1e-40 read as a large number, and a sum of nothing that is not zero."""
    values = np.zeros((ROWS, WIDTH), np.float32)
    values[:, 0], values[:, 1] = 1e-40, -0.0
    assert np.asarray(total(chunks(values, [ROWS]))).tolist() == [0, 0, 0]
    assert np.asarray(total(exact_sums.zeros(SPEC))).tolist() == [0, 0, 0]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("small", [0.5, 0.75, 2.0**-23 * 0.75, 2.0**-10 * 0.999])
@pytest.mark.parametrize("large", [1.0, 2.0**13, 2.0**23, 2.0**40])
def test_values_at_the_edge_of_a_bin(small, large):
    """Catches digits above a value's own bin: they exist only where the larger value came first."""
    values = np.full((ROWS, WIDTH), small, np.float32)
    values[-1] = large
    first, last = chunks(values, [ROWS - 1, 1]), chunks(values[::-1], [1, ROWS - 1])
    assert bits(first) == bits(last) == bits(chunks(values, [ROWS]))
    check(np.asarray(total(first)), values)


def test_a_larger_bin_arrives_in_the_middle():
    """Catches low bins that are kept although another order would have dropped them."""
    small = np.full((ROWS, WIDTH), 2.0**-30, np.float32)
    large = small.copy()
    large[5] = 2.0**60
    both = np.concatenate([small, large])
    first = bits(chunks(both, [ROWS, ROWS]))
    assert bits(chunks(both[::-1], [ROWS, ROWS])) == first
    assert float(total(chunks(both, [ROWS, ROWS]))[0]) == 2.0**60
    cancelled = np.concatenate([both, -large[5:6]])
    assert bits(chunks(cancelled, [ROWS, ROWS, 1])) == bits(chunks(cancelled[::-1], [ROWS, ROWS, 1]))


def test_long_sums_have_the_words_of_short_ones():
    """Catches words of a long sum that stay where they are under a larger message, or under the 480th."""
    chunks = np.ones((120, 5, 1), np.float32) * np.array([1.0, -0.75, 3e-4], np.float32)
    chunks[60:, :, 1:] *= 2.0**30

    @jax.jit
    def summed(chunks):
        empty = exact_sums.zeros(jax.ShapeDtypeStruct(chunks.shape[2:], jnp.float32))
        acc, _ = jax.lax.scan(lambda acc, chunk: (exact_sums.add(acc, chunk), None), empty, chunks)
        return jax.tree.leaves(exact_sums.merge(acc, empty))

    short, long = summed(chunks), summed(np.tile(chunks, exact_sum.SHORT))
    for x, y in zip(short, long, strict=True):
        np.testing.assert_array_equal(y, np.tile(x, exact_sum.SHORT) if x.ndim else x)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_carries_move_in_time(chunk):
    """Catches a low word that overflows after 511 full digits, and carries that move at another bin."""
    largest = np.nextafter(np.float32(2.0**13), np.float32(0))  # a full digit: 2^13 is the end of a bin
    values = jnp.full((-(-1500 // chunk), chunk, 1), largest)
    acc = exact_sums.zeros(jax.ShapeDtypeStruct((1,), jnp.float32))
    once = jax.jit(lambda acc, x: jax.lax.scan(lambda a, v: (exact_sums.add(a, v), None), acc, x)[0])
    acc = once(acc, values)
    assert Fraction(float(total(acc)[0])) == Fraction(float(np.float32(float(largest) * values.size)))
    raised = add(acc, jnp.full((1, 1), 2.0**30))  # carries move at the next addition, one bin higher
    raised = once(raised, -values)
    assert float(total(raised)[0]) == 2.0**30


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("count", [65, 5000])
def test_many_clients_in_one_chunk(count):
    """Catches int32 overflow past 511 digits of 2^22, and past 4,096 groups' low words; full digits, worst case."""
    values = np.full((count, 1), np.nextafter(np.float32(1.0), np.float32(0)), np.float32)
    spec = jax.ShapeDtypeStruct((1,), jnp.float32)
    once = jax.jit(lambda x: exact_sums.total(exact_sums.add(exact_sums.zeros(spec), x)))(values)
    twice = jax.jit(lambda x: exact_sums.total(exact_sums.add(exact_sums.add(exact_sums.zeros(spec), x[:33]), x[33:])))(
        -values
    )
    truth = count * float(values[0, 0])
    assert abs(float(once[0]) - truth) <= np.spacing(np.float32(truth))
    assert float(twice[0]) == -float(once[0])


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("backend", ["cpu", "other"])
def test_many_messages_have_the_bits_of_few(backend, monkeypatch):
    """Catches a block, padding or carry of its own: on CPU blocks one after the other, elsewhere one reduction."""
    values = np.random.default_rng(0).standard_normal((1100, 3)).astype(np.float32)
    values *= 10.0 ** np.random.default_rng(1).integers(-9, 9, (1100, 1)).astype(np.float32)
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)

    def parts(sizes, add):
        acc, start = exact_sums.zeros(spec), 0
        for size in sizes:
            acc, start = add(acc, values[start : start + size]), start + size
        return np.asarray(total(acc)).tobytes()

    expected = parts([50] * 22, add)
    compiler.alone()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    many = jax.jit(lambda acc, values: exact_sums.add(acc, values))  # compiled for this backend
    assert parts([1100], many) == parts([65, 1035], many) == expected


def test_sums_pass_the_float32_integer_limit():
    """A float32 running sum stops at 2^24; this one does not. Catches a float carry between chunks."""
    block = jnp.full((1024, 1), 16383.0)
    acc = exact_sums.zeros(jax.ShapeDtypeStruct((1,), jnp.float32))
    acc = jax.jit(lambda acc: jax.lax.fori_loop(0, 4096, lambda i, a: exact_sums.add(a, block), acc))(acc)
    assert float(total(acc)[0]) == 16383.0 * 1024 * 4096


def test_float64_keeps_four_bins():
    """Catches a float64 leaf that is summed with float32's two bins."""
    with jax.enable_x64(True):
        values = np.array([1.0, 2.0**-60, -1.0, 1e-3, 2.0**-70])[:, None]
        acc, reverse = (
            add(exact_sums.zeros(jax.ShapeDtypeStruct((1,), jnp.float64)), x) for x in (values, values[::-1])
        )
        assert len(acc.parts[0].low) == 4
        got = total(acc)
        assert got.dtype == jnp.float64
        truth = sum(Fraction(float(x)) for x in values[:, 0])
        assert abs(Fraction(float(got[0])) - truth) <= Fraction(2.0**-69 * 5)
        assert np.asarray(got).tobytes() == np.asarray(total(reverse)).tobytes()


def test_leaves_that_share_a_sum():
    """Catches a leaf that gets another's coordinates, dtype or bins; large ones stand alone between small ones."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = {"a": (2, 3), "b": (tree.MAX_GROUPED_LEAF + 1,), "c": (), "d": (3,), "e": (2,), "f": (0,), "g": (4, 1)}
        dtypes = {"c": "bfloat16", "d": "float64", "e": "float64"}
        values = {
            name: jnp.asarray(rng.normal(size=(5, *shape)) * 10.0 ** rng.integers(-9, 9), dtypes.get(name, "float32"))
            for name, shape in shapes.items()
        }
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values)

        @jax.jit
        def sums(values):
            alone = {
                name: exact_sums.total(exact_sums.add(exact_sums.zeros(spec[name]), x)) for name, x in values.items()
            }
            return exact_sums.total(exact_sums.add(exact_sums.zeros(spec), values)), alone

        together, each = sums(values)
        assert len(exact_sums.zeros(spec).parts) == 3  # float32, float64, and b
        for name, alone in each.items():
            assert together[name].shape == spec[name].shape and together[name].dtype == alone.dtype
            assert np.asarray(together[name]).tobytes() == np.asarray(alone).tobytes(), name


def test_counts_of_devices_keep_their_dtype():
    """Catches counts of several devices that are int64 where JAX counts in 64 bits, and int32 past 2^31."""
    mesh, spec = engine.device_mesh(2), jax.sharding.PartitionSpec()
    counts = {"number": jnp.int32(3), "bytes": jnp.full(4, (1 << 30) + 1, jnp.uint32)}
    combine = jax.shard_map(
        lambda x: exact_sums.combine(x, mesh.axis_names[0]), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with jax.enable_x64(True):
        found = jax.jit(combine)(counts)
    assert found["number"] == 6 and found["number"].dtype == jnp.int32
    assert found["bytes"].tolist() == [(1 << 31) + 2] * 4 and found["bytes"].dtype == jnp.uint32


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("backend", ["cpu", "other"])
@pytest.mark.parametrize("count", [64, 65, 481])
def test_an_empty_leaf_with_a_sum_of_its_own(count, backend, monkeypatch):
    """Catches blocks whose number is worked out from the numbers in a leaf, be it alone in its dtype or not."""
    values = {"a": jnp.ones((count, 2, 0), jnp.bfloat16), "b": jnp.ones((count, tree.MAX_GROUPED_LEAF + 1))}
    with jax.enable_x64(True):
        values["c"] = jnp.ones((count, 0), jnp.float64)
        compiler.alone()
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        acc = exact_sums.zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values))
        found = jax.jit(lambda acc, values: exact_sums.total(exact_sums.add(acc, values)))(acc, values)
    assert found["a"].shape == (2, 0) and found["c"].shape == (0,)
    assert (np.asarray(found["b"]) == count).all()


def test_low_precision_leaves_are_summed_in_float32():
    """bfloat16 sums stop at 256 ones. Catches sums in the leaf's own dtype."""
    acc = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.bfloat16))
    assert float(total(add(acc, jnp.ones(1000, jnp.bfloat16)))) == 1000


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("places", [8, 1], ids=["places", "spread"])
def test_devices_combine_to_the_bits_of_one(places, monkeypatch):
    """Catches a mesh sum that ignores the devices' different bins, poison that is lost, plain leaves added twice."""
    from jax.sharding import PartitionSpec as P

    from fedjax_sim import engine

    monkeypatch.setattr(exact_sums, "MOST_PLACES", places)
    mesh = engine.device_mesh(2)
    values = np.stack([np.full((4, WIDTH), 1e-3), np.full((4, WIDTH), 1e9)]).astype(np.float32)
    values[:, :, 1] = [[-3e38, 1, 1, 1], [1e-30, 1e-38, -1e-20, 0]]
    values[0, 2, 2] = np.nan

    def body(x):
        x = x[0]
        return exact_sums.combine(
            (exact_sums.add(exact_sums.zeros(SPEC), x), x[:, 0].sum(), x.astype(jnp.int32)[0, 0]), "clients"
        )

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("clients"), out_specs=P(), check_vma=False)
    acc, plain, integer = jax.jit(mapped)(values)
    assert np.asarray(total(acc)).tobytes() == np.asarray(total(chunks(values.reshape(-1, WIDTH), [8]))).tobytes()
    assert np.isnan(total(acc)).tolist() == [False, False, True]
    assert float(plain) == float(np.float32(values[:, :, 0].sum())) and int(integer) == 10**9
    alone = jax.shard_map(
        lambda x: exact_sums.combine(x.sum(), "clients"),
        mesh=mesh,
        in_specs=P("clients"),
        out_specs=P(),
        check_vma=False,
    )
    assert float(jax.jit(alone)(jnp.ones(4))) == 4


def test_too_many_messages_at_once_are_refused():
    """Fault: a chunk whose low words overflow, a wrong sum without an error."""
    zeros = exact_sums.zeros(jax.ShapeDtypeStruct((), jnp.float32))
    with refused("messages added at once", value=exact_sums.MAX_CHUNK + 1, rule="integer"):
        exact_sums.add(zeros, jnp.zeros(exact_sums.MAX_CHUNK + 1))
    most = jnp.full(exact_sums.MAX_CHUNK, 0.49999997, jnp.float32)
    assert float(total(add(zeros, most))) == pytest.approx(0.49999997 * exact_sums.MAX_CHUNK, rel=1e-7)


def test_derivatives():
    """Fault: a derivative of zero, as integers have, instead of an error; a wrong float sum."""

    def summed(x):
        carry = exact_sums.zeros(jax.ShapeDtypeStruct((2,), jnp.float32))
        carry = exact_sums.merge(exact_sums.add(carry, x), exact_sums.add(carry, 2 * x))
        return exact_sums.total(carry) @ jnp.array([1.0, 10.0])

    x = jnp.arange(6.0).reshape(3, 2)
    compiled = jax.jit(summed)
    plain = compiled(x)
    for differentiate in (jax.grad(compiled), lambda x: jax.jvp(compiled, (x,), (x,))):
        with pytest.raises(TypeError, match="derivative: expected none"):
            differentiate(x)
    with engine.fast_arithmetic():
        value, slope = jax.jit(jax.value_and_grad(summed))(x)
        np.testing.assert_allclose(value, plain)
        np.testing.assert_allclose(slope, np.tile([3.0, 30.0], (3, 1)))
        zero = barrier.HiddenZero(jnp.int32(0))
        through = lambda x: jnp.sum(barrier.computed_once(engine.rounded_here(x**2, zero), zero))  # noqa: E731
        np.testing.assert_allclose(jax.jit(jax.grad(through))(x), 2 * x)
    assert float(jax.jit(lambda x: summed(x))(x)) == float(plain)  # traced anew


def test_more_messages_than_a_chunk():
    """Catches messages past the first chunk that are lost, or refused."""
    x = np.random.default_rng(0).integers(-(2**20), 2**20, (exact_sums.MAX_CHUNK + 3, 2)).astype(np.float32)
    assert np.array_equal(jax.jit(exact_sums.summed)(jnp.asarray(x)), x.sum(0, dtype=np.float64).astype(np.float32))
    few = jnp.asarray(x[:5] * np.float32(0.1))
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert np.array_equal(exact_sums.summed(few), exact_sums.total(exact_sums.add(exact_sums.zeros(spec), few)))


def test_larger_messages_after_a_merge():
    """Catches a merged sum that counts as empty: a larger message would then raise its bins and leave its words."""
    small = np.tile(np.float32([[1.0, -3.0, 2.5e-3]]), exact_sum.SHORT)  # a long sum, whose words seldom move
    large = np.tile(np.float32([[2.0**40, 1e20, 7.0]]), exact_sum.SHORT)
    first, other = (add(exact_sums.zeros(small[0]), small * np.float32(x)) for x in (1.0, 3.0))
    merged = add(merge(first, other), large)
    at_once = add(exact_sums.zeros(small[0]), np.concatenate([small, small * np.float32(3), large]))
    np.testing.assert_array_equal(total(merged), total(at_once))


@pytest.mark.full
def test_larger_messages_after_one_device():
    """Catches a sum of a mesh of one device that counts as empty, as above."""
    spec = jax.ShapeDtypeStruct((2 * exact_sum.SHORT,), jnp.float32)  # a long sum, whose words seldom move
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("clients",))

    def of_device(messages):
        return exact_sums.combine(exact_sums.add(exact_sums.zeros(spec), messages), "clients")

    here, there = jax.sharding.PartitionSpec("clients"), jax.sharding.PartitionSpec()
    combined = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=here, out_specs=there, check_vma=False))
    total = exact_sums.total(exact_sums.add(combined(jnp.ones((3, *spec.shape))), jnp.full((1, *spec.shape), 2.0**20)))
    assert (np.asarray(total) == 2**20 + 3).all()

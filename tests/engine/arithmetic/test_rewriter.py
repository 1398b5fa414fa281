"""Operations that compilers round in several ways have one rounding in every program."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, engine
from fedjax_sim.engine.arithmetic import barrier, rewriter
from fedjax_sim.engine.jaxpr import walk
from tests.refusals import refused

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 257)).astype(np.float32)
CUT = -(X * Y)  # what is left of x y + CUT is the rounding of x y, if the product was not rounded before it was added
VECTORS, NUMBERS = (X, Y, CUT), (X[0], Y[0], CUT[0])


def fused(x, y, cut):
    return x * y + cut


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("given", [VECTORS, NUMBERS], ids=["vectors", "numbers"])
def test_products_are_not_fused(given):
    """Catches a zero that a compiler of machine code sees through: the product is then fused into the sum."""
    assert np.any(jax.jit(fused)(*given)), "this machine does not fuse, and the test can find nothing"
    rounded = jax.jit(lambda x, y, cut: engine.rounded_here(x * y, x) + cut)
    assert not np.any(rounded(*given))
    assert not np.any(jax.jit(engine.reproducible(fused))(*given))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("known", [False, True])
def test_nor_with_a_source_that_clients_share(known):
    """Catches a source of constants, off which the compiler reads the zero: the arguments then give it."""
    clients = np.stack([X, -X]), np.stack([Y, Y]), np.stack([CUT, -CUT])

    def run(shared, *given):
        return jax.vmap(engine.reproducible(fused, np.ones(3, np.float32) if known else shared))(*given)

    assert np.any(jax.jit(jax.vmap(fused))(*clients)), "this machine does not fuse, and the test can find nothing"
    assert not np.any(jax.jit(run)(X, *clients))


def test_only_exact_products_stay_as_they_are():
    """Catches an exact product, by a large power of two in the program, that is rounded, and another that is not.

    A learning rate of 2 makes the program of other rates (tests/sweeps/test_sweep.py).
    """

    def num_additions(factor):
        return str(jax.make_jaxpr(engine.reproducible(lambda x: x * factor))(X)).count(" add ")

    large = 2.0**23
    expected = {large: 0, -large: 0, 3 * large: 1, 2.0: 1, -1.0: 1, 3.0: 1, 0.5: 1}
    assert {factor: num_additions(factor) for factor in expected} == expected
    assert num_additions(jnp.float32(large) + X[0] * 0) == 1


def test_nor_where_keys_are_all_there_is():
    """Catches a zero that is a constant where no float comes from outside: a sampler gets a key and a counter."""

    def drawn(key):
        return jax.random.uniform(key, (257,)), jax.random.uniform(jax.random.fold_in(key, 1), (257,))

    a, b = (np.asarray(x) for x in drawn(jax.random.key(3)))
    cut = -(a * b)

    def sampled(key, count):
        x, y = drawn(key)
        return x * y + cut

    assert np.any(jax.jit(sampled)(jax.random.key(3), 0)), "this machine does not fuse, and the test can find nothing"
    assert not np.any(jax.jit(engine.reproducible(sampled))(jax.random.key(3), jnp.int32(0)))


def test_sums_have_one_order():
    """Over any axes, with the bits of NumPy adding halves; catches an axis that is left out and a row that is lost."""

    def halves(x):
        while len(x) > 1:
            half = 1 << (len(x) - 1).bit_length() - 1
            x = np.concatenate([x[: len(x) - half] + x[half:], x[len(x) - half : half]])
        return x[0]

    total = jax.jit(engine.reproducible(lambda x, y: (x * y).sum()))(X, Y)
    assert total == halves(X * Y)
    padded = jax.jit(engine.reproducible(lambda x: jnp.pad(x, (0, 1000)).sum()))(X)
    assert padded == halves(X) == rewriter.pairwise_sum(jnp.asarray(X), (0,))
    grid = X[:210].reshape(2, 3, 5, 7)
    for axes in [(0,), (1, 3), (0, 1, 2, 3)]:
        np.testing.assert_allclose(rewriter.pairwise_sum(jnp.asarray(grid), axes), grid.sum(axes), rtol=1e-5, atol=1e-6)
    assert rewriter.pairwise_sum(jnp.zeros((0, 2)), (0,)).tolist() == [0, 0]
    assert rewriter.pairwise_sum(jnp.ones((2, 0)), (0,)).shape == (0,)


def by_constant(x, y, cut):
    return x / 7


def by_number(x, y, cut):
    return x / (1 + jnp.abs(y[0]))


def twice(x, y, cut):
    return x / 3.0 / 7.0


def of_number(x, y, cut):
    return jnp.float32(1) / (x / (2 + y[0]))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("function", [by_constant, by_number, twice, of_number], ids=lambda f: f.__name__)
def test_divisions_are_divisions(function):
    """IEEE's result, which is NumPy's. Catches A / c that becomes A (1 / c), and two divisions that become one."""

    def numpy(x, y, cut):
        with np.errstate(all="ignore"):
            return {
                "by_constant": lambda: x / np.float32(7),
                "by_number": lambda: x / (1 + np.abs(y[0])),
                "twice": lambda: x / np.float32(3) / np.float32(7),
                "of_number": lambda: np.float32(1) / (x / (2 + y[0])),
            }[function.__name__]()

    np.testing.assert_array_equal(jax.jit(engine.reproducible(function))(*VECTORS), numpy(*VECTORS))


SHORT = {
    "cast": lambda x, y: x.astype(jnp.float32) * 3,
    "add": lambda x, y: x + y + x,
    "subtract": lambda x, y: x - y - y,
    "multiply": lambda x, y: x * y + y,
    "divide": lambda x, y: x / y / x,
    "sum": lambda x, y: x.reshape(-1, 1).sum(0) + y,
    "exp": lambda x, y: jnp.exp(x) - y,
    "matmul": lambda x, y: jnp.outer(x, y) @ y + x,
    "cumulative": lambda x, y: jnp.cumsum(x[:4]) + y[:4],
    "scatter": lambda x, y: x.at[jnp.arange(256) // 2].add(y) + x,
}


def short(name, dtype, x, y):
    return SHORT[name](x.astype(dtype) * 0.3, y.astype(dtype)).astype(jnp.float32)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((jnp.bfloat16, name) for name in SHORT), (jnp.float16, "divide"), (jnp.float16, "scatter")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_short_floats_are_short(dtype, name):
    """Each operation's result has 16 bits, as it has alone. Catches a result that keeps the 32 it was computed in."""
    found, given = functools.partial(short, name, dtype), [jnp.asarray(x[:256]) for x in (X, Y)]
    np.testing.assert_array_equal(jax.jit(engine.reproducible(found))(*given), found(*given))
    assert np.any(jax.jit(found)(*given) != found(*given)), "here nothing is kept, and the test can find nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_of_a_barrier_is_no_program_to_rewrite(dtype):
    """Catches barriers inside the loops of barriers, and results of such a loop that are rounded again."""

    def held_back(x):
        return barrier.computed_once({"x": x, "n": jnp.arange(3)}, x)

    rewritten = engine.reproducible(lambda x: engine.reproducible(held_back)(x))
    counts = [
        collections.Counter(x.primitive.name for x in walk(jax.make_jaxpr(function)(jnp.ones(3, dtype))))
        for function in (held_back, rewritten)
    ]
    for name in ("while", "optimization_barrier", "add", "bitcast_convert_type"):
        assert counts[0][name] == counts[1][name], name


def test_short_floats_in_refs():
    """Catches a reference that is rounded as if it were an array."""

    def tripled(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 3
        return ref[...]

    x = jnp.arange(4, dtype=jnp.bfloat16)
    assert jax.jit(engine.reproducible(tripled))(x).tolist() == [0, 3, 6, 9]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_what_devices_share_stays_shared(dtype):
    """A sum over devices of which every one has the whole. Catches a zero of each device's own in it."""
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], "d"), jax.sharding.PartitionSpec
    shared = jax.shard_map(
        lambda x, y: jax.lax.psum(x * y, "d") * y, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec()
    )
    x, y = jnp.arange(3, dtype=dtype), jnp.full(3, 2, dtype)
    assert jax.jit(engine.reproducible(shared))(x, y).tolist() == [0, 4, 8]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("shape", [(7,), (1, 7, 1), (64, 3)])
@pytest.mark.parametrize("steady", [True, False])
def test_quotients_of_two_broadcasts(shape, steady):
    """Catches a reciprocal of two scalars that are broadcast before they are divided."""

    def quotient(x, y):
        divide = jnp.divide if steady else rewriter.divide
        return divide(jnp.full(shape, x), jnp.full(shape, y))

    found = jax.jit(engine.reproducible(quotient) if steady else quotient)
    for x, y in [(1e6, 1e9), (1.0, 49.0), (3.0, 7e5)]:
        assert np.all(found(jnp.float32(x), jnp.float32(y)) == np.float32(x) / np.float32(y)), (x, y)
        assert np.all(jax.jit(lambda x, y=y: found(x, jnp.float32(y)))(x) == np.float32(x) / np.float32(y)), (x, y)


def test_the_compiler_has_a_choice():
    """Guards the test above: without `reproducible`, some quotient is another one."""
    assert (np.asarray(jax.jit(by_constant)(*VECTORS)) != X / np.float32(7)).any()


def test_programs_inside_of_programs():
    """Divisions in loops, branches, calls, derivatives and batches. Catches an inner program that is left as it was."""

    @jax.custom_vjp
    def third(x):
        return x / 3

    third.defvjp(lambda x: (third(x), None), lambda _, g: (g / 3,))

    def inside(x):
        looped = jax.lax.fori_loop(0, 2, lambda i, x: x / 3, x)
        scanned = jax.lax.scan(lambda c, _: (c / 3, c), x, None, length=2)[0]
        branch = jax.lax.cond(x.sum() > -1e9, lambda x: x / 9, lambda x: x, x)
        called = jax.jit(lambda x: x / 9)(x)
        again = jax.checkpoint(lambda x: x / 9)(x)
        slope = jax.grad(lambda x: (third(x) * x).sum())(x)
        while_loop = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] / 3), (0, x))[1]
        return looped, scanned, branch, called, again, jax.vmap(lambda x: x / 9)(x), while_loop, third(third(x)), slope

    out = jax.jit(jax.vmap(engine.reproducible(inside)))(X[None])
    for place, x in enumerate(out[:-1]):
        expected = X / np.float32(3) / np.float32(3) if place in (0, 1, 6, 7) else X / np.float32(9)
        np.testing.assert_array_equal(x[0], expected, err_msg=str(place))
    np.testing.assert_array_equal(out[-1][0], X / np.float32(3) + X / np.float32(3))


def solved(x):
    """Programs in a named tuple."""
    return jnp.linalg.solve(jnp.eye(3) + jnp.outer(x, x), x)


def filtered(x):
    """Complex numbers, the only argument of inner programs."""
    return jnp.fft.irfft(jax.jit(lambda c: c * c / 3)(jnp.fft.rfft(x)), 3)


def narrow(x):
    """Integers without bits of their own."""
    return jax.jit(lambda n: n.astype(jnp.float32))(jnp.round(x).astype(jnp.int4)) * x / 3


def conjugate(x):
    return jax.scipy.sparse.linalg.cg(lambda v: v * 2 + x.sum() * 0, x)[0]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("function", [solved, filtered, narrow, conjugate], ids=lambda f: f.__name__)
def test_what_users_call(function):
    """Catches a program that cannot be rewritten, or computes something else afterwards, its derivative too."""
    x = jnp.asarray(X[:3])
    for f in (function, jax.grad(lambda x: (function(x) ** 2).sum())):
        np.testing.assert_allclose(jax.jit(engine.reproducible(f))(x), jax.jit(f)(x), rtol=1e-5, atol=1e-6)


def test_long_sums_take_no_memory():
    """Distances of all pairs. Catches a sum by halves that stores addends, which the compiler never does."""

    def distances(u):
        return ((u[:, None] - u[None]) ** 2).sum(-1)

    u = jax.ShapeDtypeStruct((64, 5000), jnp.float32)
    assert jax.jit(engine.reproducible(distances)).lower(u).compile().memory_analysis().temp_size_in_bytes < 1 << 20


def test_nothing_else_changes():
    """Keys, integers, booleans, low precision, empty results. Catches a dtype that cannot pass and a lost result."""

    def mixed(key, x, n):
        half = (x.astype(jnp.bfloat16) / 3).astype(jnp.float16) / 5
        draws = jax.random.normal(key, (4,)) / 3
        sums = {"n": n // 2 + n % 3, "b": n > 1, "none": None, "empty": jnp.zeros((0, 2)) / 2}
        return jax.random.fold_in(key, 1), half, draws, sums, optax.adam(0.1).update(x, optax.adam(0.1).init(x), x)

    given = jax.random.key(0), jnp.asarray(X), jnp.int32(7)
    steady = engine.reproducible(mixed)
    expected, found = jax.jit(mixed)(*given), jax.jit(steady)(*given)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-2 if a.itemsize == 2 else 1e-6
        )


def test_derivatives():
    """Of a quotient; of a part of a round where it is asked for, and an error elsewhere. Catches a slope of 0, as bits
    have it."""
    slopes = jax.grad(lambda a, b: rewriter.divide(a, b) ** 2, argnums=(0, 1))(jnp.float32(3), jnp.float32(4))
    assert slopes == (2 * 3 / 4**2, -2 * 3**2 / 4**3)
    assert jax.grad(lambda x: rewriter.divide(x, jnp.arange(1.0, 3.0)).sum())(1.0) == 1.5
    with engine.fast_arithmetic():
        assert jax.grad(lambda x: engine.reproducible(lambda x: x / 4)(x))(1.0) == 0.25
    with refused("derivative", hint="engine.fast_arithmetic", kind=InvalidType):
        jax.grad(lambda x: engine.reproducible(lambda x: x / 4)(x))(1.0)


def test_quotients_of_any_size():
    """Catches a reciprocal on the way: that of 3e38 is no normal number, and 49 / 49 would be 0.99999994."""
    a = np.array([3e38, 49, 1e-30, 0, np.inf, np.nan, -5], np.float32)
    b = np.array([3e38, 49, 1e-30, 5, 2, 1, np.inf], np.float32)
    np.testing.assert_array_equal(jax.jit(rewriter.divide)(a, b), a / b)

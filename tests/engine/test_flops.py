"""Operations of traced programs: by hand, and against XLA's own count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.engine.arithmetic import barrier

X, Y = jnp.ones((2, 3)), jnp.ones((3, 4))


def counted(function, *arguments, turns=1):
    return engine.flops(jax.make_jaxpr(function)(*arguments), turns)


def test_products_by_hand():
    """Catches a product that counts half, a batch or a group of a convolution that is left out, moves that count."""
    assert counted(jnp.matmul, X, Y) == 2 * 2 * 3 * 4
    assert counted(jax.vmap(jnp.matmul), jnp.ones((5, 2, 3)), jnp.ones((5, 3, 4))) == 5 * 48
    image, kernel = jnp.ones((2, 6, 8, 8)), jnp.ones((4, 3, 5, 5))  # two groups of three channels, 4 x 4 places

    def convolution(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", feature_group_count=2)

    assert counted(convolution, image, kernel) == 2 * (2 * 4 * 4 * 4) * (3 * 5 * 5)
    assert counted(lambda x: jnp.concatenate([x.T, x.T])[::2].astype(jnp.bfloat16), X) == 0
    assert counted(lambda x: x.sum(), X) == 6 and counted(lambda x: x.argsort(), jnp.arange(3)) == 0


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("stride, padding, size", [(1, "SAME", 8), (2, "VALID", 9), (2, "SAME", 8), (4, "VALID", 16)])
def test_convolutions_and_their_gradients(stride, padding, size):
    """Products by a loop over places and taps, a gradient's too. Catches zeros of padding, and those between the places
    of a strided one's gradients, as products: 8.5 times as many."""
    image, kernel = jnp.ones((3, size, size, 4)), jnp.ones((4, 4, 4, 6))

    def convolution(kernel, image):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (stride, stride), padding, dimension_numbers=layout)

    out = jax.eval_shape(convolution, kernel, image).shape
    before = max((out[1] - 1) * stride + 4 - size, 0) // 2
    inside = sum(0 <= o * stride + k - before < size for o in range(out[1]) for k in range(4))
    products = inside**2 * 3 * 4 * 6
    assert counted(convolution, kernel, image) == 2 * products

    def gradients(kernel, image):
        return jax.vjp(convolution, kernel, image)[1](jnp.ones(out))

    assert counted(gradients, kernel, image) == 4 * products


def test_any_convolution():
    """200 of one dimension, of which a loop over places, taps and numbers counts the products; one of 10^10 at once.
    Catches strides, dilations and padding, below 0 too, that are mixed up, and a count that takes as long as these."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        size, taps, stride, spread, hop = rng.integers(1, [9, 5, 6, 6, 4])
        padding = before, after = rng.integers(-2, 5, 2).tolist()
        places = range((max(before + after + (size - 1) * spread - (taps - 1) * hop, -1) // stride) + 1)
        if before + (size - 1) * spread + 1 + after < 0:
            continue
        meets = {
            (i, k)
            for i in range(size)
            for k in range(taps)
            for o in places
            if o * stride + k * hop - before == i * spread
        }
        options = {"lhs_dilation": [spread], "rhs_dilation": [hop]}

        def convolution(x, k, window=(stride,), pads=(padding,), options=options):
            return jax.lax.conv_general_dilated(x, k, window, pads, **options)

        found = counted(convolution, jnp.ones((2, 3, size)), jnp.ones((4, 3, taps)))
        assert found == 2 * (2 * 3 * 4) * len(meets), (size, taps, stride, spread, hop, padding)
    narrow = {"lhs_dilation": [np.int8(3)], "rhs_dilation": [np.int8(2)]}  # 49 * 3 is past an int8
    same = {name: [int(x[0])] for name, x in narrow.items()}
    x, k = jnp.ones((2, 3, 50)), jnp.ones((4, 3, 3))
    found = [
        counted(lambda x, k, o=o, s=s: jax.lax.conv_general_dilated(x, k, (s,), [(3, 2)], **o), x, k)
        for o, s in ((narrow, np.int8(2)), (same, 2))
    ]
    assert found[0] == found[1] == 3552
    long = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    assert counted(jnp.convolve, long, long) == 2 * 100_000**2


def test_what_nobody_reads_is_free():
    """Catches a forward pass that counts although only its shape was wanted, inside of an inner function too."""

    @jax.jit
    def pair(x, y):
        return x @ y, x + 1

    assert counted(lambda x, y: pair(x, y)[1], X, Y) == 6
    assert counted(lambda x, y: (x @ y, y)[1], X, Y) == 0


def test_what_nobody_reads_in_loops_is_free():
    """Catches a carry that only itself reads, results of a turn or a branch that are thrown away, work before a call or
    a barrier for a result of it that is not read; and a carry that another one needs and is left out."""
    square = jnp.ones((3, 3))

    def both(carry, _):
        return (carry[0] + 1, carry[1] @ carry[1]), carry[1] @ carry[1]

    def crossed(carry, _):
        return (carry[0] + carry[1], carry[2], carry[2] @ carry[2]), None

    def scanned(body, carry):
        return lambda x: jax.lax.scan(body, (x,) * carry, None, length=5)[0][0]

    assert counted(scanned(both, 2), square) == 5 * 9 and counted(scanned(crossed, 3), square) == 5 * (9 + 54)
    assert counted(lambda x: jax.lax.scan(both, (x, x), None, length=5)[1], square) == 5 * 2 * 54

    def repeated(x, n):
        return jax.lax.fori_loop(0, n, lambda i, carry: both(carry, i)[0], (x, x @ x))

    assert [counted(lambda x, n, i=i: repeated(x, n)[i], square, 3, turns=4) for i in (0, 1)] == [36, 54 + 4 * 54]

    def until(x):  # what decides whether a loop goes on is read
        return jax.lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0] + 1, c[1] @ c[1]), (x, x))[0]

    assert counted(until, square) == 9 + 54 + 9

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ x, x + 1), lambda x: (x, x @ x @ x), x)

    assert [counted(lambda x, i=i: branch(x)[i], square) for i in (0, 1)] == [54, 108]
    for call in (jax.jit, jax.checkpoint):
        assert counted(lambda x, call=call: call(lambda x, y: (x + 1, y + 1))(x, x @ x)[0], square) == 9
    assert counted(lambda x: barrier.computed_once((x, x @ x), x[0, 0])[0], square) == 0


def test_loops_by_hand():
    """Catches a loop of known length that counts once, and turns of an inner loop that count as those of the outer."""
    square = jnp.ones((3, 3))

    def fixed(x):
        return jax.lax.fori_loop(0, 20, lambda i, x: x @ x, x)

    def open_ended(x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: fixed(x) @ x, x) + 1

    assert counted(fixed, square) == 20 * 54
    assert [counted(open_ended, square, 3, turns=turns) - 9 for turns in (0, 1, 2)] == [0, 21 * 54, 42 * 54]

    def inside(x, n):  # loops in a loop turn once
        return jax.lax.fori_loop(0, n, lambda i, x: jax.lax.fori_loop(0, n, lambda i, x: x @ x, x), x)

    assert [counted(inside, square, 3, turns=turns) for turns in (0, 1, 2)] == [0, 54, 108]
    either = counted(lambda x, yes: jax.lax.cond(yes, lambda x: x @ x, lambda x: x + x, x), square, True)
    assert either == 54


def test_barriers_are_free():
    """Catches the loop that never turns as work of its own."""
    assert counted(lambda x: barrier.computed_once(x, x) + x, X) == 6


def test_as_xla_counts():
    """Gradients of an MLP agree with XLA's cost analysis to a tenth. Catches a primitive that is forgotten."""
    params = [jnp.ones((60, 32)), jnp.ones(32), jnp.ones((32, 10))]

    def loss(params, x):
        hidden = jax.nn.relu(x @ params[0] + params[1][None])
        return jax.nn.logsumexp(hidden @ params[2], axis=1).mean()

    program = jax.grad(loss)
    xla = jax.jit(program).lower(params, jnp.ones((10, 60))).cost_analysis()
    ours = counted(program, params, jnp.ones((10, 60)))
    assert abs(ours / (xla["flops"] + xla.get("transcendentals", 0)) - 1) < 0.1

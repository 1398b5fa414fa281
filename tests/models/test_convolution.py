"""Convolutions against NumPy in float64, and the programs that they become."""

import importlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_sim import algorithms, engine, models, population, sampling
from fedjax_sim.engine.jaxpr import walk
from fedjax_sim.models import layers
from fedjax_sim.models.convolution import Geometry, convolve, im2col, xla_convolution
from fedjax_sim.running.fingerprint import is_opaque, program_digest
from fedjax_sim.sweeps.traced_hyperparameters import traced_program
from tests.models.test_layers import noise, same

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
# Image, kernel, channels in and out, strides, padding, dilation of the image and of the kernel, groups.
CASES = {
    "same, odd": ((7, 6), (3, 3), 2, 4, (1, 1), "SAME", None, None, 1),
    "strided, even, unused last row": ((8, 7), (2, 3), 2, 3, (2, 3), "VALID", None, None, 1),
    "transposed, dilated, grouped": ((5, 4), (3, 2), 4, 6, (2, 1), ((2, 2), (1, 0)), (2, 1), (1, 2), 2),
    "one axis": ((9,), (4,), 3, 5, (2,), "SAME", None, (2,), 1),
    "depthwise": ((7, 7), (3, 3), 6, 12, (2, 2), "SAME", None, None, 6),
    "three axes": ((5, 4, 6), (2, 3, 3), 2, 3, (1, 2, 1), "SAME", None, None, 1),
    "one pixel": ((4, 5), (1, 1), 3, 4, (2, 1), "VALID", None, None, 1),
    "cut by negative padding": ((7, 6), (3, 3), 2, 2, (1, 1), ((-1, 0), (1, -1)), None, None, 1),
    "upsampled": ((5, 6), (3, 3), 2, 4, (1, 1), ((2, 2), (1, 0)), (2, 3), None, 1),
}


@pytest.fixture(autouse=True)
def any_channels(monkeypatch):
    """Few channels take the canonical form, too, so that small arrays test it."""
    monkeypatch.setattr(importlib.import_module("fedjax_sim.models.convolution"), "MIN_CANONICAL_CHANNELS", 1)


def window(padded, shift, strides, dilation, out):
    """The numbers of padded images that the kernel's number at `shift` meets."""
    axes = zip(shift, strides, dilation, out, strict=True)
    return padded[(slice(None), *(slice(i * d, i * d + (o - 1) * s + 1, s) for i, s, d, o in axes))]


def in_float64(x, kernel, y, strides, pads, image_dilation, kernel_dilation, groups):
    """The output, and the gradients of images and kernel for a gradient y of the output."""
    x, kernel, y = (np.asarray(a, np.float64) for a in (x, kernel, y))
    n, *sizes, _ = x.shape
    spans = [(size - 1) * step + 1 for size, step in zip(sizes, image_dilation, strict=True)]
    margin = max(abs(pad) for pads_of_axis in pads for pad in pads_of_axis)
    # Numbers outside of the padded images are never met, so a common margin is enough.
    wide = np.zeros((n, *(span + 2 * margin for span in spans), x.shape[-1]))
    axes = zip(spans, image_dilation, strict=True)
    places = (slice(None), *(slice(margin, margin + span, step) for span, step in axes))
    wide[places] = x
    cut = tuple(slice(margin - low, margin + span + high) for span, (low, high) in zip(spans, pads, strict=True))
    padded, wide_gradient = wide[(slice(None), *cut)], np.zeros_like(wide)
    padded_gradient = wide_gradient[(slice(None), *cut)]
    out, kernel_gradient = np.zeros_like(y), np.zeros_like(kernel)
    split = lambda a: a.reshape(*a.shape[:-1], groups, -1)  # noqa: E731
    for shift in np.ndindex(kernel.shape[: len(sizes)]):
        met = (shift, strides, kernel_dilation, y.shape[1:-1])
        inputs, weights = window(padded, *met), split(kernel[shift])
        out += np.einsum("...gi,igo->...go", split(inputs), weights).reshape(out.shape)
        window(padded_gradient, *met)[...] += np.einsum("...go,igo->...gi", split(y), weights).reshape(inputs.shape)
        rows = (split(a).reshape(-1, groups, a.shape[-1] // groups) for a in (inputs, y))
        gradient = np.einsum("pgi,pgo->igo", *rows)
        kernel_gradient[shift] = gradient.reshape(kernel.shape[-2:])
    return out, wide_gradient[places], kernel_gradient


@pytest.mark.default_rows("same, odd", "transposed, dilated, grouped")
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(case):
    """Values and both gradients, of one client, of clients under a `vmap`, and of clients that share a kernel.

    Catches a kernel that is not turned around, lopsided padding, strides and dilations exchanged, groups mixed up.
    """
    image, kernel, num_inputs, num_outputs, strides, padding, image_dilation, kernel_dilation, groups = CASES[case]
    options = {"window_strides": strides, "padding": padding, "lhs_dilation": image_dilation}
    options |= {"rhs_dilation": kernel_dilation, "feature_group_count": groups}
    options["dimension_numbers"] = LAYOUTS[len(image)]
    x, k = noise(0, 2, 3, *image, num_inputs), noise(1, 2, *kernel, num_inputs // groups, num_outputs)
    convolution = lambda x, k: models.conv_general_dilated(x, k, **options)  # noqa: E731
    y = noise(2, *jax.eval_shape(jax.vmap(convolution), x, k).shape)

    def values(x, k, y):
        out, gradients = jax.vjp(convolution, x, k)
        return out, *gradients(y)

    @jax.jit
    def of_all(x, k, y):
        return values(x[0], k[0], y[0]), jax.vmap(values)(x, k, y), jax.vmap(values, (0, None, 0))(x, k[0], y)

    alone, own, shared = of_all(x, k, y)
    ones = (1,) * len(image)
    image_dilation, kernel_dilation = image_dilation or ones, kernel_dilation or ones
    if isinstance(padding, str):
        spans = [(size - 1) * step + 1 for size, step in zip(kernel, kernel_dilation, strict=True)]
        padding = jax.lax.padtype_to_pads(image, spans, strides, padding)
    facts = (strides, padding, image_dilation, kernel_dilation, groups)
    for i, kernel_of in ((0, 0), (1, 1), (1, 0)):
        expected = in_float64(x[i], k[kernel_of], y[i], *facts)
        found = [own if kernel_of == i else shared] + [alone] * (i == 0)
        for results in found:
            for got, right in zip(results, expected, strict=True):
                got = got if results is alone else got[i]
                assert np.abs(got - right).max() <= 2e-6 * np.abs(right).max()


@pytest.mark.parametrize("image", [(1, 1), (2, 2), (1, 5), (2, 0)])
def test_kernels_larger_than_their_images(image):
    """Catches a row of the kernel that meets padding alone, as in the last stages of a network, and empty results."""
    x, k = noise(0, 2, *image, 3), noise(1, 5, 5, 3, 4)
    options = {"window_strides": (2, 2), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def values(convolution):
        squares = lambda x, k: (convolution(x, k, **options) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(squares, (0, 1)))(x, k)

    got, right = values(models.conv_general_dilated), values(jax.lax.conv_general_dilated)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, right)


def test_layouts_and_groups_of_examples():
    """Catches axes of a layout that are exchanged, and outputs of another group of examples."""
    x, k = noise(0, 3, 6, 4, 5), noise(1, 3, 2, 6, 3)
    options = [
        {"dimension_numbers": ("CHNW", "IWOH", "WNCH"), "window_strides": (1, 2), "padding": "SAME"},
        {"dimension_numbers": ("CWNH", "IWOH", "NCHW"), "window_strides": (2, 1), "padding": "VALID"},
    ]
    for batch_groups in (1, 2):
        for some in options:
            some = some | {"batch_group_count": batch_groups}
            both = models.conv_general_dilated, jax.lax.conv_general_dilated
            got, right = (jax.jit(partial(f, **some))(x, k) for f in both)
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_one_client_has_canonical_convolutions():
    """Also clients that share a kernel. Clients with their own have none.

    Catches the gradients that JAX derives, which take 20 times as long in a loop, and grouped convolutions.
    """
    x, k = noise(0, 2, 4, 8, 8, 3), noise(1, 2, 3, 3, 3, 5)
    gradient = jax.grad(lambda x, k: (layers.convolution({"kernel": k, "bias": k[0, 0, 0]}, x) ** 2).sum(), (0, 1))

    def layouts(function, *args):
        found = [e for e in walk(jax.make_jaxpr(function)(*args)) if e.primitive is jax.lax.conv_general_dilated_p]
        return [(*map(tuple, e.params["dimension_numbers"]), e.params["feature_group_count"]) for e in found]

    canonical = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2), 1)
    along_width = ((0, 2, 1), (2, 1, 0), (0, 2, 1), 1)  # for each row of the kernel, its gradient
    assert sorted(layouts(gradient, x[0], k[0]), key=str) == 3 * [along_width] + 2 * [canonical]
    assert layouts(jax.vmap(gradient), x, k) == []
    assert layouts(jax.vmap(layers.convolution, (None, 0)), {"kernel": k[0], "bias": k[0, 0, 0, 0]}, x) == [canonical]


def test_few_channels_are_columns(monkeypatch):
    """Catches the canonical form of an image's own channels, which took three times as long."""
    monkeypatch.undo()

    def convolutions(channels):
        x, k = jnp.ones((2, 8, 8, channels)), jnp.ones((3, 3, channels, 4))
        program = jax.make_jaxpr(lambda x, k: layers.convolution({"kernel": k, "bias": k[0, 0, 0]}, x))(x, k)
        return sum(e.primitive is jax.lax.conv_general_dilated_p for e in walk(program))

    assert (convolutions(3), convolutions(32)) == (0, 1)


def test_operations_are_counted_as_those_of_lax():
    """Catches padding of a gradient that is counted as work."""
    x, ones = noise(0, 2, 7, 6, 4), (1, 1)
    for strides, groups in (((1, 1), 1), ((2, 1), 2)):
        k = noise(1, 3, 3, 4 // groups, 6)
        pads = tuple(jax.lax.padtype_to_pads((7, 6), (3, 3), strides, "SAME"))
        geometry = Geometry(
            image=(7, 6),
            kernel=(3, 3),
            strides=strides,
            pads=pads,
            image_dilation=ones,
            kernel_dilation=ones,
            groups=groups,
        )
        counts = [
            engine.flops(jax.make_jaxpr(jax.grad(lambda x, k, f=f, facts=geometry: f(x, k, facts).sum(), (0, 1)))(x, k))
            for f in (convolve, xla_convolution, im2col)
        ]
        assert counts[0] == counts[1] < counts[2]


def test_forward_mode_is_refused():
    """Catches a derivative that is silently zero or naively slow."""
    x, k = noise(0, 1, 4, 4, 1), noise(1, 3, 3, 1, 1)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: layers.convolution({"kernel": k, "bias": k[0, 0, 0]}, x), (x,), (x,))


def test_a_bias_has_its_gradient_from_a_product():
    """Catches a sum over all pixels in a fixed order, which takes a tenth of a round."""
    params, x = {"kernel": noise(0, 3, 3, 2, 4), "bias": noise(1, 4)}, noise(2, 3, 9, 8, 2)
    y = noise(3, 3, 9, 8, 4)
    gradient = lambda params: jax.vjp(lambda params: layers.convolution(params, x), params)[1](y)[0]["bias"]  # noqa: E731
    assert "reduce_sum" not in str(jax.make_jaxpr(gradient)(params))
    right = np.asarray(y, np.float64).sum((0, 1, 2))
    assert np.abs(jax.jit(gradient)(params) - right).max() <= 2e-6 * np.abs(right).max()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax(kind):
    """Catches an argument of Flax that is not understood."""
    x = noise(0, 2, 6, 5, 2)
    options = {"strides": (2, 1), "kernel_dilation": (1, 2), "feature_group_count": 2}

    def values(**more):
        if kind == "linen":
            layer = nn.Conv(4, (3, 2), **options, **more)
            params = layer.init(jax.random.key(0), x)
            return jax.jit(jax.value_and_grad(lambda params: (layer.apply(params, x) ** 2).sum()))(params)
        layer = nnx.Conv(2, 4, (3, 2), **options, **more, rngs=nnx.Rngs(0))
        return nnx.jit(nnx.value_and_grad(lambda layer: (layer(x) ** 2).sum()))(layer)

    got, right = values(conv_general_dilated=models.conv_general_dilated), values()
    same(jax.tree.leaves(got), jax.tree.leaves(right))


def test_a_sharded_result_is_refused():
    """Catches a sharding that is ignored."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="out_sharding: expected None"):
        models.conv_general_dilated(
            jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2)), (1,), "SAME", out_sharding=jax.sharding.PartitionSpec()
        )


def cnn_round(mesh=None, channels=(4, 8)):
    """FedAvg of a small network, its initial parameters and its clients."""
    model = models.cnn(input_shape=(8, 8), num_outputs=3, channels=channels)
    loss = models.supervised(model, models.softmax_cross_entropy)
    rows = {"x": np.asarray(noise(0, 7 * 6, 8, 8)), "y": np.arange(7 * 6, dtype=np.int32) % 3}
    people = population.stored(rows, np.arange(8) * 6)
    work = {"num_steps": 2, "batch_size": 3, "mesh": mesh}
    made = algorithms.fedavg(loss, sampling.uniform(7, 5), optax.sgd(0.1), **work)
    return made, model.init(jax.random.key(1))[0], people


def test_programs_are_known():
    """Catches rules of a `vmap` that count as a part of the program: these are other objects in each trace."""
    assert not is_opaque(program_digest(*cnn_round(channels=(2,))))
    geometry = Geometry(
        image=(4, 4),
        kernel=(3, 3),
        strides=(1, 1),
        pads=((0, 0), (0, 0)),
        image_dilation=(1, 1),
        kernel_dilation=(1, 1),
    )
    x, k = noise(0, 1, 4, 4, 1), noise(1, 3, 3, 1, 1)
    traces = [traced_program(lambda x, k, c=c: c * convolve(x, k, geometry), x, k) for c in (0.5, 0.7)]
    assert traces[0][0].kind == traces[1][0].kind


@pytest.mark.full
def test_same_bits_on_two_devices():
    """Catches a convolution that XLA splits by the number of devices."""
    digests = []
    for num_devices in (1, 2):
        made, params, people = cnn_round(engine.device_mesh(num_devices))
        one_round = jax.jit(made.step, compiler_options=engine.compiler_options())
        state, info = one_round(jax.random.key(2), jax.jit(made.init)(jax.random.key(3), params, people), people)
        digests.append([np.asarray(x).tobytes() for x in jax.tree.leaves((made.params(state), info))])
    assert digests[0] == digests[1]

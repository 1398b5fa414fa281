"""This module computes convolutions, so that they are fast in loops and where every client has its own weights.

XLA:CPU is fast at convolutions in its canonical form: images [n, *sizes, channels], kernels [*sizes, in, out]. It
brings other forms into this form in a program's outermost computation only. The gradients that JAX derives have other
forms. Inside of a loop or a branch they become plain loops, 20 times slower. So the gradients are written here, as
canonical convolutions.

Let F(x, k) be the convolution, G(y, k) the gradient with respect to the images x, and H(x, y) the gradient with respect
to the kernel k, for a gradient y of the output. Each is linear in both arguments, and
<F(x, k), y> = <x, G(y, k)> = <k, H(x, y)>. So the derivatives of each function are the other two, to any order.

Under a `vmap` over kernels XLA computes a grouped convolution, which is slow. There a convolution is a matrix product.
It is one for few channels, too.

References: Chellapilla, Puri and Simard 2006 (im2col).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array
from fedjax_sim.validate import fail

Sizes = tuple[int, ...]
MAX_CANONICAL_AXES = 2  # XLA:CPU takes 2 to 3 times as long as `im2col` for three spatial axes
MIN_CANONICAL_CHANNELS = 32  # and up to three times as long for few channels, such as those of images


class Geometry(NamedTuple):
    """The static facts of a convolution of images [n, *image, in] with a kernel [*kernel, in / groups, out].

    Each tuple has an entry for each spatial axis.
    """

    image: Sizes
    kernel: Sizes
    strides: Sizes
    pads: tuple[tuple[int, int], ...]  # zeros before and behind the dilated image; negative numbers cut it
    image_dilation: Sizes  # distance of the image's numbers, with zeros between them
    kernel_dilation: Sizes  # distance of the kernel's numbers
    groups: int = 1  # of channels; an output reads the channels of its own group
    precision: Any = None  # of products, as in JAX

    @property
    def out(self) -> Sizes:
        """The spatial sizes of the output."""
        axes = zip(self._image_span, self.pads, self._kernel_span, self.strides, strict=True)
        return tuple((image + low + high - kernel) // stride + 1 for image, (low, high), kernel, stride in axes)

    @property
    def of_image_gradient(self) -> Geometry:
        """The geometry of G(y, k): y are its images, and the stride is the distance of their numbers."""
        axes = zip(self._image_span, self.pads, self._kernel_span, self._out_span, strict=True)
        pads = tuple((kernel - 1 - low, image + low - out) for image, (low, _), kernel, out in axes)
        return self._replace(image=self.out, strides=self.image_dilation, image_dilation=self.strides, pads=pads)

    @property
    def of_kernel_gradient(self) -> Geometry:
        """The geometry of H(x, y): y is its kernel, and the stride is the distance of its numbers."""
        axes = zip(self._image_span, self.pads, self._kernel_span, self._out_span, strict=True)
        pads = tuple((low, out + kernel - 1 - image - low) for image, (low, _), kernel, out in axes)
        return self._replace(kernel=self.out, strides=self.kernel_dilation, kernel_dilation=self.strides, pads=pads)

    @property
    def without_first_axis(self) -> Geometry:
        """The same convolution along all spatial axes but the first."""
        return Geometry._make([*(facts[1:] for facts in self[:6]), *self[6:]])

    @property
    def _image_span(self) -> Sizes:
        return _span(self.image, self.image_dilation)

    @property
    def _kernel_span(self) -> Sizes:
        return _span(self.kernel, self.kernel_dilation)

    @property
    def _out_span(self) -> Sizes:
        return _span(self.out, self.strides)


def _span(sizes: Sizes, distances: Sizes) -> Sizes:
    """Returns the lengths of axes of `sizes` numbers that stand at these distances from each other."""
    return tuple((size - 1) * distance + 1 for size, distance in zip(sizes, distances, strict=True))


# ---- two ways to compute a convolution


def xla_convolution(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """Computes the convolution of x [n, *image, in] with a kernel [*kernel, in / groups, out] by XLA.

    Its gradients are those that JAX derives. If kernels are vmapped, it becomes a grouped convolution.

    Args:
      x: [n, *image, in].
      kernel: [*kernel, in / groups, out].
      geometry: the facts of the convolution, which fit both shapes.
    """
    rank = x.ndim
    image_axes = (0, rank - 1, *range(1, rank - 1))
    kernel_axes = (rank - 1, rank - 2, *range(rank - 2))
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        geometry.strides,
        geometry.pads,
        lhs_dilation=geometry.image_dilation,
        rhs_dilation=geometry.kernel_dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(image_axes, kernel_axes, image_axes),
        feature_group_count=geometry.groups,
        precision=geometry.precision,
    )


def im2col(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """Computes the same convolution as a matrix product for each group of channels.

    The inputs of each output pixel are gathered by slices and one concatenation, and multiplied by the kernel. The
    gradient is written by hand and has reverse mode only. For `jax.jvp`, and Hessian-vector products that use it, take
    `xla_convolution`.

    Args:
      x, kernel, geometry: as in `xla_convolution`.
    """
    edges = ((0, 0), *geometry.pads, (0, 0))
    distances = (1, *geometry.image_dilation, 1)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(*pad, step - 1) for pad, step in zip(edges, distances, strict=True)])
    # The order of the shifts is that of the kernel's spatial axes, so that a reshape of the kernel fits.
    shifts = itertools.product(*map(range, geometry.kernel))
    windows = jnp.concatenate([_window(x, shift, geometry) for shift in shifts], axis=-1)
    n, num_pixels, num_shifts = x.shape[0], math.prod(geometry.out), math.prod(geometry.kernel)
    columns = windows.reshape(n, num_pixels, num_shifts, geometry.groups, x.shape[-1] // geometry.groups)
    weights = kernel.reshape(*columns.shape[2:3], *kernel.shape[-2:-1], geometry.groups, -1)
    product = partial(_product, geometry.precision)
    return jax.vmap(product, (3, 2), 2)(columns, weights).reshape(n, *geometry.out, kernel.shape[-1])


def _window(x: Array, shift: Sizes, geometry: Geometry) -> Array:
    """Returns the numbers of padded images x that the kernel's number at `shift` meets, [n, *out, in]."""
    starts = [i * distance for i, distance in zip(shift, geometry.kernel_dilation, strict=True)]
    ends = [start + span for start, span in zip(starts, geometry._out_span, strict=True)]
    return jax.lax.slice(x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]), (1, *geometry.strides, 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: Any, columns: Array, weights: Array) -> Array:
    """Computes columns [n, pixels, k, in] times weights [k, in, out], with the latter's gradient as (g^T columns)^T.

    XLA:CPU computes columns^T g, which transposes the tall matrix, at half the speed of (g^T columns)^T. The compiler
    would rewrite the fast form to the slow one, if the sum over images did not stand between product and transposition.
    """
    n, pixels, *inputs = columns.shape
    matrix = weights.reshape(math.prod(inputs), -1)
    out = jnp.matmul(columns.reshape(n * pixels, -1), matrix, precision=precision)
    return out.reshape(n, pixels, -1)


def _product_forward(precision: Any, columns: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    """Returns the product, and the values that the backward pass reads."""
    return _product(precision, columns, weights), (columns, weights)


def _product_backward(precision: Any, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Returns the gradients of columns and weights, from the gradient g [n, pixels, out] of the product."""
    columns, weights = saved
    matrix = weights.reshape(-1, g.shape[2])
    columns_gradient = jnp.matmul(g.reshape(-1, g.shape[2]), matrix.T, precision=precision)
    flat_columns = columns.reshape(*columns.shape[:2], -1)
    weights_gradient = jnp.einsum("npo,npk->nok", g, flat_columns, precision=precision).sum(0).T
    return columns_gradient.reshape(columns.shape), weights_gradient.reshape(weights.shape)


_product.defvjp(_product_forward, _product_backward)


# ---- the faster of both, for one client and for several


def convolve(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """Computes the convolution of x [n, *image, in] with a kernel [*kernel, in / groups, out] in the faster way.

    That is XLA's convolution, for which the gradients are written in canonical form. It is `im2col` under a `vmap` over
    kernels, for kernels of one pixel, for three spatial axes, and for few channels in one group. Gradients have reverse
    mode only, to any order.
    """
    if min(*x.shape, *kernel.shape, *geometry.out) <= 0:
        return xla_convolution(x, kernel, geometry)  # nothing to compute
    has_few_channels = geometry.groups == 1 and x.shape[-1] < MIN_CANONICAL_CHANNELS
    is_large = math.prod(geometry.kernel) > 1 and not has_few_channels
    is_canonical = len(geometry.image) <= MAX_CANONICAL_AXES and is_large
    return _convolution(geometry, x, kernel) if is_canonical else im2col(x, kernel, geometry)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolution(geometry: Geometry, x: Array, kernel: Array) -> Array:
    """Returns F(x, k), [n, *out, out]."""
    by_columns = partial(im2col, geometry=geometry)
    by_xla = partial(xla_convolution, geometry=geometry)
    return _by_lanes(by_xla, by_columns, x, kernel, merges=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _image_gradient(geometry: Geometry, y: Array, kernel: Array) -> Array:
    """Returns G(y, k), the convolution of the padded y with the kernel turned around: <F(x, k), y> = <x, G(y, k)>.

    Args:
      geometry: of F.
      y: [n, *out, out], the gradient by F's output, with `geometry.out` as its spatial sizes.
      kernel: k, [*kernel, in / groups, out].

    Returns: [n, *image, in], in the dtype of y.
    """
    groups = geometry.groups
    *sizes, num_inputs, _ = kernel.shape

    def by_columns(y, kernel):
        x = jnp.zeros((y.shape[0], *geometry.image, num_inputs * groups), y.dtype)
        return jax.vjp(lambda x: im2col(x, kernel, geometry), x)[1](y)[0]

    def by_xla(y, kernel):
        turned = jnp.flip(kernel, range(len(sizes))).reshape(*sizes, num_inputs, groups, -1)
        turned = turned.swapaxes(-1, -3).reshape(*sizes, -1, groups * num_inputs)
        return xla_convolution(y, turned, geometry.of_image_gradient)

    return _by_lanes(by_xla, by_columns, y, kernel, merges=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel_gradient(geometry: Geometry, x: Array, y: Array) -> Array:
    """Returns H(x, y), the convolution of x, whose channels are a batch, with y: <F(x, k), y> = <k, H(x, y)>.

    Args:
      geometry: of F.
      x: images, [n, *image, in].
      y: [n, *out, out], the gradient by F's output, with `geometry.out` as its spatial sizes.

    Returns: [*kernel, in / groups, out], in the dtype of x.
    """
    groups = geometry.groups
    num_inputs = x.shape[-1] // groups

    def by_columns(x, y):
        kernel = jnp.zeros((*geometry.kernel, num_inputs, y.shape[-1]), x.dtype)
        return jax.vjp(lambda kernel: im2col(x, kernel, geometry), kernel)[1](y)[0]

    def by_xla(x, y):
        n, *sizes, _ = x.shape
        # The channels of a group become the batch, and the examples of each group its channels.
        images = x.reshape(n, *sizes, groups, num_inputs).swapaxes(0, -1).reshape(num_inputs, *sizes, groups * n)
        return jnp.moveaxis(xla_convolution(images, jnp.moveaxis(y, 0, -2), geometry.of_kernel_gradient), 0, -2)

    has_rows = len(geometry.image) == 2 and geometry.image_dilation[0] == 1
    by_rows = partial(_kernel_gradient_by_rows, geometry)
    return _by_lanes(by_rows if has_rows else by_xla, by_columns, x, y, merges=False)


def _kernel_gradient_by_rows(geometry: Geometry, x: Array, y: Array) -> Array:
    """Returns H(x, y) of images, one row of the kernel after the other.

    A row of the kernel meets rows of the images. So its gradient is a convolution along the width, whose channels are
    the examples and their rows. With so many channels XLA:CPU takes half the time of a convolution along both axes.

    Row i of H is sum_p H'(x[:, p stride - gap_i], y[:, p]), where H' is H along the width, gap_i = low - i dilation,
    and low are the rows of zeros above the images. The sum is over the rows p of y that meet a row of the images.

    Args:
      geometry: of F, with two spatial axes, and images without zeros between their rows (`image_dilation[0]` is 1).
      x: [n, height, width, in].
      y: [n, height', width', out], the gradient by F's output.

    Returns: [kernel height, kernel width, in / groups, out].
    """
    n, height, width, num_channels = x.shape
    groups = geometry.groups
    images = x.reshape(n, height, width, groups, -1).transpose(4, 2, 3, 0, 1)  # [in, width, groups, n, height]
    gradients = y.transpose(2, 0, 1, 3)  # [width, n, height, out]
    along_width = geometry.of_kernel_gradient.without_first_axis
    rows = []
    for i in range(geometry.kernel[0]):
        # Row p of y meets row p * stride - gap of x. Rows of padding are left out.
        gap = geometry.pads[0][0] - i * geometry.kernel_dilation[0]
        stride = geometry.strides[0]
        first = max(-(-gap // stride), 0)
        end = min((height - 1 + gap) // stride + 1, geometry.out[0])
        if end <= first:  # this row of the kernel meets padding alone
            rows.append(jnp.zeros((1, geometry.kernel[1], num_channels // groups, y.shape[-1]), y.dtype))
            continue
        start = first * stride - gap
        met_images = images[..., start : start + (end - first) * stride : stride]
        met_gradients = gradients[:, :, first:end]
        num_rows = n * (end - first)
        met_images = met_images.reshape(num_channels // groups, width, groups * num_rows)
        met_gradients = met_gradients.reshape(gradients.shape[0], num_rows, -1)
        rows.append(xla_convolution(met_images, met_gradients, along_width).swapaxes(0, 1)[None])
    return jnp.concatenate(rows)


# The derivatives of each function by its two arguments are the other two functions.
_convolution.defvjp(
    lambda geometry, x, kernel: (_convolution(geometry, x, kernel), (x, kernel)),
    lambda geometry, xk, y: (_image_gradient(geometry, y, xk[1]), _kernel_gradient(geometry, xk[0], y)),
)
_image_gradient.defvjp(
    lambda geometry, y, kernel: (_image_gradient(geometry, y, kernel), (y, kernel)),
    lambda geometry, yk, x: (_convolution(geometry, x, yk[1]), _kernel_gradient(geometry, x, yk[0])),
)
_kernel_gradient.defvjp(
    lambda geometry, x, y: (_kernel_gradient(geometry, x, y), (x, y)),
    lambda geometry, xy, kernel: (_image_gradient(geometry, xy[1], kernel), _convolution(geometry, xy[0], kernel)),
)


def _by_lanes(alone: Callable, vmapped: Callable, a: Array, b: Array, *, merges: bool) -> Array:
    """Computes a function of two arrays in one way for one client, and in another way under a `vmap` over clients.

    Args:
      alone: (a, b) -> the result.
      vmapped: the same function, for use under a `vmap`.
      a, b: the arrays of one client.
      merges: whether lanes that share b may be one call of `alone`: then the first axis of `a` and of the result are
        examples.
    """
    either = jax.custom_batching.custom_vmap(alone)

    @either.def_vmap
    def _(lanes, is_batched, a, b):
        if merges and not is_batched[1]:
            rows = _by_lanes(alone, vmapped, a.reshape(-1, *a.shape[2:]), b, merges=merges)
            return rows.reshape(lanes, -1, *rows.shape[1:]), True
        return jax.vmap(vmapped, [0 if x else None for x in is_batched])(a, b), True

    return either(a, b)


def conv_general_dilated(lhs: Array, rhs: Array, *args: Any, **options: Any) -> Array:
    """Computes what `jax.lax.conv_general_dilated` computes, fast in a client's loop and under a `vmap` over clients.

    Give it to the convolutions of Flax: `nn.Conv(..., conv_general_dilated=models.conv_general_dilated)`.

    Args:
      lhs: images, of any layout.
      rhs: the kernel, of any layout.
      args, options: the other arguments of `jax.lax.conv_general_dilated`, by position or by name. `out_sharding` must
        be None.

    Raises: ValueError for a sharding of the result; what JAX raises, for arguments that do not fit.

    Guarantees:
      Values and gradients are within 2e-6 of NumPy's in float64, for strided, dilated, transposed, padded and grouped
      convolutions of one to three axes, of one client and under `vmap`
      (tests/models/test_convolution.py::test_equals_float64).
      Second derivatives are right (tests/models/test_layers.py::test_second_derivatives), and `jax.jvp` is refused
      (tests/models/test_convolution.py::test_forward_mode_is_refused).
      Layers of Flax have the same values and gradients with it (::test_flax).

    >>> import jax.numpy as jnp
    >>> conv_general_dilated(jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2)), (2,), "VALID").tolist()
    [[[2.0, 2.0]]]
    """
    # JAX checks the arguments, fills in what was left out, and turns words such as "SAME" into numbers.
    convolution = lambda lhs, rhs: jax.lax.conv_general_dilated(lhs, rhs, *args, **options)  # noqa: E731
    traced, result = jax.make_jaxpr(convolution, return_shape=True)(lhs, rhs)
    stated = traced.eqns[-1].params
    if stated.get("out_sharding") is not None:
        fail("out_sharding", "None", stated["out_sharding"], "Clients' arrays are not sharded inside of a client.")
    dtype = jnp.promote_types(lhs.dtype, stated["preferred_element_type"] or lhs.dtype)
    image_axes, kernel_axes, out_axes = stated["dimension_numbers"]  # batch or out, channels or in, spatial axes
    x = lhs.astype(dtype).transpose(image_axes[0], *image_axes[2:], image_axes[1])
    kernel = rhs.astype(dtype).transpose(*kernel_axes[2:], kernel_axes[1], kernel_axes[0])
    groups = stated["feature_group_count"]
    if (batch_groups := stated["batch_group_count"]) > 1:
        # Groups of examples are as many groups of channels.
        x = jnp.moveaxis(x.reshape(batch_groups, -1, *x.shape[1:]), 0, -2)
        x = x.reshape(*x.shape[:-2], -1)
        groups = batch_groups
    geometry = Geometry(
        image=x.shape[1:-1],
        kernel=kernel.shape[:-2],
        strides=stated["window_strides"],
        pads=stated["padding"],
        image_dilation=stated["lhs_dilation"],
        kernel_dilation=stated["rhs_dilation"],
        groups=groups,
        precision=stated["precision"],
    )
    out = convolve(x, kernel, geometry).astype(result.dtype)
    places = (out_axes[0], *out_axes[2:], out_axes[1])  # of the axes of `out`
    return out.transpose(sorted(range(out.ndim), key=places.__getitem__))

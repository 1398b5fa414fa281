"""Examples and labels rebuilt from what clients send, in closed form.

Every attack takes a `View`, and nothing of the data. A message is an update, u = -(learning rate) x gradient after one
step of SGD, so its sign is minus the gradient's. Attacks return a row for each message; where nothing arrived
(weight 0) a row means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.types import Array
from fedjax_sim.validate import OpenShare, Positive, PositiveInt

__all__ = ["affine_rows", "gradient_rank", "invert_affine", "recover_labels"]


def _layer(view: View, layer: str) -> tuple[Array, Array]:
    """(kernel [m, in, out], bias [m, out]) of an affine layer's part of the messages."""
    validate.part("view", view, View)
    found = view.messages
    for name in filter(None, layer.split(".")):
        if not isinstance(found, dict) or name not in found:
            validate.fail("layer", "the path of an affine layer", layer, f"There is {sorted(found)}.")
        found = found[name]
    if not (isinstance(found, dict) and {"kernel", "bias"} <= set(found) and found["kernel"].ndim == 3):
        hint = 'It holds a "kernel" [in, out] and a "bias" [out].'
        validate.fail("layer", "an affine layer that has a bias", layer, hint)
    return found["kernel"], found["bias"]


def affine_rows(view: View, layer: str = "") -> Array:
    """Every output's quotient (kernel's update) / (bias' update): the layer's inputs, mixed.

    With delta_ij the derivative of example i's loss at output j, output j gives sum_i delta_ij x_i / sum_i delta_ij,
    whatever the learning rate. That is x itself if one example was used, or where one alone reaches the output: behind
    a ReLU, some examples of a batch are often laid bare.

    Args:
      view: what the attacker holds.
      layer: path of the layer in the model's parameters, such as "hidden_0"; "" if the model is the layer.

    Returns: [m, out, in]; NaN where the bias did not move.

    Guarantees: the mixture of two examples (tests/adversary/test_inversion.py::test_mixtures).
    """
    kernel, bias = _layer(view, layer)
    moved = bias != 0
    rows = jnp.swapaxes(kernel, 1, 2) / jnp.where(moved, bias, 1)[..., None]
    return jnp.where(moved[..., None], rows, jnp.nan)


def invert_affine(view: View, layer: str = "") -> Array:
    """The input of an affine layer, from its part of each message: the row of `affine_rows` whose bias moved most.

    Exact, up to rounding, if a single example was used: at one step or at all local steps of SGD, whatever their number
    and rate, clipped or not, in a net of any depth behind the layer. Where more examples reach that output, in a batch
    or over local steps, the result is a mixture: different batches then send the same message, and no attack on this
    layer alone can tell them apart. After steps of Adam, say, an update is no gradient, and nothing is exact.

    Args:
      view, layer: as in `affine_rows`; for examples themselves, the model's first layer.

    Returns: [m, in]; NaN where no bias moved.

    Guarantees: exact to 1e-5 for one example, also after several local steps, and a mixture for two
    (tests/adversary/test_inversion.py::test_one_example_is_exact, ::test_two_examples_are_never_exact).

    References: Phong et al. 2018, section 3; Geiping et al. 2020, proposition 3.1.

    >>> import jax.numpy as jnp
    >>> x, delta = jnp.array([0.5, -2.0]), jnp.array([0.25, 0.0, -0.5])
    >>> sent = {"kernel": -0.1 * jnp.outer(x, delta)[None], "bias": -0.1 * delta[None]}
    >>> invert_affine(View((), sent, jnp.ones(1), jnp.zeros(1, jnp.int32))).tolist()
    [[0.5, -2.0]]
    """
    at = jnp.abs(_layer(view, layer)[1]).argmax(-1)
    return jnp.take_along_axis(affine_rows(view, layer), at[:, None, None], axis=1)[:, 0]


@validate.named_arguments
def gradient_rank(view: View, layer: str = "", *, tolerance: OpenShare = 1e-4) -> Array:
    """The rank of a layer's part of each message: at most the number of examples times the number of local steps.

    Rank 1 hints at a single example, and proves none: it is also the rank where all derivatives, or all inputs, are
    parallel, as with one output. Noise and quantisation make the rank full.

    Args:
      view, layer: as in `affine_rows`.
      tolerance: in (0, 1); singular values below this share of the largest count as zero.

    Returns: [m] int32; 0 for a message of zeros.

    Guarantees: 1 for one example, k for k generic ones, and 1 for parallel ones
    (tests/adversary/test_inversion.py::test_rank).
    """
    values = jnp.linalg.svd(_layer(view, layer)[0], compute_uv=False)
    return (values > tolerance * values[:, :1]).sum(-1, dtype=jnp.int32)


@validate.named_arguments
def recover_labels(
    view: View,
    layer: str = "output",
    *,
    num_examples: PositiveInt = 1,
    learning_rate: Positive = 1.0,
    probabilities: Sequence[float] | None = None,
) -> Array:
    """The labels of the examples behind each message, from the bias before a softmax cross entropy.

    The bias' gradient is the mean of p - onehot(y), so only the labels' own entries can be negative: for one example
    they alone are. Of B examples, class c has B (mean p_c - g_c), which is rounded so that B labels come out.

    Args:
      view: what the attacker holds.
      layer: path of the affine layer that makes the logits.
      num_examples: B of one step, which the server knows.
      learning_rate: of that step; of no use with B = 1.
      probabilities: what the server takes for the mean predicted p, [classes]; None for equal ones, of a model that
        knows nothing yet.

    Returns: [m, B] int32, rising.

    Guarantees: every label for B = 1, whatever the model, and for any B where the probabilities are right
    (tests/adversary/test_inversion.py::test_labels).

    References: Zhao, Mopuri and Bilen 2020 (iDLG), section 3; Wainakh et al. 2022 (LLG), section 4.
    """
    bias = _layer(view, layer)[1]
    classes = bias.shape[1]
    if probabilities is None:
        expected = jnp.full(classes, 1 / classes)
    else:
        expected = jnp.asarray(probabilities)
        if expected.shape != (classes,):
            validate.fail("probabilities", f"one for each of {classes} classes", expected.shape)
    if num_examples == 1:
        return bias.argmax(-1).astype(jnp.int32)[:, None]
    counts = num_examples * (expected[None] + bias / learning_rate)

    def one_more(left, _):  # the class that is owed most
        label = left.argmax(-1)
        return left - jax.nn.one_hot(label, classes), label

    labels = jax.lax.scan(one_more, counts, length=num_examples)[1]
    return jnp.sort(labels.T, axis=1).astype(jnp.int32)

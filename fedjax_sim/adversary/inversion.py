"""Reconstruction in closed form: examples and labels rebuilt from what clients send.

Every attack takes a `View`, and nothing of the data. A message is an update: after a single step of SGD it is
-(learning rate) x gradient, so its sign is opposite to the gradient's. Attacks return a row for each message; a row has
no meaning where nothing arrived (weight 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.types import Array
from fedjax_sim.validate import OpenShare, Positive, PositiveInt


def _layer(view: View, layer: str) -> tuple[Array, Array]:
    """Returns the part of the messages that belongs to an affine layer: (kernel [m, in, out], bias [m, out]).

    Args:
      view: m messages, as nested dicts of arrays [m, ...].
      layer: the names on the path to the layer, joined by dots, such as "encoder.hidden_0"; "" if the model is
        the layer.

    Raises: ValueError for a path that is no affine layer with a bias.
    """
    validate.part("view", view, View)
    part = view.messages
    for name in filter(None, layer.split(".")):
        if not isinstance(part, dict) or name not in part:
            hint = f"There is {sorted(part)}." if isinstance(part, dict) else "It goes on below an array."
            validate.fail("layer", "the path of an affine layer", layer, hint)
        part = part[name]
    if not (isinstance(part, dict) and {"kernel", "bias"} <= set(part) and part["kernel"].ndim == 3):
        hint = 'It holds a "kernel" [in, out] and a "bias" [out].'
        validate.fail("layer", "an affine layer that has a bias", layer, hint)
    return part["kernel"], part["bias"]


def affine_rows(view: View, layer: str = "") -> Array:
    """Computes the quotient (kernel's update) / (bias' update) of every output: mixtures of the layer's inputs.

    Let delta_ij be the derivative of example i's loss at output j. The quotient of output j is
    sum_i delta_ij x_i / sum_i delta_ij, whatever the learning rate. It is x itself if a single example was used, or if
    a single example has a derivative at this output. Behind a ReLU, some examples of a batch are often revealed in this
    way.

    Args:
      view: what the attacker holds.
      layer: the path of the layer in the model's parameters, with dots between names, such as "hidden_0" or
        "encoder.hidden_0"; "" if the model is the layer.

    Returns: [m, out, in]; NaN for an output whose bias did not change.

    Raises: ValueError for a path that is no affine layer with a bias
      (tests/adversary/test_inversion.py::test_a_path_that_is_no_layer_is_named).

    Guarantees: for two examples a row is the mixture by this formula, and it is an example itself where no other
    example reaches the output (tests/adversary/test_inversion.py::test_mixtures).
    """
    kernel, bias = _layer(view, layer)
    has_changed = bias != 0
    rows = jnp.swapaxes(kernel, 1, 2) / jnp.where(has_changed, bias, 1)[..., None]
    return jnp.where(has_changed[..., None], rows, jnp.nan)


def invert_affine(view: View, layer: str = "") -> Array:
    """Rebuilds the input of an affine layer: the row of `affine_rows` whose bias changed most.

    The result is exact, up to rounding, if a single example was used, in one step or in all local steps of SGD. The
    number of steps, the learning rate, a clip, and the depth of the net behind the layer do not matter.

    If more examples have a derivative at this output, in a batch or over local steps, the result is a mixture.
    Different batches can then send the same message, and no attack on this layer alone can tell them apart. After steps
    of another optimizer, such as Adam, an update is no gradient, and the result is not exact.

    Args:
      view: what the attacker holds.
      layer: as in `affine_rows`; the model's first layer, to rebuild the examples themselves.

    Returns: [m, in]; NaN if no bias changed.

    Raises: ValueError for a path that is no affine layer with a bias.

    Guarantees: the result is exact to 1e-5 for one example, also after several local steps, and a mixture for two
    examples (tests/adversary/test_inversion.py::test_one_example_is_exact, ::test_two_examples_are_never_exact).

    References: Phong et al. 2018, section 3; Geiping et al. 2020, proposition 3.1.

    >>> import jax.numpy as jnp
    >>> x, delta = jnp.array([0.5, -2.0]), jnp.array([0.25, 0.0, -0.5])
    >>> sent = {"kernel": -0.1 * jnp.outer(x, delta)[None], "bias": -0.1 * delta[None]}
    >>> invert_affine(View((), sent, jnp.ones(1), jnp.zeros(1, jnp.int32))).tolist()
    [[0.5, -2.0]]
    """
    largest_change = jnp.abs(_layer(view, layer)[1]).argmax(-1)  # divided by the largest number: least rounding error
    return jnp.take_along_axis(affine_rows(view, layer), largest_change[:, None, None], axis=1)[:, 0]


@validate.named_arguments
def gradient_rank(view: View, layer: str = "", *, tolerance: OpenShare = 1e-4) -> Array:
    """Computes the rank of a layer's part of each message.

    The rank is at most the number of examples times the number of local steps. Rank 1 suggests a single example, and
    does not prove it: it is also the rank if all derivatives, or all inputs, are parallel, as with a single output.
    Noise and quantisation make the rank full.

    Args:
      view: what the attacker holds.
      layer: as in `affine_rows`.
      tolerance: in (0, 1); singular values below this share of the largest count as zero.

    Returns: [m] int32; 0 for a message of zeros.

    Guarantees: the rank is 1 for one example, k for k generic examples, and 1 for parallel examples
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
    """Recovers the labels of the examples behind each message, from the bias before a softmax cross entropy.

    The bias' gradient g is the mean of p - onehot(y), so only entries of labels can be negative. With a single example,
    exactly the label's entry is negative. With B examples, class c has B (mean p_c - g_c) labels; these numbers are
    rounded so that B labels result.

    Args:
      view: what the attacker holds.
      layer: the path of the affine layer that computes the logits.
      num_examples: B of a single step, which the server knows.
      learning_rate: of this step; not used with B = 1.
      probabilities: [classes], the mean predicted p that the server assumes; None = equal probabilities, as of an
        untrained model.

    Returns: [m, B] int32 labels in ascending order.

    Raises: ValueError for another number of probabilities than of classes, and as `affine_rows`.

    Guarantees: every label for B = 1, whatever the model, and for any B if the probabilities are right
    (tests/adversary/test_inversion.py::test_labels).

    References: Zhao, Mopuri and Bilen 2020 (iDLG), section 3; Wainakh et al. 2022 (LLG), section 4.
    """
    bias = _layer(view, layer)[1]
    num_classes = bias.shape[1]
    if probabilities is None:
        expected = jnp.full(num_classes, 1 / num_classes)
    else:
        expected = jnp.asarray(probabilities)
        if expected.shape != (num_classes,):
            validate.fail("probabilities", f"one for each of {num_classes} classes", expected.shape)
    if num_examples == 1:
        # The update is minus the gradient, so the label has the only positive entry.
        return bias.argmax(-1).astype(jnp.int32)[:, None]
    counts = num_examples * (expected[None] + bias / learning_rate)

    def take_label(remaining, _):
        # Labels are taken one by one, each of the class with the largest remaining count.
        label = remaining.argmax(-1)
        return remaining - jax.nn.one_hot(label, num_classes), label

    labels = jax.lax.scan(take_label, counts, length=num_examples)[1]
    return jnp.sort(labels.T, axis=1).astype(jnp.int32)

"""Class labels of a client: what they must be, and how many rows a client has of each class."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.models import Model
from fedjax_sim.types import Array, ClientData, PyTree

EXCLUDED = 1e9  # below all logits: exp(-EXCLUDED) is 0, and no infinity meets a 0 where a client has no rows


def check_classes(y: Array, hint: str) -> None:
    """Raises a ValueError unless `y` holds one integer class for each row.

    Args:
      y: of a client, [n].
      hint: why classes are needed.
    """
    if y.ndim != 1 or not jnp.issubdtype(y.dtype, jnp.integer):
        validate.fail("examples['y']", "integer classes, one for each row", f"{y.dtype} of shape {y.shape}", hint)


def rows_of_classes(model: Model, params: PyTree, data: ClientData, least: int = 2) -> Array:
    """Counts a client's rows of each class; padding is of no class.

    Args:
      model: a classifier without state, with one output for each class.
      params: of the model, for the shape of its outputs.
      data: the client's examples {"x", "y"}, with integer classes y [n], and their mask. A label outside of [0, C)
        counts for no class, and its loss is NaN.
      least: the fewest classes.

    Returns: [C] float32.

    Raises: ValueError for y that are no integer classes, and for a model without an output for each of `least` classes.

    Guarantees: padding counts for no class, whatever it holds
    (tests/algorithms/server/test_label_skew.py::test_padding_is_of_no_class).
    """
    check_classes(data.examples["y"], "Rows are counted by class.")
    outputs, _ = jax.eval_shape(lambda params, x: model.apply(params, (), x, None, False), params, data.examples["x"])
    if outputs.ndim != 2 or outputs.shape[1] < least:
        rule = f"a classifier with one logit for each of {least} classes or more"
        validate.fail("model", rule, f"outputs of shape {outputs.shape}")
    is_of_class = (data.examples["y"][None] == jnp.arange(outputs.shape[1])[:, None]) & data.mask[None]
    return is_of_class.sum(1, dtype=jnp.float32)

"""This module adapts trained models by low-rank matrices (LoRA), which are all that clients train and send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fedjax_sim.models.model import Model
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.models.paths import chosen_paths, leaves_by_path, nested
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Positive, PositiveInt, fail, named_arguments, part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LowRankSum:
    """The matrix W + s A B, of which only products x (W + s A B) can be computed, as x W + s (x A) B.

    If clients have their own A and B under a `vmap`, x W stays one product of all clients' rows with one matrix. The
    sum itself is never computed: it would be a matrix for each client.
    """

    frozen: Array  # W [num_inputs, num_outputs]
    a: Array  # A [num_inputs, rank]
    b: Array  # B [rank, num_outputs]
    scale: Array  # s []
    path: str = dataclasses.field(metadata={"static": True})  # of the matrix, for errors
    __array_ufunc__ = None  # so that NumPy leaves `x @ matrix` to `__rmatmul__`

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.frozen.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.frozen.dtype

    def __rmatmul__(self, x: Array) -> Array:
        """Computes x (W + s A B)."""
        return x @ self.frozen + (x @ self.a * self.scale) @ self.b

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses what an array has and this has not, such as the transpose `T`, which would need the sum."""
        hint = "Use it by models.layers.dense, or leave it out of `matrices`."
        raise AttributeError(f"{self.path}: expected x @ matrix of an adapted matrix, got matrix.{name}. {hint}")

    def __repr__(self) -> str:
        """Returns a text that shows in JAX's errors why this is no array."""
        return f"LowRankSum(of {self.path!r}, for x @ matrix alone)"


@named_arguments
def lora(
    model: Model,
    *,
    rank: PositiveInt,
    alpha: Positive | None = None,
    matrices: Sequence[str] | None = None,
    trained: Sequence[str] = (),
    freeze_a: bool = False,
) -> Model:
    """Freezes a model, and adapts its matrices W by trained matrices of low rank: W + (alpha / rank) A B.

    The parameters of the new model are A [num_inputs, rank] and B [rank, num_outputs] of each adapted matrix. So every
    algorithm trains, clips, compresses and sends these alone. The model's own parameters are the state of the new one,
    which `supervised` takes as its `frozen_state`: clients do not have to receive or send them.

    Args:
      model: whose parameters are nested dicts, and which uses the adapted matrices as x @ matrix alone, as
        `models.layers.dense` does.
      rank: r, at most the smaller side of each adapted matrix.
      alpha: the scale of A B is alpha / rank; by default alpha is the rank.
      matrices: paths of the adapted matrices, or of dicts, all of whose matrices are adapted. By default these are all
        leaves named "kernel" with two axes, except those of the model's last layer. `models.layers.dense` reads leaves
        of this name.
      trained: paths of leaves or dicts that are trained as they are, such as "output".
      freeze_a: True: A stays as it is drawn, and clients train and send B alone (FFA-LoRA).

    Whatever averages parameters over clients averages the A and the B: the product of these means is not the mean of
    the clients' products A_i B_i, but differs from it by the mean of (A_i - mean A)(B_i - mean B). With `freeze_a` both
    are equal, and `algorithms.flexlora` takes the mean of the products.

    Returns: a `Model` with params {path: {"a": A, "b": B}, ...} beside the trained leaves, in the nested dicts of the
    model's own paths, and with state {"frozen": the other leaves, "scale": alpha / rank, "state": the model's own}.
    With `freeze_a` the params have B alone, and the state has also "a": the A, by the model's own paths. Its `init`
    draws the frozen leaves as the model's own does. A is normal with variance 1 / num_inputs, and B is zero, so
    that at the start the new model is the old one. `merged` computes the old model's parameters with A B added.

    Raises: ValueError for a path that the parameters lack or that is both adapted and trained, for a rank above a side
    of a matrix, and if nothing is adapted. A model that uses an adapted matrix in another way raises TypeError or
    AttributeError when it is traced.

    Guarantees:
      The new model gives the old one's bits at the start (tests/models/test_low_rank.py::test_starts_as_the_model),
      and later the logits of the merged parameters up to rounding (::test_merged_parameters_give_the_same_logits).
      With A orthogonal and fixed, and full rank, SGD on B is SGD on W (::test_full_rank_is_full_training).
      No frozen leaf is in a message or changes in a round (::test_frozen_leaves_stay_and_are_in_no_message).
      Clients' own adapters make no matrix of a client's own (::test_clients_share_the_frozen_product).
      With `freeze_a` a round of FedAvg has the mean of the clients' products, and messages have no A
      (::test_with_a_frozen_the_mean_is_exact).

    References: Hu et al. 2022 (LoRA), section 4.1; Sun, Li, Li, Ding 2024 (FFA-LoRA) for `freeze_a`.

    >>> from fedjax_sim.models import mlp
    >>> model = lora(mlp(input_shape=(5,), num_outputs=3, hidden=(4,)), rank=2)
    >>> params, state = model.init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, params)
    {'hidden_0': {'kernel': {'a': (5, 2), 'b': (2, 4)}}}
    """
    part("model", model, Model)
    params_spec, _ = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    if not isinstance(params_spec, dict):
        fail("model", "a model whose parameters are nested dicts", type(params_spec).__name__, error=TypeError)
    specs = leaves_by_path(params_spec)
    adapted = _adapted_paths(model, params_spec, matrices)
    for path in adapted:
        sides = specs[path].shape
        if rank > min(sides):
            fail("rank", f"at most {min(sides)}, the smaller side of {path}", rank)
    trained_paths = set(chosen_paths("trained", params_spec, trained))
    if both := sorted(set(adapted) & trained_paths):
        fail("trained", "paths of leaves that are not adapted", both[0], "Leave it out of one of the two.")
    scale = (rank if alpha is None else alpha) / rank

    def init(key: Array) -> tuple[PyTree, PyTree]:
        own_params, own_state = model.init(key)
        trained_leaves, frozen = partition(own_params, lambda path: path in trained_paths)
        adapters = {
            path: _initial(stream(stream(key, "lora"), path), leaf.shape, leaf.dtype, rank)
            for path, leaf in specs.items()
            if path in adapted
        }
        state = {"frozen": frozen, "scale": jnp.float32(scale), "state": own_state}
        if freeze_a:
            state["a"] = nested({path: adapter.pop("a") for path, adapter in adapters.items()})
        return combine(nested(adapters), trained_leaves), state

    def apply(params: PyTree, state: PyTree, x: PyTree, key: Array | None, train: bool) -> tuple[PyTree, PyTree]:
        out, own_state = model.apply(_joined(params, state, adapted), state["state"], x, key, train)
        return out, {**state, "state": own_state}

    return Model(init, apply)


def merged(params: PyTree, state: PyTree) -> PyTree:
    """Computes the parameters of the model that `lora` adapted, with (alpha / rank) A B added to each adapted matrix.

    Args:
      params, state: of the model that `lora` returned.

    Guarantees: the old model with these parameters gives the new model's outputs up to rounding
    (tests/models/test_low_rank.py::test_merged_parameters_give_the_same_logits).
    """
    adapted = [path.removesuffix("/b") for path in leaves_by_path(params) if path.endswith("/b")]
    frozen = set(leaves_by_path(state["frozen"]))
    joined = _joined(params, state, [path for path in adapted if path in frozen])

    def summed(leaf: Array | LowRankSum) -> Array:
        if not isinstance(leaf, LowRankSum):
            return leaf
        return leaf.frozen + leaf.scale.astype(leaf.dtype) * (leaf.a @ leaf.b)

    return jax.tree.map(summed, joined, is_leaf=lambda leaf: isinstance(leaf, LowRankSum))


def _initial(key: Array, shape: tuple[int, int], dtype: Any, rank: int) -> PyTree:
    """Draws the adapter of one matrix."""
    num_inputs, num_outputs = shape
    a = jax.random.normal(key, (num_inputs, rank), dtype) / math.sqrt(num_inputs)
    return {"a": a, "b": jnp.zeros((rank, num_outputs), dtype)}


def _joined(params: PyTree, state: PyTree, adapted: Sequence[str]) -> PyTree:
    """Returns the parameters of the model inside, with a `LowRankSum` in place of each adapted matrix."""
    trained, frozen_a, adapters = dict(leaves_by_path(params)), leaves_by_path(state.get("a", {})), {}
    for path in adapted:
        a = frozen_a[path] if frozen_a else trained.pop(f"{path}/a")
        adapters[path] = {"a": a, "b": trained.pop(f"{path}/b")}
    leaves = leaves_by_path(state["frozen"]) | trained
    for path, adapter in adapters.items():
        # A scale in the dtype of the adapters promotes nothing.
        leaves[path] = LowRankSum(leaves[path], **adapter, scale=state["scale"].astype(adapter["b"].dtype), path=path)
    return nested(leaves)


def _adapted_paths(model: Model, params: PyTree, matrices: Sequence[str] | None) -> list[str]:
    """Returns the paths of the matrices to adapt, each of which has two axes.

    Args:
      model: whose layers say which parameters are those of the last layer. A model without `layers` has none.
      params: its parameters, nested dicts of arrays or of their shapes.
      matrices: paths of leaves or dicts. Leaves among them with another number of axes are left out. None: all leaves
        named "kernel" with two axes that do not belong to the last layer with parameters.

    Raises: ValueError for a path that `params` lacks, and if no matrix is left.
    """
    if matrices is None:
        last_layer = next((layer.keys for layer in reversed(model.layers) if layer.keys), ())
        paths = [
            path
            for path, leaf in leaves_by_path({name: x for name, x in params.items() if name not in last_layer}).items()
            if path.split("/")[-1] == "kernel" and len(leaf.shape) == 2
        ]
        hint = "State the matrices. The default is all kernels with two axes before the last layer."
    else:
        leaves = leaves_by_path(params)
        paths = [path for path in chosen_paths("matrices", params, matrices) if len(leaves[path].shape) == 2]
        hint = "Only leaves with two axes are adapted."
    if not paths:
        fail("matrices", "paths of at least one matrix", matrices, hint)
    return paths

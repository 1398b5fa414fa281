"""A forest of binary trees in arrays of fixed size, and how one level of a tree grows from histograms."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.types import Array
from fedjax_sim.types.shares import reaches

LEAF = -1  # in the place of a feature, for a node without a split


def node_of(features: Array, thresholds: Array, x: Array) -> Array:
    """Returns the node of one tree in which each row ends, [n] int32.

    Args:
      features, thresholds: of the tree's 2^D - 1 inner nodes.
      x: [n, d]. NaN is below no threshold and at none: such a row goes to the first child.
    """
    node = jnp.zeros(x.shape[0], jnp.int32)
    for _ in range(features.shape[0].bit_length()):
        feature = features.at[node].get(mode="fill", fill_value=LEAF)  # nodes of the last level are leaves
        threshold = thresholds.at[node].get(mode="fill", fill_value=0)
        number = jnp.take_along_axis(x, jnp.maximum(feature, 0)[:, None], 1)[:, 0]
        child = 2 * node + 1 + (number >= threshold).astype(jnp.int32)
        node = jnp.where(feature == LEAF, node, child)
    return node


def scores_of(forest: dict[str, Array], x: Array) -> Array:
    """Computes the sum of the trees' values for each row, [n] float32; NaN for a row with a feature that is NaN."""
    nodes = jax.vmap(node_of, (0, 0, None))(forest["features"], forest["thresholds"], x)  # [T, n]
    scores = jnp.take_along_axis(forest["values"], nodes, 1).sum(0)
    return jnp.where(jnp.isnan(x).any(1), jnp.nan, scores)


class _Sums(NamedTuple):
    """Sums over rows, of the same shape."""

    gradient: Array
    hessian: Array

    def map(self, change: Any) -> _Sums:
        """Returns both sums changed in the same way."""
        return _Sums(change(self.gradient), change(self.hessian))


class Growth(NamedTuple):
    """How trees grow: T trees of at most D levels of splits, from histograms of d features with B bins.

    A forest is {"features", "thresholds"} [T, 2^D - 1] and {"values"} [T, 2^(D + 1) - 1]. The children of node i are
    2 i + 1, for rows whose feature is below the threshold, and 2 i + 2. A node whose feature is -1 is a leaf. The state
    holds a forest, the tree and the level that grow next, and the hessian of the first round, which is the unit of
    `penalty`, `least_share` and `least_gain`.
    """

    num_trees: int  # T
    max_depth: int  # D
    learning_rate: float
    penalty: float
    least_share: float
    least_gain: float
    edges: np.ndarray  # [d, B - 1] float32: the lower bounds of all bins but the first, rising

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a histogram: nodes of the widest level that may split, features, bins."""
        num_features, num_edges = self.edges.shape
        return 1 << (self.max_depth - 1), num_features, num_edges + 1

    def planted(self) -> dict[str, Array]:
        """Returns the state before the first round: trees of one leaf each, whose value is 0."""
        inner = (self.num_trees, (1 << self.max_depth) - 1)
        return {
            "features": jnp.full(inner, LEAF, jnp.int32),
            "thresholds": jnp.zeros(inner, jnp.float32),
            "values": jnp.zeros((self.num_trees, (2 << self.max_depth) - 1), jnp.float32),
            "tree": jnp.int32(0),
            "level": jnp.int32(0),
            "first_hessian": jnp.float32(0),
        }

    def finished(self, state: dict[str, Array]) -> dict[str, Array]:
        """Returns the forest without the tree that grows: gradients are taken at the scores of the others."""
        is_growing = jnp.arange(self.num_trees)[:, None] == state["tree"]
        forest = {name: state[name] for name in ("features", "thresholds")}
        return forest | {"values": jnp.where(is_growing, 0, state["values"])}

    def histograms(self, state: dict[str, Array], x: Array, mask: Array, values: tuple[Array, ...]) -> list[Array]:
        """Sums values of rows by the row's node of the growing level, feature and bin.

        Args:
          state: of the growth.
          x: [n, d].
          mask: [n] bool, which rows count.
          values: arrays [n] float32. A number that is not finite spoils all sums.

        Returns: for each array its sums, `shape`; zeros after the last tree. They are matrix products, because a
          scattered sum has no fixed order on accelerators.
        """
        num_slots, _, num_bins = self.shape
        tree = jnp.minimum(state["tree"], self.num_trees - 1)
        node = node_of(state["features"][tree], state["thresholds"][tree], x)
        slot = node - _first_node(state["level"])  # below 0 for a row in a leaf of an earlier level
        is_counted = mask & (state["tree"] < self.num_trees)
        in_slot = (slot[:, None] == jnp.arange(num_slots)[None]) & is_counted[:, None]
        bins = (x[:, :, None] >= self.edges[None]).sum(-1, dtype=jnp.int32)
        in_bin = (bins[:, :, None] == jnp.arange(num_bins)[None, None]).astype(jnp.float32)
        return [jnp.einsum("ns,ndb->sdb", jnp.where(in_slot, value[:, None], 0), in_bin) for value in values]

    def grown(self, gradients: Array, hessians: Array, state: dict[str, Array]) -> dict[str, Array]:
        """Returns the state after a round: splits of one level, and values of its nodes and their children.

        Args:
          gradients, hessians: histograms of the whole cohort, or any multiple of them, with noise or without.
          state: of the growth.
        """
        level, tree = state["level"], state["tree"]
        slots = jnp.arange(self.shape[0])
        nodes = _first_node(level) + slots
        parents = jnp.maximum((nodes - 1) // 2, 0)
        is_open = (level == 0) | (state["features"][tree, parents] != LEAF)
        is_open &= slots <= _first_node(level)  # a level has one node more than all levels before it

        # The bins of each feature add up to the node's sums. With noise, the mean over features has least of it.
        bins = _Sums(gradients, hessians)
        node = bins.map(lambda x: x.sum(-1).mean(-1))
        first_hessian = jnp.where(state["first_hessian"] > 0, state["first_hessian"], node.hessian[0])
        unit = jnp.where(first_hessian > 0, first_hessian, 1)
        node = node.map(lambda x: x / unit)
        below = bins.map(lambda x: jnp.cumsum(x, -1) / unit)
        left = below.map(lambda x: x[..., :-1])
        right = below.map(lambda x: x[..., -1:] - x[..., :-1])

        is_known = is_open & self._is_enough(node)
        may_split = is_known[:, None, None] & self._is_enough(left) & self._is_enough(right)
        gains = self._score(left) + self._score(right) - self._score(node)[:, None, None]
        gains = jnp.where(may_split, gains, -jnp.inf).reshape(slots.size, -1)
        splits = gains.max(1) > self.least_gain
        feature, edge = jnp.divmod(jnp.argmax(gains, 1), self.edges.shape[1])
        of_split = (slots, feature, edge)

        def placed(array: Array, places: Array, is_set: Array, numbers: Array) -> Array:
            """Sets numbers of some nodes of the tree. Those of other nodes go to an index out of range: nowhere."""
            return array.at[tree, jnp.where(is_set, places, array.shape[1])].set(numbers, mode="drop")

        values = placed(state["values"], nodes, is_known, self._value(node))
        values = placed(values, 2 * nodes + 1, splits, self._value(left.map(lambda x: x[of_split])))
        values = placed(values, 2 * nodes + 2, splits, self._value(right.map(lambda x: x[of_split])))
        goes_deeper = splits.any() & (level + 1 < self.max_depth)
        new = {
            "features": placed(state["features"], nodes, splits, feature.astype(jnp.int32)),
            "thresholds": placed(state["thresholds"], nodes, splits, jnp.asarray(self.edges)[feature, edge]),
            "values": values,
            "tree": jnp.where(goes_deeper, tree, tree + 1),
            "level": jnp.where(goes_deeper, level + 1, 0),
            "first_hessian": first_hessian,
        }
        # A round whose clients had no rows in the open nodes is waited out, as one without messages.
        has_rows = jnp.where(is_open, node.hessian, 0).sum() > 0
        advances = has_rows & (tree < self.num_trees)
        return jax.tree.map(lambda old, x: jnp.where(advances, x, old), state, new)

    def _is_enough(self, sums: _Sums) -> Array:
        """Whether a node, or a side of a split, has the least hessian. Noise may leave one below 0."""
        return (sums.hessian > 0) & reaches(sums.hessian, self.least_share)

    def _divisor(self, sums: _Sums) -> Array:
        """H + lambda; 1 where the sums are not used, because H is not enough."""
        return jnp.where(self._is_enough(sums), sums.hessian + self.penalty, 1)

    def _score(self, sums: _Sums) -> Array:
        """Computes G^2 / (H + lambda), twice what the best value of a leaf takes off the objective."""
        return jnp.square(sums.gradient) / self._divisor(sums)

    def _value(self, sums: _Sums) -> Array:
        """Computes the value of a leaf: the learning rate times -G / (H + lambda)."""
        return -self.learning_rate * sums.gradient / self._divisor(sums)


def _first_node(level: Array) -> Array:
    """Returns the first node of a level, 2^level - 1."""
    return (jnp.int32(1) << level) - 1

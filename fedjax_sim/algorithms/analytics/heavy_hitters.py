"""Heavy hitters: a tree of prefixes grows over rounds, along the symbols for which many clients vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.algorithms.analytics.statistic import (
    StatisticOptions,
    columns_of,
    labels_of,
    random_row_mask,
    statistic,
    summaries,
)
from fedjax_sim.prng import stream
from fedjax_sim.types import Algorithm, Array, ParamsKind, PyTree, Sampler, ServerUpdate
from fedjax_sim.types.shares import reaches
from fedjax_sim.validate import FromData, Integer, OpenShare, PositiveInt, named_arguments

MOST_CELLS = 1 << 22  # numbers of a message
NO_PREFIX = -1  # stands for a prefix in an empty place


@named_arguments
def heavy_hitters(
    sampler: Sampler,
    *,
    threshold: OpenShare = 0.01,
    bits_per_round: Annotated[int, Integer(1, 16)] = 4,
    num_prefixes: PositiveInt | None = None,
    num_symbols: Annotated[Annotated[int, Integer(2, 2**31 - 1)] | None, FromData("num_categories")] = None,
    symbols: Callable | None = None,
    **options: Unpack[StatisticOptions],
) -> Algorithm:
    """Makes federated heavy hitters: finds the symbols for which at least a share of the clients vote.

    A symbol is an integer of B bits. In round t = 1, 2, ... each client draws one of its symbols and looks whether its
    first (t - 1) b bits are one of at most L prefixes, which it received. If so, it votes for the prefix of t b bits,
    one of L 2^b. The server keeps the prefixes with at least the threshold's share of votes, at most the first L. After
    T = ceil(B / b) rounds the prefixes are symbols, and further rounds change nothing.

    Args:
      sampler: draws the cohorts. Rounds should have cohorts of their own, not the same one: who votes is drawn anew.
      threshold: theta in (0, 1), a share of the cohort. With noise of standard deviation s on a share of votes, take a
        threshold well above s sqrt(2 log(T L 2^b)), since noise alone must not pass it.
      bits_per_round: b. More bits need fewer rounds and longer messages.
      num_prefixes: L; None for floor(2 / theta). With at least 1 / theta prefixes and without noise, no prefix that
        reaches the threshold lacks a place.
      feature_names, label_names, units: as in `kmeans`; the answer names the symbols.
      num_symbols: symbols are in [0, num_symbols), which gives B. None is refused; a config takes the number of
        categories of y.
      symbols: (examples) -> [n] int32, the symbol of each row; None for the labels y, of which a row may have several,
        as a text has tokens. Symbols below 0 are padding.
      transform: of the messages, which have norm 1 or 0: a clip norm of 1 loses nothing. One that remembers at the
        client is refused, since each round asks for other prefixes.
      aggregator: a mean over the cohort, such as `fixed_mean(m)` or `modular_sum(m)` for m messages; their mean by
        default. The threshold is a share of what it divides by.
      nonfinite, plan, mesh: as in `federated`.

    The unit of privacy is a client with all its symbols. With noise in the transform, a run states its epsilon.

    Returns: an Algorithm whose `params` are {"symbols": [L] int32, "shares": [L] float32}: the symbols that were found,
      by falling shares of votes, then -1. Before round T there are none. `init` takes () alone. Evaluations have as
      `loss` the share of rows, or of their labels, whose symbol was not found.

    Raises: ValueError for messages of more than 2^22 numbers, and for symbols whose number is not known.

    Guarantees: with all clients and without noise, exactly the symbols with at least the threshold's share of votes are
    found (tests/algorithms/analytics/test_heavy_hitters.py::test_everybody_together_finds_all_and_no_others). With
    random cohorts and noise, a symbol is missed at most at the rate of `theory.heavy_hitter_miss_rate`
    (::test_misses_are_as_rare_as_stated). A symbol with exactly the threshold's share is found
    (tests/laws/test_shares.py::test_heavy_hitters_at_the_threshold).

    References: Zhu, Kairouz, McMahan, Sun and Li 2020 (TrieHH; its votes are thresholded as here, without noise);
    Bassily, Nissim, Stemmer and Thakurta 2017 (section 3, TreeHist).
    """
    if num_symbols is None:
        hint = "Classes and tokens are symbols; numbers are not."
        validate.fail("num_symbols", "the number of symbols that there may be", None, hint)
    tree = _tree(threshold, bits_per_round, num_prefixes, num_symbols)
    columns = columns_of(options)

    def symbols_of(examples: PyTree, mask: Array) -> tuple[Array, Array]:
        """Returns all symbols of rows and which of them count, ([v] int32, [v] bool)."""
        if symbols is None:
            values, counted = labels_of(examples, mask)
        else:
            values, counted = symbols(examples), mask
        return values, counted & (values >= 0) & (values < num_symbols)

    def summarise(key, broadcast, examples, mask):
        values, counted = symbols_of(examples, mask)
        chosen = random_row_mask(stream(key, "vote"), counted)
        symbol = jnp.where(chosen, values, 0).sum(dtype=jnp.int32)
        return {"votes": tree.votes(broadcast, symbol) * chosen.any().astype(jnp.float32)}, {}

    def start(params):
        if jax.tree.leaves(params):
            validate.fail("params", "(), for the tree starts at its root", type(params).__name__)
        return tree.root()

    def loss_fn(params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        num_rows = jax.tree.leaves(examples)[0].shape[0]
        values, counted = symbols_of(examples, jnp.ones(num_rows, bool))
        is_missed = counted & ~(values[:, None] == params["symbols"][None]).any(1)
        weights = counted.reshape(num_rows, -1).sum(1).astype(jnp.float32)
        missed = is_missed.reshape(num_rows, -1).sum(1).astype(jnp.float32)
        return {"loss": missed / jnp.maximum(weights, 1), "weight": weights}

    server = ServerUpdate(
        start,
        lambda state: {"level": state["level"], "prefixes": state["prefixes"]},
        lambda key, aggregate, state: tree.grown(aggregate["votes"].astype(jnp.float32), state),
        tree.found,
        takes=lambda params: {"votes": jax.ShapeDtypeStruct((tree.num_cells,), jnp.float32)},
        params_kind=ParamsKind.ANSWER,
    )

    def answer(params):
        found = _without_padding(params)
        if columns.label_names is None:
            return found
        return {"names": np.array([columns.label_names[symbol] for symbol in found["symbols"]])} | found

    return statistic(sampler, summaries(summarise), server, loss_fn, options, asks_anew=True, answer=answer)


def _without_padding(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the symbols that were found, and their shares."""
    is_found = params["symbols"] != NO_PREFIX
    return {name: params[name][is_found] for name in ("symbols", "shares")}


class _Tree(NamedTuple):
    """A tree of prefixes. Its state holds the level, the prefixes of this level [L], and their shares of votes [L]."""

    threshold: float
    bits: int  # b, by which a prefix grows in a round
    num_rounds: int  # T, the level at which prefixes are symbols
    num_places: int  # L
    num_symbols: int

    @property
    def num_children(self) -> int:
        """2^b, the prefixes of the next level that begin with one of this level."""
        return 1 << self.bits

    @property
    def num_cells(self) -> int:
        """The numbers of a message: one for each child of each place."""
        return self.num_places * self.num_children

    def root(self) -> dict[str, Array]:
        """Returns the state before the first round, which holds the empty prefix alone."""
        prefixes = jnp.full(self.num_places, NO_PREFIX, jnp.int32).at[0].set(0)
        return {"level": jnp.int32(0), "prefixes": prefixes, "shares": jnp.zeros(self.num_places, jnp.float32)}

    def bits_after(self, level: Array) -> Array:
        """Returns how many bits of a symbol follow after those of a prefix of the next level."""
        return self.bits * (self.num_rounds - 1 - jnp.minimum(level, self.num_rounds - 1))

    def votes(self, broadcast: dict[str, Array], symbol: Array) -> Array:
        """Returns a symbol's vote, [L 2^b] with at most a single 1: in its prefix's place, for its next bits."""
        child = symbol >> self.bits_after(broadcast["level"])
        is_own = broadcast["prefixes"] == child >> self.bits
        is_next = jnp.arange(self.num_children) == (child & (self.num_children - 1))
        is_open = broadcast["level"] < self.num_rounds  # after the last level there is nothing to vote for
        return (is_own[:, None] & is_next[None] & is_open).astype(jnp.float32).reshape(-1)

    def grown(self, shares: Array, state: dict[str, Array]) -> dict[str, Array]:
        """Returns the state after a round, whose prefixes are those that pass the threshold, by falling shares.

        Args:
          shares: [L 2^b], the share of votes of each child of each prefix, perhaps with noise.
          state: {"level", "prefixes", "shares"} before the round.
        """
        children = (state["prefixes"][:, None] << self.bits) + jnp.arange(self.num_children)[None]
        children = children.reshape(-1)
        # Noise may vote for children of an empty place, and for symbols that do not exist.
        exists = jnp.repeat(state["prefixes"] >= 0, self.num_children)
        exists &= children <= (self.num_symbols - 1) >> self.bits_after(state["level"])
        best, cells = jax.lax.top_k(jnp.where(exists & reaches(shares, self.threshold), shares, -1), self.num_places)
        is_kept = best >= 0
        new = {
            "level": state["level"] + 1,
            "prefixes": jnp.where(is_kept, children[cells], NO_PREFIX),
            "shares": jnp.where(is_kept, best, 0),
        }
        is_done = state["level"] >= self.num_rounds
        return jax.tree.map(lambda old, x: jnp.where(is_done, old, x), state, new)

    def found(self, state: dict[str, Array]) -> dict[str, Array]:
        """Returns the symbols that were found, and their shares of votes; none before the last level."""
        is_done = state["level"] >= self.num_rounds
        return {
            "symbols": jnp.where(is_done, state["prefixes"], NO_PREFIX),
            "shares": jnp.where(is_done, state["shares"], 0),
        }


def _tree(threshold: float, bits: int, num_prefixes: int | None, num_symbols: int) -> _Tree:
    """Makes the tree for symbols in [0, num_symbols); refuses one whose messages are too long."""
    num_bits = max(1, (num_symbols - 1).bit_length())
    num_places = math.floor(2 / validate.as_written(threshold)) if num_prefixes is None else num_prefixes
    tree = _Tree(threshold, bits, -(-num_bits // bits), min(num_places, num_symbols), num_symbols)
    if tree.num_cells > MOST_CELLS:
        hint = "Take a larger threshold, fewer prefixes, or fewer bits in a round."
        validate.fail("num_prefixes", f"messages of at most {MOST_CELLS:,} numbers", tree.num_cells, hint)
    return tree

"""How much a client trains in a round, in which batches, and the weight of its report: one record for all solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

__all__ = ["LocalWork", "work"]


MOST_EXAMPLES = 2**31 - 1  # stands for all of a client's examples in one batch


class LocalWork(NamedTuple):
    """The local work of a round; made by `work`, which checks the options."""

    num_steps: int | None  # exactly one of this and num_epochs
    num_epochs: int | None
    batch_size: int | None  # None = all examples at each step
    weighting: str | None  # "examples" or "uniform"; None = as in the solver's paper
    shuffle: bool

    def weight_facts(self, default: str) -> dict[str, bool]:
        """What a `ClientUpdate` states of its reports' weights; `default` is the weighting of the solver's paper."""
        return {"uniform_weights": not self.weighs_examples(default), "needs_weights": self.weighting == "examples"}

    def weighs_examples(self, default: str) -> bool:
        """Whether a report's weight is that of its examples; `default` is the weighting of the solver's paper."""
        return (self.weighting or default) == "examples"

    def minibatch_steps(self) -> int | Callable | None:
        """`ClientUpdate.num_steps`: steps, or (examples) -> [] int32 steps; None where every step reads all examples.

        Clients are sorted by it, so that those under one `vmap` take about as many steps.
        """
        if self.batch_size is None or self.num_epochs is None:
            return None if self.batch_size is None else self.num_steps
        return lambda examples: self.num_epochs * jnp.maximum(-(-examples // self.batch_size), 1)

    def all_steps(self) -> int | Callable:
        """`ClientUpdate.all_steps`: steps of the whole local work, or (examples) -> [] int32 steps."""
        if self.num_epochs is None:
            return self.num_steps
        return lambda examples: self.num_epochs * jnp.maximum(-(-examples // (self.batch_size or MOST_EXAMPLES)), 1)

    def most_steps(self, size: int, rows: int) -> int:
        """The most steps that a client with `rows` rows takes in batches of `size`, for a loop's static bound.

        Raises: ValueError for more than 2^24 steps, which float32 could not count.
        """
        if self.num_epochs is None:
            return self.num_steps
        most = self.num_epochs * -(-rows // size)
        if most > validate.MOST_STEPS:
            validate.fail("num_epochs", f"at most {validate.MOST_STEPS} steps", most, "Make larger batches.")
        return most

    def own_steps(self, steps_per_epoch: Array, share: Array | None) -> Array | int:
        """The steps that one client takes.

        Args:
          steps_per_epoch: [] int32.
          share: `ClientData.work`: [] a share in (0, 1] of the steps (float), or their number (int32); None = all.

        Returns: [] int32 (an int where it is static), at least 1 and at most the whole local work.

        Guarantees: tests/client/test_stragglers.py::test_shares_and_numbers_of_steps.

        >>> work(num_steps=10).own_steps(jnp.int32(3), jnp.float32(0.25)).tolist()
        3
        """
        steps = self.num_steps if self.num_epochs is None else self.num_epochs * steps_per_epoch
        if share is None:
            return steps
        if jnp.issubdtype(share.dtype, jnp.integer):
            return jnp.clip(share, 1, steps)
        return jnp.clip(jnp.ceil(share * jnp.asarray(steps, share.dtype)).astype(jnp.int32), 1, steps)


@validate.named_arguments
def work(
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str | None = None,
    shuffle: bool = True,
) -> LocalWork:
    """How much a client trains in a round, for every solver in `client`.

    Args:
      num_steps, num_epochs: K steps or E epochs, exactly one of the two, in [1, 2^24]. E epochs of a client with n
        examples are E ceil(n/b) steps, so clients of different sizes take different numbers of steps. For clients that
        complete less, see `sampling.with_stragglers` and `sampling.with_local_steps`.
      batch_size: b, at least 1; None for all examples at each step.
      weighting: the weight that the client reports: "examples" (n, or the sum of its examples' "weight" where the loss
        gives one, such as tokens) or "uniform" (1); 0 without examples. None: as in the solver's paper, if the
        aggregator takes weights. Beside one that takes none, "examples" is refused when the round is built.
      shuffle: each epoch in a fresh random order; False: in the order in which the examples are stored.

    Returns: `LocalWork`, the argument `work` of the solvers.

    Raises: ValueError, TypeError for options out of range, with the option's name.

    Guarantees: each epoch visits each example once, and its last batch may be partial
    (tests/client/test_local_sgd.py::test_an_epoch_visits_each_example_once); without shuffling in the stored order
    (::test_stored_order).

    References: McMahan et al. 2017, algorithm 1 (E and B of ClientUpdate).

    >>> work(num_epochs=2, batch_size=10).minibatch_steps()(25).tolist()
    6
    """
    if (num_steps is None) == (num_epochs is None):
        validate.fail("num_steps, num_epochs", "exactly one of the two", (num_steps, num_epochs))
    validate.steps(*(("num_epochs", num_epochs) if num_steps is None else ("num_steps", num_steps)))
    if batch_size is not None:
        validate.integer("batch_size", batch_size, hint="Leave it out for full-batch steps.")
    validate.one_of("weighting", weighting, (None, "examples", "uniform"))
    validate.one_of("shuffle", shuffle, (True, False))
    return LocalWork(num_steps, num_epochs, batch_size, weighting, shuffle)

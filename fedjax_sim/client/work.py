"""How much a client trains in a round, in which batches, and what its report weighs: one record for all solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array

__all__ = ["LocalWork", "work"]


MOST_EXAMPLES = 2**31 - 1  # all of a client's, in one batch


class LocalWork(NamedTuple):
    """The local work of a round; made by `work`, which checks it."""

    num_steps: int | None
    num_epochs: int | None
    batch_size: int | None
    weighting: str | None
    shuffle: bool

    def weighs_examples(self, default: str) -> bool:
        """Whether reports weigh their examples; `default` is the weighting of the solver's paper."""
        return (self.weighting or default) == "examples"

    def minibatch_steps(self) -> int | Callable | None:
        """`ClientUpdate.num_steps`: steps, or (examples) -> steps; None where every step reads all examples."""
        if self.batch_size is None or self.num_epochs is None:
            return None if self.batch_size is None else self.num_steps
        return lambda examples: self.num_epochs * jnp.maximum(-(-examples // self.batch_size), 1)

    def all_steps(self) -> int | Callable:
        """`ClientUpdate.all_steps`: steps, or (examples) -> steps."""
        if self.num_epochs is None:
            return self.num_steps
        return lambda examples: self.num_epochs * jnp.maximum(-(-examples // (self.batch_size or MOST_EXAMPLES)), 1)

    def most_steps(self, size: int, rows: int) -> int:
        """The most that a client with so many rows takes, in batches of `size`."""
        if self.num_epochs is None:
            return self.num_steps
        most = self.num_epochs * -(-rows // size)
        if most > validate.MOST_STEPS:
            validate.fail("num_epochs", f"at most {validate.MOST_STEPS} steps", most, "Make larger batches.")
        return most

    def own_steps(self, steps_per_epoch: Array, share: Array | None) -> Array | int:
        """[] steps that a client takes; `share` as `ClientData.work`: a share of them, or their number; None = all."""
        steps = self.num_steps if self.num_epochs is None else self.num_epochs * steps_per_epoch
        if share is None:
            return steps
        if jnp.issubdtype(share.dtype, jnp.integer):
            return jnp.clip(share, 1, steps)
        return jnp.clip(jnp.ceil(share * steps).astype(jnp.int32), 1, steps)


@validate.named_arguments
def work(
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str | None = None,
    shuffle: bool = True,
) -> LocalWork:
    """What a client does in a round, for every solver in `client`.

    Args:
      num_steps: K, or `num_epochs`: E, exactly one. E epochs are E ceil(n/b) steps, so unequal clients then take
        unequal numbers of steps. Of a cohort that gets less done, see `sampling.with_stragglers`, `with_local_steps`.
      batch_size: b; None for all examples at each step.
      weighting: the weight that the client reports: "examples" (n, or the sum of its examples' "weight" where the loss
        gives one, such as tokens) or "uniform" (1); 0 without examples. None: as the solver's paper has it.
      shuffle: each epoch in a fresh random order; False: in the order in which the examples are stored.

    Raises: ValueError, TypeError for options out of range, with the option's name.

    Guarantees: each epoch visits each example once, its last batch may be partial
    (tests/client/test_local_sgd.py::test_an_epoch_visits_each_example_once), in the stored order without shuffling
    (::test_stored_order).

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

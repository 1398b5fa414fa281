"""`LocalWork` says how much a client trains in a round, in which batches, and with which weight it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, ClientFacts
from fedjax_sim.types.shares import steps_of_work
from fedjax_sim.validate import Default

MOST_EXAMPLES = 2**31 - 1  # stands for all of a client's examples in one batch


class LocalWork(NamedTuple):
    """The local work of a round, for every solver; made by `work`, which checks the options."""

    num_steps: int | None  # exactly one of num_steps and num_epochs is given
    num_epochs: int | None
    batch_size: int | None  # None = all examples at each step
    weighting: str | None  # "examples" or "uniform"; None = "examples" if the aggregator takes weights
    shuffle: bool  # a fresh random order in each epoch, or the stored order

    def facts(self) -> ClientFacts:
        """The facts that a `ClientUpdate` with this work states of its steps and of its reports' weights."""
        return ClientFacts(
            num_steps=self.minibatch_steps(),
            all_steps=self.all_steps(),
            uniform_weights=not self.weighs_examples(),
            needs_weights=self.weighting == "examples",
        )

    def weighs_examples(self) -> bool:
        """Whether a report weighs as much as the client's examples; if not, it weighs 1."""
        return self.weighting != "uniform"

    def minibatch_steps(self) -> int | Callable | None:
        """`ClientFacts.num_steps`: steps, or (examples) -> [] int32 steps; None where every step reads all examples.

        Clients are sorted by this number, so that the clients under one `vmap` take about as many steps.
        """
        # Without a batch size every step reads all examples, so the number of steps says nothing about the work.
        return None if self.batch_size is None else self.all_steps()

    def all_steps(self) -> int | Callable:
        """`ClientFacts.all_steps`: steps of the whole local work, or (examples) -> [] int32 steps."""
        num_epochs = self.num_epochs
        if num_epochs is None:
            return self._stated_steps
        return lambda examples: num_epochs * jnp.maximum(-(-examples // (self.batch_size or MOST_EXAMPLES)), 1)

    def most_steps(self, size: int, rows: int) -> int:
        """The static upper bound on the steps of a client.

        Args:
          size: rows of a batch.
          rows: rows of the client, padding included.

        Raises: ValueError for more than 2^24 steps, which float32 could not count.
        """
        if self.num_epochs is None:
            return self._stated_steps
        max_steps = self.num_epochs * -(-rows // size)
        if max_steps > validate.MOST_STEPS:
            validate.fail("num_epochs", f"at most {validate.MOST_STEPS} steps", max_steps, "Make larger batches.")
        return max_steps

    def own_steps(self, steps_per_epoch: Array, share: Array | None) -> Array | int:
        """The number of steps that one client takes, partial work included.

        Args:
          steps_per_epoch: [] int32, of this client.
          share: `ClientData.work`: [] a share in (0, 1] of the steps (float), or a number of steps (int32); None = all
            steps. A share is rounded up.

        Returns: [] int32 (an int where it is static), at least 1 and at most the whole local work.

        Guarantees: a share of the steps, computed in the share's dtype, is rounded up to whole steps, and a number of
        steps is cut to the whole work (tests/client/test_stragglers.py::test_shares_and_numbers_of_steps). k / K of K
        steps are k steps (tests/laws/test_shares.py::test_a_share_of_steps).

        >>> work(num_steps=10).own_steps(jnp.int32(3), jnp.float32(0.25)).tolist()
        3
        """
        steps = self._stated_steps if self.num_epochs is None else self.num_epochs * steps_per_epoch
        return steps if share is None else steps_of_work(share, steps)

    @property
    def _stated_steps(self) -> int:
        """The number of steps of work that is not stated in epochs."""
        assert self.num_steps is not None, "`local_training` refuses work without steps and epochs"
        return self.num_steps


class LocalSteps(TypedDict, total=False):
    """Options of algorithms whose clients train: those of `work` without `weighting`, the weight of a report."""

    num_steps: Annotated[int | None, Default(None)]
    num_epochs: Annotated[int | None, Default(None)]
    batch_size: Annotated[int | None, Default(None)]
    shuffle: Annotated[bool, Default(True)]


class LocalOptions(LocalSteps, total=False):
    """Options of algorithms whose clients train and report a weight: those of `work`."""

    weighting: Annotated[str | None, Default(None)]


def local_work(options: Mapping[str, Any]) -> tuple[LocalWork, dict[str, Any]]:
    """Splits an algorithm's options into the local work that they describe and all other options.

    Args:
      options: by name; those that `work` knows describe the local work.

    Returns: (`LocalWork`, the other options by name).

    Raises: as `work`.

    >>> local_work({"num_steps": 5, "batch_size": 8, "nonfinite": "error"})[1]
    {'nonfinite': 'error'}
    """
    work_names = LocalOptions.__annotations__.keys()
    work_options = {name: value for name, value in options.items() if name in work_names}
    other_options = {name: value for name, value in options.items() if name not in work_names}
    return work(**work_options), other_options


@validate.named_arguments
def work(
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: Literal["examples", "uniform"] | None = None,
    shuffle: bool = True,
) -> LocalWork:
    """Describes how much a client trains in a round, for every solver in `client`.

    Args:
      num_steps, num_epochs: K steps or E epochs, in [1, 2^24]; the other one is None. E epochs of a client with n
        examples are E ceil(n/b) steps, so clients of different sizes take different numbers of steps. For clients that
        complete less, see `sampling.with_stragglers` and `sampling.with_local_steps`.
      batch_size: b, at least 1; None for all examples at each step.
      weighting: the weight that the client reports. "examples": n, or the sum of its examples' "weight" where the loss
        gives one, such as tokens. "uniform": 1. Both are 0 for a client without examples. None: "examples", if the
        aggregator takes weights. With an aggregator that takes none, an explicit "examples" is refused when the round
        is built.
      shuffle: True visits the examples of each epoch in a fresh random order; False in the order in which they are
        stored.

    Returns: `LocalWork`, the argument `work` of the solvers.

    Raises: ValueError, TypeError for options out of range, with the option's name.

    Guarantees: each epoch visits each example once, and its last batch may be partial
    (tests/client/test_local_sgd.py::test_an_epoch_visits_each_example_once); without shuffling, examples are visited in
    the stored order (::test_stored_order).

    References: McMahan et al. 2017, algorithm 1 (E and B of ClientUpdate).

    >>> work(num_epochs=2, batch_size=10).minibatch_steps()(25).tolist()
    6
    """
    if (num_steps is None) == (num_epochs is None):
        validate.fail("num_steps, num_epochs", "exactly one of the two", (num_steps, num_epochs))
    validate.steps(*(("num_epochs", num_epochs) if num_steps is None else ("num_steps", num_steps)))
    if batch_size is not None:
        validate.integer("batch_size", batch_size, hint="Leave it out for full-batch steps.")
    return LocalWork(num_steps, num_epochs, batch_size, weighting, shuffle)

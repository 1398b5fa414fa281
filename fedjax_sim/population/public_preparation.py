"""What was learnt from all clients' rows to prepare their inputs can be taken as public, which statements then say."""

from __future__ import annotations

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.records import with_records_changed
from fedjax_sim.types import Learned


@validate.named_arguments
def with_public_preparation(data: FederatedData) -> FederatedData:
    """What prepares the inputs is taken as known beforehand, though it was learnt from the clients' rows without noise.

    An example is a mean by which every client's rows are standardised. Beside noise it is refused, because one client
    can change the inputs of all others by it. With this wrapper it is not: every statement of privacy then says what it
    takes as public, and what one client can do. The statement does not cover that.

    Args:
      data: any data set with such a record (`FederatedData.learned`).

    Returns: the same data set, whose record says that it is taken as public. In a config it goes around all other
    wrappers, wherever the table stands.

    Raises: TypeError if `data` is not a `FederatedData`. ValueError without anything to take as public.

    Guarantees: every statement names it (tests/privacy/test_preparation.py::test_what_is_taken_as_public_is_said).

    >>> from fedjax_sim.population import breast_cancer
    >>> [record.is_public for record in with_public_preparation(breast_cancer()).learned]
    [True]
    """
    if not isinstance(data, FederatedData):
        hint = "Of a population alone, state `learned` yourself: population.stored(..., learned=())."
        validate.fail("data", "a FederatedData", type(data).__name__, hint, TypeError)
    if not data.learned:
        hint = "Leave the wrapper out."
        validate.fail("data", "a record of what was learnt from the clients' rows", data.learned, hint)

    def taken(records: tuple[Learned, ...] | None) -> tuple[Learned, ...] | None:
        return None if records is None else tuple(record._replace(is_public=True) for record in records)

    return data._replace(train=with_records_changed(data.train, taken))

"""What secure aggregation costs, against the figures of its papers."""

from __future__ import annotations

import pytest

from fedjax_sim.aggregation.secure.cost import secure_sum_cost


@pytest.mark.parametrize(
    ("clients", "dimension", "expansion"), [(2**10, 2**20, 1.73), (2**14, 2**24, 1.98), (500, 100_000, None)]
)
def test_expansion_factors(clients, dimension, expansion):
    """Bonawitz et al. 2017, section 1, for the first two; and the formula of section 7.1, in one line.

    Catches shares counted once, and a ring that does not hold the sum.
    """
    ring = (clients * (2**16 - 1)).bit_length()
    found = secure_sum_cost(clients, dimension, ring, input_bits=16)
    total = 2 * clients * 256 + (5 * clients - 4) * 256 + dimension * ring
    assert found.client_up_bits + found.client_down_bits == total
    assert found.expansion == total / (16 * dimension)
    if expansion is not None:
        assert round(found.expansion, 2) == expansion


def test_a_sparse_graph_costs_less():
    """Catches all-pairs masks on a circle of neighbours (T18)."""
    whole, sparse = secure_sum_cost(10_000, 650, 30), secure_sum_cost(10_000, 650, 30, neighbours=100)
    assert whole.client_mask_words == 10_000 * 650 and sparse.client_mask_words == 101 * 650
    assert sparse.client_up_bits < whole.client_up_bits / 10
    lost = secure_sum_cost(10_000, 650, 30, neighbours=100, dropped=10)
    assert lost.server_mask_words == (9_990 + 10 * 100) * 650 and lost.server_bits < sparse.server_bits

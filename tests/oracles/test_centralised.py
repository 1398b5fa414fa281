"""One full-batch step of everybody is one step of centralised gradient descent."""

from __future__ import annotations

from tests.laws import laws


def test_fedavg_and_fedsgd_are_gradient_descent():
    """Catches a wrong sign, a wrong divisor, weights that are not numbers of examples; 50 steps to 1e-6."""
    laws.one_step_of_everybody_is_centralised()

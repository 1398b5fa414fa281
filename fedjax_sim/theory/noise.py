"""This module gives the variance that privacy noise leaves on the released mean, summed over coordinates.

Let z be the multiplier, C the clip norm and m the number of clients. Each coordinate of the mean has the variance (z C
/ m)^2 if noise is added once to the sum (central). The same holds for shares that add up to this noise (distributed).
The variance is (z C)^2 / m if every client adds its own noise (local). On the sum, central noise is O(1) and local
noise is O(m).

The variances are compared at equal z, not at equal epsilon, because local privacy gains nothing from sampling.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, Number, Positive, PositiveInt


@validate.named_arguments
def noise_variance(
    multiplier: NonNegative,
    clip_norm: Positive,
    num_clients: PositiveInt,
    *,
    num_values: PositiveInt = 1,
    place: Literal["central", "distributed", "local"] = "central",
    replace_one: bool = False,
) -> float:
    """Computes the variance that privacy noise leaves on the released mean, E |noise|^2.

    It is d (z C / m)^2 for central or distributed noise, and d (z C)^2 / m for local noise.

    Args:
      multiplier: z >= 0, standard deviation over sensitivity.
      clip_norm: C > 0.
      num_clients: m, by which the sum is divided.
      num_values: d, the number of coordinates.
      place: "central", "distributed" (shares that add up to the central noise) or "local".
      replace_one: True if the sensitivity of one message is 2 C (a client's message is replaced by another); False if
        it is C.

    Guarantees: The variance is (z C / m)^2 or (z C)^2 / m, with log-log slopes -2 and -1 in m
    (tests/theory/test_quantization.py::test_noise_of_the_mean). It is the variance of the real transforms' noise
    (::test_noise_is_that_of_the_transforms).

    References: Kairouz et al. 2021, section 4; McMahan et al. 2018, algorithm 1 (central).

    >>> noise_variance(1.0, 1.0, 100), noise_variance(1.0, 1.0, 100, place="local")
    (0.0001, 0.01)
    """
    deviation = multiplier * clip_norm * (2 if replace_one else 1)
    return num_values * (deviation**2 / num_clients if place == "local" else (deviation / num_clients) ** 2)


@validate.named_arguments
def local_to_central_ratio(num_clients: PositiveInt, *, replace_one: bool = False) -> int:
    """Computes the ratio of the variance of local noise on the mean to that of central noise: m, or 4 m.

    Args:
      num_clients: m.
      replace_one: True if local noise is scaled to a replaced message (2 C), and central noise to an absent message
        (C).

    >>> local_to_central_ratio(100), local_to_central_ratio(100, replace_one=True)
    (100, 400)
    """
    return num_clients * (4 if replace_one else 1)


@validate.named_arguments
def noise_floor(
    variance: NonNegative, contraction: Annotated[float, Number(-1, 1, open_low=True, open_high=True)]
) -> float:
    """Computes the error floor that noise on each round adds to E |w - w*|^2: variance / (1 - r^2).

    Args:
      variance: of the released mean, as from `noise_variance`, >= 0.
      contraction: r in (-1, 1), the factor of a round.

    Guarantees: A simulated recursion converges to the floor
    (tests/theory/test_quantization.py::test_floor_of_a_simulated_recursion).

    >>> noise_floor(0.75, 0.5)
    1.0
    """
    return variance / (1 - contraction**2)

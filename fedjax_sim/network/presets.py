"""This module holds devices for the two settings of federated learning: a few data centres, or millions of phones."""

from __future__ import annotations

from fedjax_sim import validate
from fedjax_sim.network.availability import diurnal
from fedjax_sim.network.devices import heterogeneous
from fedjax_sim.network.distributions import lognormal
from fedjax_sim.types import Devices
from fedjax_sim.validate import PopulationSize


def cross_silo(population_size: PopulationSize, *, seed: int = 0) -> Devices:
    """Makes devices of two to a hundred organisations with data-centre machines and fast links.

    Kairouz et al. state that such clients are few, reliable and almost always available. The numbers are this
    package's: training at 10 Tflops/s (median, sigma 0.3), 1 Gbit/s in each direction, 20 ms, 500 W, and times that
    jitter by 5 %. Here clients are always available.

    Args:
      population_size: N in [2, 1000]. Let all clients take part in every round (`sampling.full`).
      seed: of the draws.

    Returns: `Devices`.

    Guarantees: Speeds, links and availability are as stated (tests/network/test_presets.py::test_cross_silo).

    References: Kairouz et al. 2021, table 1.

    >>> cross_silo(10).availability is None
    True
    """
    hint = "More clients than organisations: see cross_device, or heterogeneous."
    validate.integer("population_size", population_size, 2, 1000, hint=hint)
    return heterogeneous(
        population_size,
        speed=lognormal(1e13, 0.3),
        bandwidth_down=1e9 / 8,
        bandwidth_up=1e9 / 8,
        latency=0.02,
        compute_watts=500.0,
        jitter=0.05,
        seed=seed,
    )


def cross_device(population_size: PopulationSize, *, seed: int = 0) -> Devices:
    """Makes devices of phones with very different speeds and slow links, available mostly at night.

    From the literature: 55 Mbit/s down and 18.9 Mbit/s up (mean US broadband, Konecny et al.; medians here), and four
    times as many phones at the best hour as at the worst (Bonawitz et al.).

    This package's own: training at 5 Gflops/s (median); sigma 0.8 for speed and 1 for bandwidth, which is the spread
    over more than an order of magnitude that Lai et al. show; 50 ms; 4 W, and 1 W for the radio; times that jitter by
    20 %; and a tenth of all phones available on average.

    Args:
      population_size: N, up to billions; nothing is stored for N clients. Invite a small cohort of available clients,
        with more clients than are needed: 6 to 10 % of phones drop out of a round (Bonawitz et al.), see
        `sampling.with_dropout`.
      seed: of the draws.

    Returns: `Devices`.

    Guarantees: Speeds, links and availability are as stated (tests/network/test_presets.py::test_cross_device).

    References: Bonawitz et al. 2019, sections 2.2 and 9; Konecny et al. 2016, section 1; Kairouz et al. 2021, table 1;
    Lai et al. 2022 (FedScale), section 3.2.

    >>> import numpy as np
    >>> cross_device(1_000_000).availability.rate(np.arange(2)).tolist()
    [0.1, 0.1]
    """
    return heterogeneous(
        population_size,
        speed=lognormal(5e9, 0.8),
        bandwidth_down=lognormal(55e6 / 8, 1.0),
        bandwidth_up=lognormal(18.9e6 / 8, 1.0),
        latency=0.05,
        compute_watts=4.0,
        radio_watts=1.0,
        jitter=0.2,
        availability=diurnal(0.1, 0.06, num_zones=1, seed=seed),
        seed=seed,
    )

"""Named algorithms: compositions of the rooms' parts, nothing else.

Every recipe takes the loss, a sampler and the local work, and returns an `Algorithm`; keywords after those go to
`federated` (`aggregator`, `transform`, `nonfinite`, `plan`, `mesh`).
"""

from __future__ import annotations

from collections.abc import Callable

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.federated import federated
from fedjax_sim.types import Aggregator, Algorithm, Sampler

__all__ = ["fedadagrad", "fedadam", "fedavg", "fedavgm", "fednova", "fedprox", "fedsgd", "fedyogi", "scaffold"]


def fedsgd(
    loss_fn: Callable,
    sampler: Sampler,
    *,
    learning_rate: float = 0.1,
    aggregator: Aggregator | None = None,
    **options,
) -> Algorithm:
    """One full-batch gradient of each client, averaged by examples; the server takes the step.

    Guarantees: with everybody present it is centralised gradient descent (tests/oracles/test_centralised.py).

    References: McMahan et al. 2017, section 2 (FederatedSGD).
    """
    validate.positive("learning_rate", learning_rate)
    return federated(
        sampler,
        client.local_sgd(loss_fn, optax.sgd(1.0), num_steps=1),
        aggregation.mean() if aggregator is None else aggregator,
        server.optimizer(optax.sgd(learning_rate)),
        **options,
    )


def fedavg(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    **options,
) -> Algorithm:
    """Federated averaging: local training, then the mean of the local models by examples.

    Args:
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `weighting` as in `client.local_sgd`.
      server_optimizer: optax; SGD with rate 1 by default, which replaces the model by the mean of the local models.

    Guarantees: matches a NumPy oracle (tests/oracles/test_fedavg.py) and, on quadratics, its closed-form biased fixed
    point (tests/oracles/test_fixed_points.py).

    References: McMahan et al. 2017, algorithm 1; Reddi et al. 2021, algorithm 1 with a server optimiser.
    """
    work = client.local_sgd(
        loss_fn, optimizer, num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, weighting=weighting
    )
    table = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return federated(sampler, work, table, step, **options)


def fedprox(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: float = 0.1,
    aggregator: Aggregator | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    **options,
) -> Algorithm:
    """FedAvg with a proximal term (coefficient / 2) |w - w_t|^2 in each local objective.

    Guarantees: coefficient 0 is FedAvg bit for bit (tests/client/test_proximal.py); the fixed points of inventory row
    D7 (tests/oracles/test_fixed_points.py).

    References: Li et al. 2020 (FedProx), algorithm 2. The paper samples with replacement in proportion to the data and
    averages uniformly: pass `sampling.weighted` and `aggregation.li_scheme_one` for that form.
    """
    work = client.proximal(
        loss_fn,
        optimizer,
        coefficient,
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        weighting=weighting,
    )
    table = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, work, table, server.optimizer(optax.sgd(1.0)), **options)


def fedavgm(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 1.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    **options,
) -> Algorithm:
    """FedAvg with momentum at the server: v <- momentum v + Delta; w <- w + rate v.

    Guarantees: tests/server/test_optimizer.py::test_momentum_matches_its_recurrence.

    References: Hsu, Qi and Brown 2019, section 4.
    """
    validate.positive("server_learning_rate", server_learning_rate)
    validate.in_range("momentum", momentum, 0, 1, open_high=True)
    step = optax.sgd(server_learning_rate, momentum=momentum, nesterov=nesterov)
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


def fedadagrad(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.1,
    adaptivity: float = 1e-3,
    **options,
) -> Algorithm:
    """FedAvg with the paper's Adagrad at the server (first decay 0); see `server.adaptive` for how optax's differs.

    References: Reddi et al. 2021, algorithm 2.
    """
    step = server.adaptive("adagrad", server_learning_rate, first_decay=0.0, adaptivity=adaptivity)
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


def fedadam(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.01,
    first_decay: float = 0.9,
    second_decay: float = 0.99,
    adaptivity: float = 1e-3,
    **options,
) -> Algorithm:
    """FedAvg with the paper's Adam at the server (no bias correction); see `server.adaptive` for how optax's differs.

    References: Reddi et al. 2021, algorithm 2.
    """
    step = server.adaptive(
        "adam", server_learning_rate, first_decay=first_decay, second_decay=second_decay, adaptivity=adaptivity
    )
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


def fedyogi(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.01,
    first_decay: float = 0.9,
    second_decay: float = 0.99,
    adaptivity: float = 1e-3,
    **options,
) -> Algorithm:
    """FedAvg with the paper's Yogi at the server; see `server.adaptive` for how optax's differs.

    References: Reddi et al. 2021, algorithm 2.
    """
    step = server.adaptive(
        "yogi", server_learning_rate, first_decay=first_decay, second_decay=second_decay, adaptivity=adaptivity
    )
    return fedavg(loss_fn, sampler, optimizer, server_optimizer=step, **options)


def fednova(
    loss_fn: Callable,
    sampler: Sampler,
    *,
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    aggregator: Aggregator | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    **options,
) -> Algorithm:
    """Normalised averaging: unequal numbers of local steps no longer shift the fixed point.

    Args:
      learning_rate, momentum: of the clients' SGD (heavy ball), constant as the normalisation requires.

    Guarantees: the numbers of inventory row B11 (tests/oracles/test_fednova.py).

    References: Wang et al. 2020 (FedNova), equation 4.
    """
    validate.positive("learning_rate", learning_rate)
    work = client.local_sgd(
        loss_fn,
        optax.sgd(learning_rate, momentum=momentum or None),
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        weighting=weighting,
    )
    step = server.rescaled(server.optimizer(optax.sgd(1.0)))
    table = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, client.normalized(work, momentum=momentum), table, step, **options)


def scaffold(
    loss_fn: Callable,
    sampler: Sampler,
    *,
    learning_rate: float = 0.1,
    server_learning_rate: float = 1.0,
    option: int = 2,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "uniform",
    total_weight: float | None = None,
    **options,
) -> Algorithm:
    """Stochastic controlled averaging: control variates take the clients' drift out of local training.

    Every client keeps a control variate as large as the model; for many clients see `engine.client_memory`.

    Args:
      learning_rate, option: of `client.scaffold`; `server_learning_rate` is the paper's eta_g.
      num_steps, num_epochs, batch_size: as in `client.local_sgd`.
      weighting: "uniform", the paper's, minimises sum_i f_i / N; "examples" minimises sum_i n_i f_i / n.
      total_weight: W, the sum of the weights that all clients would report; needed for "examples", N for "uniform".

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_scaffold.py::test_matches_the_paper);
    rests at the optimum where FedAvg does not (::test_no_client_drift); with all control variates at zero, as in the
    first round, it is FedAvg (::test_first_round_is_fedavg).

    References: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1.
    """
    validate.positive("server_learning_rate", server_learning_rate)
    if sampler.design.replacement:
        hint = "A client drawn twice would move c twice and its own c_i once."
        validate.fail("sampler", "a design without replacement", sampler.design.scheme, hint)
    work = client.scaffold(
        loss_fn,
        learning_rate,
        option=option,
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        weighting=weighting,
    )
    if weighting == "uniform":
        total_weight = float(sampler.design.population_size)
    elif total_weight is None:
        validate.fail("total_weight", "the sum of all clients' weights", None, "weighting='examples' needs it.")
    table = aggregation.by_part({"params": aggregation.mean(), "control": aggregation.keep_old(total_weight)})
    step = server.control_variates(server.optimizer(optax.sgd(server_learning_rate)))
    return federated(sampler, work, table, step, **options)

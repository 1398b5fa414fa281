"""FedSGD, FedAvg, FedProx, FedNova and record-level private FedAvg, each a composition of parts.

Every algorithm around a server takes the loss, a sampler and the clients' optimizer, and returns an `Algorithm`. The
options of the local work (`num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle`) are described in
`client.work`; `aggregator`, `transform`, `downlink`, `nonfinite`, `plan` and `mesh` in `federated`.
"""

from __future__ import annotations

from typing import Literal, Unpack

import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import FederatedOptions, RecipeOptions
from fedjax_sim.transform.chain import plain_wire
from fedjax_sim.types import Aggregator, Algorithm, Sampler, UpdateTransform
from fedjax_sim.validate import LossFn, ShareBelowOne


@validate.named_arguments
def fedsgd(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    **options: Unpack[FederatedOptions],
) -> Algorithm:
    """Makes FedSGD: each client sends one full-batch gradient, and the server takes a step with their mean.

    The mean is weighted by the clients' numbers of examples.

    Args:
      loss_fn: as in `client.local_sgd`.
      sampler: draws the cohorts.
      optimizer: plain SGD such as `optax.sgd(0.1)`; a step at the server equals a step at each client.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: with full participation it is centralised gradient descent (tests/oracles/test_centralised.py).

    References: McMahan et al. 2017, section 2 (FederatedSGD).
    """
    step = server.optimizer(optax.sgd(client.plain_sgd_rate("fedsgd", optimizer)))
    local = client.local_sgd(loss_fn, optax.sgd(1.0), client.work(num_steps=1))
    rule = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, local, rule, step, **options)


@validate.named_arguments
def fedavg(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedAvg: clients train from the server's model, and the mean of their models is the next model.

    The mean is weighted by the clients' numbers of examples, unless `weighting` is "uniform".

    Args:
      loss_fn: as in `client.local_sgd`.
      sampler: draws the cohorts.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in
        `client.work`.
      server_optimizer: any optax transformation; SGD with rate 1 by default, which replaces the model by the mean of
        the local models.
      aggregator: `aggregation.mean()` by default.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: matches a NumPy oracle (tests/oracles/test_fedavg.py) and, on quadratics, its closed-form biased fixed
    point (tests/oracles/test_fixed_points.py).

    References: McMahan et al. 2017, algorithm 1; Reddi et al. 2021, algorithm 1 with a server optimiser.
    """
    work, round_options = client.local_work(options)
    local = client.local_sgd(loss_fn, optimizer, work)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return federated(sampler, local, rule, step, **round_options)


@validate.named_arguments
def fedprox(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: float = 0.1,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedProx: FedAvg with a proximal term (coefficient / 2) |w - w_t|^2 in each local objective.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`.
      coefficient: >= 0, mu in the paper; 0 is FedAvg.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: coefficient 0 is FedAvg bit for bit (tests/client/test_proximal.py); on quadratics the fixed points are
    those of a closed form (tests/oracles/test_fixed_points.py).

    References: Li et al. 2020 (FedProx), algorithm 2; its stragglers (section 5.2) are `sampling.with_stragglers`. The
    paper samples with replacement in proportion to the data and averages uniformly: pass `sampling.weighted` and
    `aggregation.li_scheme_one` for that form.
    """
    work, round_options = client.local_work(options)
    local = client.proximal(loss_fn, optimizer, coefficient, work)
    rule = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, local, rule, server.optimizer(optax.sgd(1.0)), **round_options)


@validate.named_arguments
def fednova(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    momentum: ShareBelowOne = 0.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedNova, in which clients with unequal numbers of local steps do not shift the fixed point.

    Each client divides its update by its effective number of steps. The server multiplies the mean of these directions
    by the mean number of steps.

    Args:
      loss_fn, sampler: as in `fedavg`.
      optimizer: the clients' optimizer, plain SGD such as `optax.sgd(0.1)`: the normalisation holds for a constant
        rate.
      momentum: of the clients' SGD (heavy ball), which the normalisation needs to know.
      aggregator: of messages {"direction", "steps"}; `aggregation.mean()` by default. An aggregator with attackers
        inside is refused: if both parts of a message change their signs, their product is that of the honest message.
        An aggregator that is not homogeneous, such as `norm_bounding`, is refused too: it would measure, and shorten,
        the number of steps together with the direction.
      transform: applied to the direction alone, without noise; the number of steps is sent beside it, unchanged.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: on quadratics the fixed points are those of Wang et al. 2020, theorem 1
    (tests/oracles/test_fednova.py); a clip or a sparsifier does not change the number of steps
    (::test_steps_are_sent_beside); attackers are refused (::test_attackers_would_change_the_steps), and bounds on norms
    (::test_a_bound_would_shorten_the_steps).

    References: Wang et al. 2020 (FedNova), equation 4.
    """
    learning_rate = client.plain_sgd_rate("fednova", optimizer)
    if aggregator is not None and not (aggregator.facts.homogeneous and aggregator.facts.attackers is None):
        advice = "Build the round by `federated` with client.normalized, server.rescaled and"
        if aggregator.facts.attackers is not None:
            hint = f'The number of steps changes too, so a flipped sign cancels. {advice} by_part({{"direction": '
            hint += 'corrupted(...), "steps": mean()}).'
            validate.fail("aggregator", "one without attackers inside for fednova", "a corrupted one", hint)
        hint = f'It would measure steps with the direction. {advice} by_part({{"direction": ..., "steps": mean()}}).'
        validate.fail("aggregator", "a homogeneous one for fednova", "another", hint)
    work, round_options = client.local_work(options)
    heavy_ball = optax.sgd(learning_rate, momentum=momentum or None)
    local = client.normalized(client.local_sgd(loss_fn, heavy_ball, work), momentum=momentum)
    step = server.rescaled(server.optimizer(optax.sgd(1.0)))
    rule = aggregation.mean() if aggregator is None else aggregator
    if round_options.get("transform") is not None:
        round_options["transform"] = _on_direction(round_options["transform"])
    return federated(sampler, local, rule, step, **round_options)


def _on_direction(transform: UpdateTransform) -> UpdateTransform:
    """Applies a transform to a message's direction alone: a changed number of steps would rescale the mean step.

    Args:
      transform: of updates of the model, without noise.

    Returns: an UpdateTransform of messages {"direction": as the model, "steps": [] float32}, as `client.normalized`
    sends them. The number of steps is sent as it is, and counts its own bytes.
    """
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "The number of steps is sent without noise, and reveals the number of examples."
        validate.fail("transform", "one without noise for fednova", transform.facts.noise.mechanism, hint)

    def on_client(key, update, state, memory):
        direction, memory, measured = transform.on_client(key, update["direction"], state, memory)
        return update | {"direction": direction}, memory, measured

    def on_server(key, cohort, aggregate, *arguments):
        direction, *state_and_metrics = transform.on_server(key, cohort, aggregate["direction"], *arguments)
        return aggregate | {"direction": direction}, *state_and_metrics

    def wire(update_spec, sent):
        direction, steps = (plain_wire(update_spec[name]) for name in ("direction", "steps"))
        return transform.wire(update_spec["direction"], direction).with_plain(steps)

    transform_of_messages = transform._replace(
        init=lambda update_spec: transform.init(update_spec["direction"]),
        init_client=lambda update_spec: transform.init_client(update_spec["direction"]),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        squared_error=None,
    )
    # A bound on the direction is none on the message, which also holds the number of steps.
    return transform_of_messages.stating(l2_bound=None, exact_error=False)


@validate.named_arguments
def record_private_fedavg(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float,
    num_steps: int,
    batch_size: int,
    num_examples: int | None = None,
    microbatch_size: int | None = None,
    sampling: Literal["poisson", "shuffled"] = "poisson",
    weighting: Literal["examples", "uniform"] = "uniform",
    gradients: str = "auto",
    aggregator: Aggregator | None = None,
    **options: Unpack[FederatedOptions],
) -> Algorithm:
    """Makes FedAvg whose clients train by DP-SGD, which hides each record from everybody, the server included.

    Args:
      loss_fn, sampler, aggregator: as in `fedavg`.
      optimizer: the clients' optimizer, plain SGD such as `optax.sgd(0.1)`.
      clip_norm, noise_multiplier, num_steps, batch_size, microbatch_size, sampling, gradients: as in
        `client.private_sgd`, whose noise the accountant reads.
      weighting: as in `client.private_sgd`. Its default is "uniform", because the weight reveals a client's number of
        examples.
      num_examples: n, a public upper bound on the rows of a client. None is refused, because a record is in a batch
        with probability batch_size / n. A config takes the rows of the largest client, which are then treated as
        public.
      transform, downlink, nonfinite, plan, mesh: as in `federated`.

    Guarantees: without noise and clipping, on whole clients, it is FedAvg
    (tests/oracles/test_record_private_fedavg.py::test_without_privacy_it_is_fedavg); its epsilon is that of the
    accountant for all local steps of a run, counted by hand (::test_epsilon_by_hand).

    References: Abadi et al. 2016, algorithm 1; Noble, Bellet and Dieuleveut 2022 (record-level DP-FedAvg).
    """
    if num_examples is None:
        hint = "A record is in a batch with probability batch_size / num_examples."
        validate.fail("num_examples", "the most rows that a client has", None, hint)
    local = client.private_sgd(
        loss_fn,
        clip_norm,
        noise_multiplier,
        client.plain_sgd_rate("record_private_fedavg", optimizer),
        num_steps=num_steps,
        batch_size=batch_size,
        num_examples=num_examples,
        microbatch_size=microbatch_size,
        sampling=sampling,
        weighting=weighting,
        gradients=gradients,
    )
    rule = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, local, rule, server.optimizer(optax.sgd(1.0)), **options)

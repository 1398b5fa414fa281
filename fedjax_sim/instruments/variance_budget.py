"""Measures the variance budget: the variance of a round's aggregate by cause, at a run's own models."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, sampling, server, theory, transform, tree, validate
from fedjax_sim.prng import stream
from fedjax_sim.round.round import aggregate, collect, initial_state, invite
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.floor import SOURCES
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientUpdate,
    Cohort,
    Mean,
    Noise,
    Population,
    PyTree,
    Received,
    Report,
    Round,
    Star,
)

# Sampling schemes in which all clients are equally likely in each round.
SCHEMES = ("uniform_without_replacement", "with_replacement", "poisson", "truncated_poisson", "full")
FRESH = ("gaussian", "discrete_gaussian", "skellam")  # noise that is drawn anew in each round


class _Law(NamedTuple):
    """The facts that the variance of the aggregate depends on, besides the variances of a client's message."""

    design: SamplingDesign
    by_examples: bool  # whether weights are the clients' numbers of examples
    divisor: float | None  # of a fixed mean; None for a mean over the cohort
    sensitivity: float | None
    noise: Noise | None
    num_clients: int  # the number of probed clients


class _Sums(NamedTuple):
    """Sums over the probed clients; w_i is a reported weight, u_i the mean of a client's messages minus the center."""

    weight: float  # sum w
    squared_weight: float  # sum w^2
    message: np.ndarray  # [d] sum w u
    weighted_message: np.ndarray  # [d] sum w^2 u
    square: float  # sum w^2 |u|^2
    minibatch: float  # sum w^2 (variance of a message by its minibatches)
    compression: float  # sum w^2 (variance of a message by the transform's own randomness)


def variance_budget(
    algorithm: Algorithm, params: PyTree, population: Population, *, num_clients: int = 64, seed: int = 0
) -> Callable[[PyTree], dict[str, Array]]:
    """Makes an evaluation for `run` that splits the variance of the aggregate by its causes.

    At each model, `num_clients` newly drawn clients train twice with different minibatches, and send each result twice
    with different compression noise. Nested differences estimate each cause without bias, so the estimate of a small
    part may be negative. The sampling design turns them into variances of the aggregate. The variance of privacy noise
    is not measured: it is the variance that its part states.

    Args:
      algorithm: of `federated`, with stateless clients and transforms, and a mean over a cohort in which all clients
        are equally likely.
      params: a model; only its shapes are used.
      population: all clients.
      num_clients: clients that are probed at each evaluation, at the cost of twice as many clients' work; at least 2.
      seed: the seed of the probes.

    Returns: params -> `variance_client_sampling`, `variance_minibatch`, `variance_quantization` (everything random in
      the transform except noise), `variance_privacy_noise` and `variance_total`: traces of the aggregate's covariances.
      Unequal weights, and clients that fail to report, are accounted for to first order.

    Raises: ValueError for an algorithm whose causes cannot be separated, with the reason.

    Guarantees: the parts, and their sum, agree with real rounds (tests/instruments/test_variance_budget.py::
    test_parts_are_those_of_real_rounds, ::test_the_sum_is_the_variance_of_real_rounds).

    References: nested analysis of variance (Scheffe 1959, chapter 7); Cochran 1977, section 10.3 (two-stage samples).
    """
    star, law = _checked(algorithm, params, population, num_clients)
    probe = sampling.uniform(population.size, num_clients)

    @jax.jit
    def sums(key: Array, params: PyTree, center: PyTree, population: Population) -> tuple[PyTree, dict[str, Mean]]:
        parts = (_probing(star, law, center), aggregation.total(), server.replacement(), transform.identity())
        probed = Star(probe, *parts, star.execution._replace(nonfinite="drop"))
        state = initial_state(probed, params, population)
        cohort, _ = invite(probed, key, state)
        gathered = collect(probed, key, cohort, state, population)
        result = aggregate(probed, key, cohort, gathered, state)
        return result.update, result.means

    def evaluation(params: PyTree) -> dict[str, Array]:
        # A run hands over the copy of one device, and the probes may be split over several.
        params = jax.device_get(params)
        # The key depends on the model's bits alone, so that a resumed run logs the same numbers.
        model_crc = zlib.crc32(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
        key = jax.random.fold_in(jax.random.key(seed), model_crc)
        zeros = tree.zeros_like(params)
        # The mean message of a pilot is subtracted from all messages, so that their squares do not cancel.
        pilot, means = sums(stream(key, "pilot"), params, zeros, population)
        weight = jnp.where(means["weight"].total > 0, means["weight"].total, 1)
        center = jax.tree.map(lambda x: x / weight, pilot["message"])
        vectors, means = jax.device_get(sums(key, params, center, population))
        numbers = {name: float(mean.total) for name, mean in means.items()}
        vectors = {name: _flat(value) for name, value in vectors.items()}
        probe_sums = _Sums(message=vectors["message"], weighted_message=vectors["weighted_message"], **numbers)
        parts = _parts(law, _flat(center), probe_sums)
        return {f"variance_{name}": jnp.float32(value) for name, value in parts.items()}

    return evaluation


def _checked(algorithm: Algorithm, params: PyTree, population: Population, num_clients: int) -> tuple[Star, _Law]:
    """Returns what the budget reads of an algorithm, after checks.

    Args:
      algorithm: of `federated`.
      params: a model; only its shapes are used.
      population: all N clients; only their number is used.
      num_clients: that are probed, in [2, N].

    Returns: the algorithm's parts, and their `_Law`.

    Raises: ValueError for an algorithm whose causes cannot be separated, with the reason.
    """
    star = algorithm.parts
    if star is None:
        validate.fail("algorithm", "one with the parts of `federated`", None)
    if algorithm.evaluated.loss_fn is not None:
        validate.fail("algorithm", "one that trains a model", "a statistic", "It sends sums and no updates of a model.")
    client = star.client
    change = star.transform
    design = star.sampler.design
    noise = star.transform.facts.noise
    broadcast = jax.eval_shape(lambda params: star.server.broadcast(star.server.init(params)), params)
    if jax.tree.structure(broadcast) != jax.tree.structure(params):
        hint = "SCAFFOLD, Mime and others send more: they have no variance budget."
        validate.fail("algorithm", "one that sends clients the model alone", jax.tree.structure(broadcast), hint)
    validate.integer("num_clients", num_clients, 2, population.size)
    validate.one_of("sampler", design.scheme, SCHEMES, hint="Its clients are not drawn uniformly in each round.")
    cohort, _ = jax.eval_shape(star.sampler.sample, jax.random.key(0), star.sampler.init())
    if cohort.work is not None:
        hint = "How much work a client completes is a cause of its own, which is not separated from its minibatches."
        validate.fail("sampler", "one whose clients do all of their work", "partial work", hint)
    by_examples, divisor = _law_of(star.aggregator)
    if client.federation is not None:
        hint = "What an edge makes of its clients' noise has no law here: take the algorithm inside of an edge."
        validate.fail("client", "one that is no federation", "one", hint)
    if client.facts.noise is not None:
        hint = "Noise in a client's own steps cannot be separated from its minibatches."
        validate.fail("client", "no noise in the local steps", client.facts.noise.mechanism, hint)
    if noise is not None and noise.mechanism not in FRESH:
        hint = "Its rounds are correlated, or its noise has no stated variance."
        validate.fail("transform", "noise that is fresh in each round", noise.mechanism, hint)
    if noise is not None and noise.named_details.get("adaptive"):
        validate.fail("transform", "a clip norm that stays", "an adaptive one", "Its noise changes.")
    sensitivity = star.aggregator.facts.sensitivity
    if noise is not None and noise.place != "local" and sensitivity is None:
        hint = "How the aggregate scales the noise is not known: take aggregation.fixed_mean(m), with uniform weights."
        validate.fail("aggregator", "one with a sensitivity, for the transform has noise", "one without", hint)
    spec = tree.spec(params)
    states = jax.eval_shape(client.init, params), change.init(spec), change.init_client(spec)
    if jax.tree.leaves(states):
        hint = "The state is not known here: use an algorithm whose parts keep no state."
        validate.fail("algorithm", "messages that depend on the model alone", "memory", hint)
    if change.facts.integer_range is not None:
        validate.fail("transform", "messages of numbers", "integers of a modular sum", "Budget the plain transform.")
    law = _Law(
        design=design,
        by_examples=by_examples,
        divisor=divisor,
        sensitivity=sensitivity,
        noise=noise,
        num_clients=num_clients,
    )
    return star, law


def _probing(star: Star, law: _Law, center: PyTree) -> ClientUpdate:
    """Makes a client that trains twice, transforms each result twice, and reports its terms of `_Sums`.

    Let x_ab be the client's message in its training a = 1, 2 under draw b = 1, 2 of the transform, minus the center.
    Let x_a be the mean of x_a1 and x_a2. Then the client estimates, without bias,

        u = (x_1 + x_2) / 2                                 its mean message, less the center
        c = (|x_11 - x_12|^2 + |x_21 - x_22|^2) / 4         the variance of a message by the transform
        v = |x_1 - x_2|^2 / 2 - c / 2                       the variance of a message by its minibatches

    Args:
      star: the algorithm's parts, of which the client and the transform are used.
      law: says whether the weight w is what the client reports, or 1 if that is above 0.
      center: a pytree like the messages, float32.

    Returns: a stateless client. Its update has the vectors "message" w u and "weighted_message" w^2 u. Its metrics have
      the scalars w, w^2, w^2 |u|^2, w^2 v and w^2 c. A client without weight counts for nothing.
    """
    client = star.client
    change = star.transform

    def messages(key, params, data):
        """Returns (messages [2, 2, ...] by minibatch draw and by the transform's draw, the client's weight)."""
        spec = tree.spec(params)
        no_state = change.init(spec), change.init_client(spec)

        def trained(work_key):
            report, _ = client.apply(work_key, params, client.init(params), data)
            transformed = jax.vmap(lambda k: change.on_client(k, report.update, *no_state)[0])
            transform_keys = jax.random.split(stream(work_key, "transform"), 2)
            return transformed(transform_keys), report.weight.astype(jnp.float32)

        sent, weights = jax.vmap(trained)(jax.random.split(key, 2))
        return jax.tree.map(lambda x: x.astype(jnp.float32), sent), weights[0]

    def apply(key, params, state, data):
        """Reports one client's terms of the sums in `_Sums`: vectors as the update, scalars as metrics."""
        # Leaves [2, 2, ...]: the first axis is the draw of minibatches, the second the draw of the transform.
        sent, weight = messages(key, params, data)
        weight = weight if law.by_examples else (weight > 0).astype(jnp.float32)
        sent = jax.tree.map(lambda x, c: x - c[None, None], sent, center)
        by_batch = jax.tree.map(lambda x: x.mean(1), sent)
        message = jax.tree.map(lambda x: x.mean(0), by_batch)
        # Half the squared difference of two draws estimates a variance; another half averages the two trainings.
        compression = _squares(jax.tree.map(lambda x: x[:, 0] - x[:, 1], sent)) / 4
        # A mean of two transformed messages still has half of the transform's variance, which is subtracted.
        minibatch = _squares(jax.tree.map(lambda x: x[0] - x[1], by_batch)) / 2 - compression / 2
        squared_weight = weight**2
        has_weight = (weight > 0).astype(jnp.float32)
        scalars = {
            "weight": weight,
            "squared_weight": squared_weight,
            "square": squared_weight * _squares(message),
            "minibatch": squared_weight * minibatch,
            "compression": squared_weight * compression,
        }
        vectors = {
            "message": jax.tree.map(lambda x: weight * x, message),
            "weighted_message": jax.tree.map(lambda x: squared_weight * x, message),
        }
        return Report(vectors, has_weight, {name: Mean(x, has_weight) for name, x in scalars.items()}), state

    return ClientUpdate(lambda params: (), apply)


def _parts(law: _Law, center: np.ndarray, sums: _Sums) -> dict[str, float]:
    """Computes the variance of the aggregate by cause, and the sum over causes.

    The sums over the probed clients give the variance of a client's message by its minibatches and by the transform,
    and the variance between clients. From these the sampling design gives the variance of the aggregate.

    Args:
      law: the facts of the algorithm.
      center: [d] the vector that was subtracted from all messages.
      sums: the sums over the probed clients.
    """
    noise = law.noise
    design = law.design
    mean_weight = sums.weight / law.num_clients
    ratio = sums.message / sums.weight
    # sum w^2 |u - ratio|^2, the squared distances of the clients' messages from their weighted mean.
    spread = sums.square - 2 * ratio @ sums.weighted_message + ratio @ ratio * sums.squared_weight
    # Means over the probed clients, with weights in units of the mean weight.
    scale = 1 / (law.num_clients * mean_weight**2)
    minibatch = sums.minibatch * scale
    compression = sums.compression * scale
    # S^2, the variance between clients with divisor N - 1. A client's mean of four messages still has half of the
    # minibatches' variance and a quarter of the transform's, which are subtracted.
    between_clients = spread / (law.num_clients - 1) / mean_weight**2 - minibatch / 2 - compression / 4
    mean = center + ratio
    size = design.population_size
    dimension = len(ratio)
    # The variance of this estimate of the mean: the probed clients are a sample without replacement.
    sample_share = law.num_clients / size
    variance_of_mean = (between_clients * (1 - sample_share) + minibatch / 2 + compression / 4) / law.num_clients
    # The variance of the noise as the mechanism states it: of a sum of messages, or of a message under local noise.
    noise_variance = 0.0 if noise is None else (noise.multiplier * noise.clip_norm) ** 2 * dimension
    details = {} if noise is None else noise.named_details
    has_noisy_messages = noise is not None and noise.place != "central"
    # Under distributed noise each of `cohort_size` messages carries an equal share of it.
    noise_per_message = noise_variance / details.get("cohort_size", 1) if has_noisy_messages else 0.0
    # Noise in the messages is drawn by the transform, but it is no compression.
    compression -= noise_per_message
    message_factor = _message_factor(design, law.divisor)
    estimator = "mean" if law.divisor is None else "fixed_mean"

    def sampling_variance(variance: float, mean: np.ndarray) -> float:
        moments = theory.Moments.from_mean_and_variance(size, mean, abs(variance))
        result = theory.design_variance(design, moments, estimator=estimator, denominator=law.divisor).variance
        # The result is linear in the variance, so an estimate below zero is mirrored at zero.
        return result if variance >= 0 else 2 * sampling_variance(0.0, mean) - result

    variance = float(between_clients * (size - 1) / size)  # with divisor N
    sampled = sampling_variance(variance, mean)
    # A part of this is proportional to the squared mean. The square of an estimated mean is too large by the variance
    # of the estimate, so this share of the part is taken off.
    if mean.any():
        sampled -= (sampled - sampling_variance(variance, 0 * mean)) * variance_of_mean / (mean @ mean)
    released = noise_per_message * message_factor
    if noise is not None and noise.place == "central":
        # Central noise is added to the sum: the aggregate scales it as it scales a message.
        noise_scale = 1 / details["noise_cohort_size"] if "noise_cohort_size" in details else law.sensitivity
        assert noise_scale is not None, "`_checked` refuses central noise without a sensitivity"
        released = noise_variance * noise_scale**2
    values = (sampled, minibatch * message_factor, compression * message_factor, released)
    return {name: float(value) for name, value in zip((*SOURCES, "total"), (*values, sum(values)), strict=True)}


def _flat(values: PyTree) -> np.ndarray:
    """Returns all numbers of a pytree as one vector [d] of float64."""
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(values)])


def _squares(values: PyTree) -> Array:
    """Returns the sum of the squares of all numbers of a pytree."""
    return jnp.asarray(sum(jnp.sum(x**2) for x in jax.tree.leaves(values)))


def _message_factor(design: SamplingDesign, divisor: float | None) -> float:
    """Returns E sum c_i^2 for an aggregate sum c_i u_i: the factor of a message's own variance in the aggregate's.

    With replacement, c_i = k_i / m for a client that fills k_i of the m slots, or k_i / divisor. Otherwise c_i is
    1 / (number of reports), or 1 / divisor, for each client that reports.

    Args:
      design: with N equally likely clients.
      divisor: of a fixed mean; None for a mean over the cohort.
    """
    if design.replacement:
        # A client that is drawn twice sends one message twice.
        size = design.population_size
        slots = design.num_slots
        return (1 / slots * (1 - 1 / size) + 1 / size) * (1 if divisor is None else (slots / divisor) ** 2)
    counts, chances = (np.asarray(x, np.float64) for x in theory.report_counts(design))
    is_round = counts > 0  # without any report the round is skipped
    squares = 1 / counts[is_round] if divisor is None else counts[is_round] / divisor**2
    return float(chances[is_round] @ squares)


def _law_of(aggregator: Aggregator) -> tuple[bool, float | None]:
    """Finds which mean an aggregator computes.

    It aggregates test messages of three clients, so an aggregator is told by what it does and not by its name.

    Args:
      aggregator: of any kind.

    Returns: whether it is a mean by the reported weights; and its fixed divisor, by which it divides sums. The divisor
      is None for a mean over the cohort. An aggregator with a fixed divisor uses no weights.

    Raises: ValueError for an aggregator that is neither a mean over the cohort nor a fixed mean, for one with
      attackers,
    and for one that does not state that messages in another unit give the result in that unit.

    Guarantees: rules that are no mean for some messages are refused
    (tests/instruments/test_variance_budget.py::test_refusals).
    """
    facts = aggregator.facts
    if facts.attackers is not None:
        hint = "What attackers send is a cause of its own, which is not separated from the sampling of clients."
        validate.fail("aggregator", "one without attackers", "a corrupted one", hint)
    if not facts.homogeneous:
        # Such as a bound on norms, within which three short messages have their mean.
        hint = "Its result may depend on how long messages are. A mean of your own states homogeneous=True."
        validate.fail("aggregator", "a mean over the cohort, or fixed_mean, in any unit", "another one", hint)
    round = Round(Cohort(jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool), jnp.ones(3, bool)))
    key = jax.random.key(0)
    ids = jnp.arange(3, dtype=jnp.int32)
    equal = [1.0, 1.0, 1.0]

    def aggregate_of(values, weights):
        received = Received(jnp.array(values), jnp.array(weights), ids, ids)
        carry = aggregator.init(jax.ShapeDtypeStruct((), jnp.float32), 3)
        return float(aggregator.finalize(key, round, aggregator.accumulate(key, round, carry, received))[0])

    weighted = aggregate_of(equal, [1.0, 3.0, 1.0])
    unweighted = aggregate_of(equal, equal)
    # A fixed mean of ones is 3 / divisor for any weights; a mean over the cohort is 1.
    is_fixed = facts.sensitivity is not None and weighted == unweighted
    # The three values add up to 3, as the ones do; a median or a stretched mean gives another number.
    is_linear = np.isclose(aggregate_of([10.0, -9.0, 2.0], equal), unweighted)
    if not is_linear or not (is_fixed or np.isclose([weighted, unweighted], 1).all()):
        validate.fail("aggregator", "a mean over the cohort, or fixed_mean", "another one")
    if is_fixed:
        return False, 3 / unweighted
    # With weights 1, 3, 1 a weighted mean of 0, 1, 0 is 3/5, and an unweighted one is 1/3.
    return not np.isclose(aggregate_of([0.0, 1.0, 0.0], [1.0, 3.0, 1.0]), 1 / 3), None

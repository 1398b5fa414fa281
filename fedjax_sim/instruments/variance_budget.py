"""Where a round's randomness comes from: the variance of the aggregate by cause, measured at a run's own models."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import theory, tree, validate
from fedjax_sim.prng import client_key, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientData, Cohort, Noise, Population, PyTree, Received

__all__ = ["SOURCES", "variance_budget"]

SOURCES = ("client_sampling", "minibatch", "quantization", "privacy_noise")
SCHEMES = ("uniform_without_replacement", "with_replacement", "poisson", "truncated_poisson", "full")


class _Sums(NamedTuple):
    """Over the probed clients; w_i is the weight a client reports, l_i the mean of its letters less the center."""

    weight: Array  # sum w
    squared_weight: Array  # sum w^2
    letter: PyTree  # sum w l
    weighted_letter: PyTree  # sum w^2 l
    square: Array  # sum w^2 |l|^2
    minibatch: Array  # sum w^2 (variance of a letter by its minibatches)
    compression: Array  # sum w^2 (variance of a letter by the transform's own randomness)


def variance_budget(
    algorithm: Algorithm, params: PyTree, population: Population, *, num_clients: int = 64, seed: int = 0
) -> Callable[[PyTree], dict[str, Array]]:
    """An evaluation for `run`: how much of the aggregate's variance comes from whom is called, and from what they do.

    `num_clients` clients, other ones at each model, train twice with other minibatches, and send each result twice with
    other compression noise; nested differences tell the causes apart without bias, so an estimate of a small part may
    be below zero. The sampler's law makes them variances of the mean; privacy noise is what its part promises.

    Args:
      algorithm: of `federated`, with clients and transforms that keep nothing and a mean over a cohort drawn without
        regard to who is who.
      params: a model, of which the shapes count.
      num_clients: probed at each evaluation, at the cost of twice as many clients' work; at least 2.
      seed: of the probes.

    Returns: params -> `variance_client_sampling`, `variance_minibatch`, `variance_quantization` (everything random in
      the transform but noise), `variance_privacy_noise` and `variance_total`: traces of covariances of the aggregate.
      Weights of examples, and clients that fail, count to first order.

    Raises: ValueError for an algorithm that this cannot tell apart, with the reason.

    Guarantees: the parts, and their sum, are those of real rounds (tests/instruments/test_variance_budget.py::
    test_parts_are_those_of_real_rounds, ::test_the_sum_is_the_variance_of_real_rounds).

    References: nested analysis of variance (Scheffe 1959, chapter 7); Cochran 1977, section 10.3 (two-stage samples).
    """
    parts = algorithm.parts
    if parts is None:
        validate.fail("algorithm", "one with the parts of `federated`", None)
    server = parts.server
    sent = jax.eval_shape(lambda params: server.broadcast(server.init(params)), params)
    if jax.tree.structure(sent) != jax.tree.structure(params):
        hint = "SCAFFOLD, Mime and others send more: their rounds are not budgeted."
        validate.fail("algorithm", "one that sends clients the model alone", jax.tree.structure(sent), hint)
    validate.integer("num_clients", num_clients, 2, population.size)
    client, transform, design = parts.client, parts.transform, parts.sampler.design
    validate.one_of("sampler", design.scheme, SCHEMES, hint="Its clients are not drawn alike and at once.")
    by_examples, divisor = _table(parts.aggregator)
    sensitivity = parts.aggregator.sensitivity
    noise = transform.noise
    if client.noise is not None:
        hint = "Noise in a client's own steps cannot be told from its minibatches."
        validate.fail("client", "no noise in the local steps", client.noise.mechanism, hint)
    if noise is not None and noise.mechanism not in ("gaussian", "discrete_gaussian", "skellam"):
        validate.fail("transform", "noise that is fresh in each round", noise.mechanism, "Its rounds are correlated.")
    details = {} if noise is None else _details(noise)
    if details.get("adaptive"):
        validate.fail("transform", "a clip norm that stays", "an adaptive one", "Its noise changes.")
    spec = tree.spec(params)
    kept = jax.eval_shape(client.init, params), transform.init(spec), transform.init_client(spec)
    if jax.tree.leaves(kept):
        hint = "What is remembered is not known here: budget a run whose parts keep nothing."
        validate.fail("algorithm", "letters that depend on the model alone", "memory", hint)
    if transform.integer_range is not None:
        validate.fail("transform", "letters of numbers", "integers of a modular sum", "Budget the plain transform.")

    def letters(key: Array, params: PyTree, data: ClientData) -> tuple[PyTree, Array]:
        """[2, 2, ...] letters, by minibatch and by the transform's draw; and the client's weight."""
        spec = tree.spec(params)
        nothing = transform.init(spec), transform.init_client(spec)

        def trained(work_key):
            report, _ = client.apply(work_key, params, client.init(params), data)
            sent = jax.vmap(lambda k: transform.on_client(k, report.update, *nothing)[0])
            return sent(jax.random.split(stream(work_key, "transform"), 2)), report.weight.astype(jnp.float32)

        sent, weights = jax.vmap(trained)(jax.random.split(key, 2))
        return jax.tree.map(lambda x: x.astype(jnp.float32), sent), weights[0]

    @jax.jit
    def probed(key: Array, params: PyTree, population: Population) -> tuple[PyTree, _Sums]:
        ids = jax.random.permutation(stream(key, "probe"), population.size)[:num_clients].astype(jnp.int32)

        def of(id):
            return letters(client_key(stream(key, "work"), id), params, population.client(id))

        center = jax.tree.map(lambda x: x.mean((0, 1)), of(ids[0])[0])  # against cancellation

        def add(sums, id):
            sent, weight = of(id)
            weight = weight if by_examples else (weight > 0).astype(jnp.float32)
            sent = jax.tree.map(lambda x, c: x - c[None, None], sent, center)
            by_batch = jax.tree.map(lambda x: x.mean(1), sent)
            letter = jax.tree.map(lambda x: x.mean(0), by_batch)
            drawn = _squares(jax.tree.map(lambda x: x[:, 0] - x[:, 1], sent)) / 4
            batch = _squares(jax.tree.map(lambda x: x[0] - x[1], by_batch)) / 2 - drawn / 2
            squared = weight**2
            new = _Sums(
                weight,
                squared,
                jax.tree.map(lambda x: weight * x, letter),
                jax.tree.map(lambda x: squared * x, letter),
                squared * _squares(letter),
                squared * batch,
                squared * drawn,
            )
            return jax.tree.map(jnp.add, sums, new), None

        scalar, zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, center)
        start = _Sums(scalar, scalar, zeros, zeros, scalar, scalar, scalar)
        return center, jax.lax.scan(add, start, ids)[0]

    def evaluation(params: PyTree) -> dict[str, Array]:
        words = zlib.crc32(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
        key = jax.random.fold_in(jax.random.key(seed), words)  # other clients at another model; the same after a resume
        center, sums = jax.device_get(probed(key, params, population))
        return {f"variance_{name}": jnp.float32(value) for name, value in _parts(center, sums).items()}

    def _parts(center: PyTree, sums: _Sums) -> dict[str, float]:
        flat = [np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(part)])
                for part in (center, sums.letter, sums.weighted_letter)]  # fmt: skip
        weight = float(sums.weight) / num_clients
        ratio = flat[1] / sums.weight
        away = float(sums.square - 2 * ratio @ flat[2] + ratio @ ratio * sums.squared_weight)
        scale = 1 / (num_clients * weight**2)
        batch, drawn = float(sums.minibatch) * scale, float(sums.compression) * scale
        between = away / (num_clients - 1) / weight**2 - batch / 2 - drawn / 4  # S^2, divisor N - 1
        mean, size, dimension = flat[0] + ratio, design.population_size, len(ratio)
        promised = 0.0 if noise is None else (noise.multiplier * noise.clip_norm) ** 2 * dimension
        per_letter = promised / details.get("cohort_size", 1) if noise is not None and noise.place != "central" else 0.0
        drawn -= per_letter  # it is the transform's, but no compression
        letter_factor = _letter_factor(design, divisor)
        law = {"estimator": "mean"} if divisor is None else {"estimator": "fixed_mean", "denominator": divisor}

        def sampling(variance: float) -> float:
            moments = theory.Moments.from_mean_and_variance(size, mean, max(variance, 0.0))
            return theory.design_variance(design, moments, **law).variance

        variance = between * (size - 1) / size
        sampled = sampling(variance) if variance >= 0 else 2 * sampling(0.0) - sampling(-variance)
        released = per_letter * letter_factor
        if noise is not None and noise.place == "central":
            moved = 1 / details["noise_cohort_size"] if "noise_cohort_size" in details else sensitivity
            released = promised * moved**2
        values = (sampled, batch * letter_factor, drawn * letter_factor, released)
        return dict(zip(SOURCES, values, strict=True)) | {"total": sum(values)}

    return evaluation


def _squares(values: PyTree) -> Array:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(values))


def _details(noise: Noise) -> dict:
    return noise.details._asdict() if hasattr(noise.details, "_asdict") else noise.details or {}


def _letter_factor(design: SamplingDesign, divisor: float | None) -> float:
    """E sum c_i^2: what the own variance of one letter is multiplied by."""
    if design.replacement:  # a client drawn twice sends one letter twice
        size, slots = design.population_size, design.num_slots
        return (1 / slots * (1 - 1 / size) + 1 / size) * (1 if divisor is None else (slots / divisor) ** 2)
    counts, chances = (np.asarray(x, np.float64) for x in theory.report_counts(design))
    some = counts > 0
    squares = 1 / counts[some] if divisor is None else counts[some] / divisor**2
    return float(chances[some] @ squares)


def _table(aggregator: Aggregator) -> tuple[bool, float | None]:
    """(whether it weighs by the reported weights, its fixed divisor or None), from what it does with three letters."""
    cohort = Cohort(jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool), jnp.ones(3, bool))
    key, ids, alike = jax.random.key(0), jnp.arange(3, dtype=jnp.int32), [1.0, 1.0, 1.0]

    def of(values, weights):
        received = Received(jnp.array(values), jnp.array(weights), ids, ids)
        carry = aggregator.init(jax.ShapeDtypeStruct((), jnp.float32), 3)
        return float(aggregator.finalize(key, cohort, aggregator.accumulate(key, cohort, carry, received))[0])

    weighed, unweighed = of(alike, [1.0, 3.0, 1.0]), of(alike, alike)
    fixed = aggregator.sensitivity is not None and weighed == unweighed
    linear = np.isclose(of([10.0, -9.0, 2.0], alike), unweighed)  # a median or a stretched mean is not
    if not linear or not (fixed or np.isclose([weighed, unweighed], 1).all()):
        validate.fail("aggregator", "a mean over the cohort, or fixed_mean", "another one")
    if fixed:
        return False, 3 / unweighed
    return not np.isclose(of([0.0, 1.0, 0.0], [1.0, 3.0, 1.0]), 1 / 3), None

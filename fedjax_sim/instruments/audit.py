"""Audits the privacy of a federated algorithm: its own sampler, transform and aggregator, with canaries as clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import engine, population, server, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.privacy.audit import Audit, audit_release
from fedjax_sim.privacy.claim import Claim, accounted_claim, gaussian_claim
from fedjax_sim.privacy.mechanism import ADJACENCIES
from fedjax_sim.privacy.reading import mechanism_of
from fedjax_sim.types import Algorithm, Array, ClientData, ClientFacts, ClientUpdate, Noise, PyTree, Report, Star
from fedjax_sim.validate import Positive, PositiveInt

# The default direction of the canary, of norm 1: two leaves, so that it shows a treatment leaf by leaf.
SPREAD_CANARY = {"first": np.full(2, 0.5, np.float32), "second": np.full(2, -0.5, np.float32)}
# What the other clients send, in units of the canary's update.
OTHERS = {"silent": 0.0, "zero": 0.0, "opposite": -1.0}


def sends_its_data() -> ClientUpdate:
    """Makes a client whose data are its update and its weight: it sends them, and does not train."""

    def apply(key, broadcast, state, data):
        update, weight = jax.tree.map(lambda x: x[0], data.examples)
        return Report(update, jnp.where(data.mask[0], weight, 0.0), {}), state

    facts = ClientFacts(all_steps=1)  # a client does a single step, which partial work completes too
    return ClientUpdate(lambda params: (), apply, facts)


def _noise(algorithm: Algorithm) -> tuple[Star, Noise, float]:
    """Returns what an audit reads of an algorithm, after checks.

    Args:
      algorithm: of `federated`.

    Returns: its parts; the noise of its transform, for the unit "client", at the server or as shares on messages; and
      the aggregator's sensitivity, how far the aggregate moves in L2 if one message moves by 1.

    Raises: ValueError for an algorithm without client-level noise on a sum, and for an aggregator without sensitivity.
    """
    parts = algorithm.parts
    if parts is None:
        validate.fail("algorithm", "one with the parts of `federated`", None)
    noise = parts.transform.facts.noise
    sensitivity = parts.aggregator.facts.sensitivity
    if noise is None or noise.unit != "client" or noise.place == "local":
        hint = "Audit another release through `privacy.audit_release`, with a function that scores it."
        validate.fail("algorithm", "client-level noise on what the server sums", noise, hint)
    if isinstance(noise.details, dict) and noise.details.get("adaptive"):
        validate.fail("algorithm", "a clip norm that stays", "an adaptive one", "Audit it at a fixed clip norm.")
    if sensitivity is None:
        validate.fail("aggregator", "one with a sensitivity", None, "Use aggregation.fixed_mean.")
    return parts, noise, sensitivity


def _plain(parts: Star, plan: engine.Plan | None) -> Algorithm:
    """Returns the algorithm with clients that send their data, and a server that adds the aggregate to its model."""
    step = server.optimizer(optax.sgd(1.0))
    return federated(parts.sampler, sends_its_data(), parts.aggregator, step, parts.transform, plan=plan, mesh=None)


@validate.named_arguments
def canary_release(
    algorithm: Algorithm,
    *,
    length: Positive = 10.0,
    weight: Positive = 100.0,
    others: str | None = None,
    adjacency: str | None = None,
    num_rounds: PositiveInt = 1,
    direction: PyTree = None,
    plan: engine.Plan | None = None,
) -> Callable:
    """Makes `release(key, with_canary) -> score` from an algorithm's own sampler, transform and aggregator.

    Client 0 is the canary. It sends a fixed direction whose norm is `length` times the clip norm, in round t with the
    sign (-1)^t, so that noise that is drawn once and reused cancels. The score is the inner product of the direction
    with the rounds' aggregates, in units of the largest influence of a client. Its mean rises by 1 in a round that the
    canary joins, and its noise has standard deviation z sqrt(T), for the noise multiplier z.

    Args:
      algorithm: of `federated`, with client-level noise on the sum.
      length: norm of the canary's update over the clip norm. Above 1 it tests the clip; below 1 it tests that shorter
        updates are not changed.
      weight: the weight that the canary reports; the others report 1.
      others: what the other clients send: "silent" (nothing, they do not report), "zero" or "opposite" (the clipped
        canary, negated: the worst case for cohorts of a fixed size). Default: "zero" where each message has a share of
        the noise, else "silent".
      adjacency: without the canary, client 0 is silent ("add_or_remove_one"), sends zeros ("zero_out") or the opposite
        ("replace_one"). Default: "zero_out" where each message has a share of the noise, else "add_or_remove_one".
      num_rounds: T, on the same data.
      direction: pytree of arrays, of norm 1. A Dirac canary (one number in one leaf) is best at showing noise that is
        not Gaussian. Default: two leaves of two equal numbers each, of opposite signs, which shows treatment by leaf.
      plan: as in `federated`.

    Returns: a function that JAX can trace; `with_canary` is a truth value.

    Raises: ValueError for an algorithm without such noise, or an aggregator without a sensitivity.

    Guarantees: without a canary the score has mean 0 and standard deviation z, with it mean 1
    (tests/privacy/test_audit.py::test_central_mechanism_is_confirmed).
    """
    parts, noise, sensitivity = _noise(algorithm)
    others = ("silent" if noise.place == "central" else "zero") if others is None else others
    validate.one_of("others", others, OTHERS)
    adjacency = _adjacency(adjacency, noise)
    plain = _plain(parts, plan)
    size = parts.sampler.design.population_size
    direction = SPREAD_CANARY if direction is None else direction

    # Client 0 is the canary. All other clients send the same update, in units of the canary's.
    def generate(world, id):
        canary_scale = jnp.where(world["present"], length, -length if adjacency == "replace_one" else 0.0)
        scale = jnp.where(id == 0, canary_scale, OTHERS[others]) * noise.clip_norm * world["sign"]
        sends = jnp.where(id == 0, world["present"] | (adjacency != "add_or_remove_one"), others != "silent")
        update_and_weight = jax.tree.map(lambda x: scale * x, direction), jnp.where(id == 0, weight, 1.0)
        return ClientData(jax.tree.map(lambda x: x[None], update_and_weight), sends[None])

    def release(key: Array, with_canary: Array) -> Array:
        def world(sign):
            """Returns the population of a round, in which the canary's update has this sign."""
            return population.generated(size, generate, {"present": with_canary, "sign": sign})

        def one_round(state, t):
            # The sign alternates, so that noise that is drawn once and reused cancels.
            sign = 1.0 - 2.0 * (t % 2).astype(jnp.float32)
            before = plain.params(state)
            state, _ = plain.step(jax.random.fold_in(key, t), state, world(sign))
            # The server adds the aggregate to its model: the difference of two models is the aggregate.
            moved = jax.tree.map(lambda x, y, u: jnp.vdot(x - y, u), plain.params(state), before, direction)
            return state, sign * sum(jax.tree.leaves(moved))

        zeros = jax.tree.map(jnp.zeros_like, direction)
        state = plain.init(key, zeros, world(jnp.float32(1)))
        if num_rounds == 1:
            scores = one_round(state, jnp.int32(0))[1]
        else:
            scores = jax.lax.scan(one_round, state, jnp.arange(num_rounds))[1].sum()
        return scores / (noise.clip_norm * sensitivity)

    return release


def _adjacency(adjacency: str | None, noise: Noise) -> str:
    """Returns the relation between neighbouring data sets: the stated one, or the default for the kind of noise."""
    if adjacency is None:
        return "add_or_remove_one" if noise.place == "central" else "zero_out"
    validate.one_of("adjacency", adjacency, ADJACENCIES)
    return adjacency


def claim_of(algorithm: Algorithm, *, num_rounds: int = 1, adjacency: str | None = None) -> Claim:
    """Returns the privacy that an algorithm's own parts claim.

    With full cohorts it is `privacy.gaussian_claim`. With sampled cohorts it is the accountant's claim in three cases:
    there is more than one round, a client is replaced, or the Poisson cohort is truncated. Else it is `gaussian_claim`
    too.

    Args:
      algorithm: of `federated`, with client-level noise on the sum.
      num_rounds: T, on the same data.
      adjacency: as in `canary_release`.

    Raises: ValueError for samplers other than Poisson and full ones, and for noise that is not Gaussian.

    Guarantees: the claim follows the noise multiplier and the sampling rate of the algorithm's parts
    (tests/privacy/test_audit.py::test_claim_follows_the_parts).
    """
    parts, noise, _ = _noise(algorithm)
    design = parts.sampler.design
    if noise.mechanism != "gaussian":
        validate.fail("noise", "a Gaussian mechanism", noise.mechanism, "Build a Claim from its accountant's profile.")
    adjacency = _adjacency(adjacency, noise)
    if design.scheme not in ("full", "poisson", "truncated_poisson"):
        hint = "Pass a claim of your own: its distribution is not that of Poisson sampling."
        validate.fail("sampler", "one that invites clients independently: poisson or full", design.scheme, hint)
    # A replaced client moves the sum twice as far as a removed one: by its own update, and by the other one's.
    num_sensitivities = 2 if adjacency == "replace_one" else 1
    needs_accountant = num_rounds > 1 or num_sensitivities == 2 or design.scheme == "truncated_poisson"
    if needs_accountant and design.scheme != "full":
        return accounted_claim(mechanism_of(algorithm, adjacency=adjacency), num_rounds)
    rate = 1.0 if design.scheme == "full" else design.rate
    return gaussian_claim(noise.multiplier / num_sensitivities, sampling_rate=rate, num_rounds=num_rounds)


def audit_algorithm(
    key: Array,
    algorithm: Algorithm,
    claim: Claim | None = None,
    *,
    num_rounds: int = 1,
    adjacency: str | None = None,
    num_releases: int = 1_000_000,
    chunk: int = 50_000,
    delta: float = 1e-5,
    confidence: float = 0.99,
    tolerance: float = 0.1,
    **canary,
) -> Audit:
    """Estimates the epsilon that an algorithm realises, and compares it with the epsilon that is claimed.

    The algorithm's own sampler, transform and aggregator are run many times with a canary and many times without
    (`canary_release`). `privacy.audit_release` then judges the claim by the two distributions of scores.

    Args:
      key: the key of all releases.
      algorithm: as in `canary_release`.
      claim: the claim that is tested; by default `claim_of(algorithm)`.
      num_rounds, adjacency, canary: as in `canary_release`.
      num_releases, chunk, delta, confidence, tolerance: as in `privacy.audit_release`.

    Returns: an `Audit`: the verdict, and the interval of epsilon.

    If cohorts are sampled, the scores may be a mixture of more than two Gaussians: over several rounds, if the canary
    is replaced ("replace_one"), and if the other clients send the opposite. Then no distribution is fitted to the
    scores (`Claim.scores` is None).

    Guarantees: see `privacy.audit_release`. Planted bugs in each part are flagged
    (tests/privacy/test_audit.py::test_planted_bugs). A true claim over several rounds of sampled cohorts is not refuted
    (tests/privacy/test_audit.py::test_scores_of_another_law).
    """
    claim = claim_of(algorithm, num_rounds=num_rounds, adjacency=adjacency) if claim is None else claim
    is_mixture = num_rounds > 1 or adjacency == "replace_one" or canary.get("others") == "opposite"
    if is_mixture and _noise(algorithm)[0].sampler.design.scheme != "full":
        claim = dataclasses.replace(claim, scores=None)
    release = canary_release(algorithm, num_rounds=num_rounds, adjacency=adjacency, **canary)
    options = {"num_releases": num_releases, "chunk": chunk, "delta": delta, "confidence": confidence}
    return audit_release(key, release, claim, **options, tolerance=tolerance)


@validate.named_arguments
def one_run_release(algorithm: Algorithm, *, length: Positive = 10.0) -> Callable:
    """Makes `release(key) -> (included [m] bool, scores [m])`: a round in which every client is a canary of its own.

    With probability 1/2 client i sends a Dirac update, `length` times the clip norm in coordinate i. Its score is the
    number that the server received in this coordinate. Pass the result to `privacy.audit_one_run`.

    Args:
      algorithm: with client-level noise on the sum and full participation; m is the size of its population.
      length: the length of the updates, over the clip norm.

    Guarantees: half of the canaries take part, and scores separate by 1 / z
    (tests/privacy/test_audit.py::test_one_run_of_the_central_mechanism).

    References: Steinke, Nasr and Jagielski 2023, algorithm 1; Andrew et al. 2024 (canaries as clients).
    """
    parts, noise, sensitivity = _noise(algorithm)
    design = parts.sampler.design
    plain = _plain(parts, None)
    if design.scheme != "full":
        validate.fail("sampler", "one that invites every client", design.scheme, "Use sampling.full(num_canaries).")
    size = design.population_size

    def generate(included, id):
        update = (jnp.arange(size) == id) * jnp.float32(length * noise.clip_norm)
        return ClientData((update[None], jnp.ones(1)), included[id][None])

    def release(key: Array) -> tuple[Array, Array]:
        included = jax.random.bernoulli(jax.random.fold_in(key, 0), 0.5, (size,))
        world = population.generated(size, generate, included)
        state = plain.init(key, jnp.zeros(size), world)
        state, _ = plain.step(jax.random.fold_in(key, 1), state, world)
        return included, plain.params(state) / (noise.clip_norm * sensitivity)

    return release

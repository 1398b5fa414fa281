"""Noise that is correlated over rounds: privacy for the whole run at once, without sampling (the DP-FTRL family).

A strategy is a lower triangular matrix C over rounds. In round t, the clipped sum plus noise y_t is released, where

    y = C^-1 z,    z_t ~ N(0, (z C_clip S)^2 I) fresh in each round.

S is the strategy's sensitivity: a client moves C times the sums by at most S C_clip, over all rounds in which it may
take part. So C (sums + y) is a single Gaussian mechanism with noise multiplier z. Later noise cancels earlier noise:
the error of a model, which is a sum over rounds, grows with log T instead of T.

    banded          C Toeplitz with the first b coefficients of (1 - x)^(-1/2): 1, 1/2, 3/8, ...; b - 1 vectors of state
    optimal_banded  the same with b coefficients that make the error of a run of T rounds least, found by jax-privacy
    tree            C adds up the rounds of every node of a binary tree; floor(log2 T) + 1 vectors of state

With a single coefficient, b = 1, the noise is independent over rounds.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import prng, tree, validate
from fedjax_sim.transform.clip import clip, clip_metrics
from fedjax_sim.transform.noise import check_multiplier, check_sensitivity
from fedjax_sim.types import Array, Noise, UpdateTransform

STRATEGIES = ("banded", "optimal_banded", "tree")
MAX_BANDS, MAX_ROUNDS = 4096, 10**6
MAX_OPTIMAL_BANDS, MAX_OPTIMAL_ROUNDS = 1024, 10**4  # half a minute of optimisation, and 80 MB for each of its arrays


@validate.named_arguments
def matrix_mechanism(
    clip_norm: float,
    noise_multiplier: float,
    *,
    num_rounds: int,
    strategy: Literal["banded", "optimal_banded", "tree"] = "banded",
    bands: int | None = None,
    separation: int | None = None,
    error: Literal["mean", "max"] | None = None,
) -> UpdateTransform:
    """Clips updates, and adds noise that is correlated over rounds to their sum (central privacy of a whole run).

    Sampling does not amplify the privacy, so no sampler must be trusted to be random. But participation must be
    bounded: the sampler must call a client at most once every `separation` rounds, whatever clients do. For example
    `sampling.cyclic` over N clients with m slots, not shuffled, has a separation of floor(N / m). A round that is
    skipped because the model overflowed is not released, so there is one round less between the rounds around it.

    Args:
      clip_norm: C_clip, as in `clip`.
      noise_multiplier: z >= 0, of the WHOLE run: its privacy is that of one Gaussian mechanism with this multiplier.
      num_rounds: T. Later rounds release nothing: the model stays, and the round counts as skipped.
      strategy: "banded", "tree", or "optimal_banded", which needs the extra `privacy`, a second or more, and
        T <= 10,000.
      bands: b, in [1, min(T, 4096)] for "banded", and in [1, min(T, `separation`, 1024)] for "optimal_banded". None:
        the least of T, `separation` and 64. The state holds b - 1 updates.
      separation: the least number of rounds from one participation of a client to its next; 1 = every round. None: at
        most one participation in the run.
      error: the error that "optimal_banded" minimises, of the sums over the first 1, ..., T rounds: the "mean" squared
        error, or the "max", which is the error of the last sum. None: "mean".

    Returns: a transform with `noise.mechanism` "banded_toeplitz" or "tree", place "central" and the multiplier z. Its
    `noise.details` has `num_rounds` (T), `separation` (T for None), `participations` (at most, of a client),
    `sensitivity` (S, in clip norms), `bands` (0 for a tree), and `noise_std` (of the noise in the sum of all T rounds,
    in z clip norms).

    Raises: ValueError or TypeError for options out of range; ValueError, when traced, for an aggregate without a
      bounded sensitivity; ImportError without the extra that a strategy needs.

    Guarantees:
      - the noise has the covariance of C^-1 over rounds, and is independent over coordinates
        (tests/transform/test_matrix.py::test_noise_has_the_strategys_covariance)
      - no admissible participation is more visible than under one Gaussian mechanism of multiplier z, and one of them
        is as visible (::test_privacy_of_all_participations)
      - one band gives independent noise (::test_one_band_is_independent_noise)
      - rounds past the last release nothing (::test_rounds_past_the_last)
      - factors, sensitivities, errors and streams are those of jax-privacy (::test_factors_are_jax_privacys,
        ::test_streams_are_the_inverse)
      - the bits are the same on 1, 2 and 8 devices (tests/laws/test_invariance.py::test_noise_on_1_2_8_devices)

    References: Kairouz et al. 2021 (DP-FTRL), algorithm 1; Henzinger, Upadhyay and Upadhyay 2023, section 3 (square
    root); Kalinin and Lampert 2024 (banded square root); Choquette-Choo et al. 2023 (banded matrices, separation);
    McKenna 2024, section 3 (optimal banded Toeplitz).

    >>> noise = matrix_mechanism(1.0, 2.0, num_rounds=100, bands=4).facts.noise
    >>> noise.mechanism, noise.details["participations"], round(noise.details["sensitivity"], 4)
    ('banded_toeplitz', 1, 1.22)
    """
    check_multiplier(noise_multiplier)
    validate.integer("num_rounds", num_rounds, 1, MAX_ROUNDS)
    if separation is not None:
        validate.integer("separation", separation, 1, num_rounds)
    min_separation = num_rounds if separation is None else separation
    if strategy != "optimal_banded" and error is not None:
        validate.fail("error", f"None for {strategy!r}", error, "Only 'optimal_banded' has a choice.")
    if strategy == "tree":
        if bands is not None:
            validate.fail("bands", "None for a tree", bands)
        coefficients = None
        num_rows = num_rounds.bit_length()  # a row for each level of the tree
    else:
        bands = min(num_rounds, min_separation, 64) if bands is None else bands
        if strategy == "banded":
            validate.integer("bands", bands, 1, min(num_rounds, MAX_BANDS))
            coefficients = square_root_coefficients(bands)
        else:
            hint = "It is optimal for bands up to the separation; strategy 'banded' may have more."
            validate.integer("bands", bands, 1, min(num_rounds, min_separation, MAX_OPTIMAL_BANDS), hint=hint)
            coefficients = optimal_coefficients(num_rounds, bands, error="mean" if error is None else error)
        num_rows = bands - 1
    base = clip(clip_norm)
    sensitivity_of_strategy = strategy_sensitivity(coefficients, num_rounds, min_separation)

    def init(update_spec):
        def rows(x):
            return jnp.zeros((num_rows, *x.shape), tree.at_least_float32(x.dtype))

        return jnp.zeros((), jnp.int32), jax.tree.map(rows, update_spec)

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        check_sensitivity(sensitivity)
        round_number, memory = state
        leaves, structure = jax.tree.flatten(aggregate)
        # z C_clip S, times what an update of norm 1 moves in the aggregate (1 / m for `fixed_mean(m)`).
        std = noise_multiplier * clip_norm * sensitivity * sensitivity_of_strategy
        noisy_leaves = []
        next_memory = []
        for i, (x, rows) in enumerate(zip(leaves, structure.flatten_up_to(memory), strict=True)):
            fresh = prng.normal(prng.fold_in(key, i), x.shape)
            if coefficients is None:
                noise, rows = _tree(fresh, rows, round_number)
            else:
                noise, rows = _banded(fresh, rows, coefficients)
            noisy = x.astype(tree.at_least_float32(x.dtype)) + std * noise
            noisy_leaves.append(jnp.where(round_number < num_rounds, noisy, jnp.nan))  # NaN skips the round
            next_memory.append(rows)
        next_state = (round_number + 1, structure.unflatten(next_memory))
        return structure.unflatten(noisy_leaves), next_state, clip_metrics(measured)

    details = {
        "num_rounds": num_rounds,
        "separation": min_separation,
        "participations": -(-num_rounds // min_separation),
        "sensitivity": sensitivity_of_strategy,
        "bands": bands or 0,
        "noise_std": sensitivity_of_strategy * float(prefix_error(coefficients, num_rounds)[-1]),
    }
    name = "tree" if strategy == "tree" else "banded_toeplitz"
    noise = Noise(name, "central", noise_multiplier, clip_norm, "client", details=details)
    return base._replace(init=init, on_server=on_server).stating(releases_when_empty=True, noise=noise)


def _banded(fresh: Array, rows: Array, coefficients: np.ndarray) -> tuple[Array, Array]:
    """The noise of a round under a banded strategy: (y_t = z_t - sum_j c_j y_{t-j}, the last b - 1 of y).

    Args:
      fresh: z_t.
      rows: [b - 1, ...] the last noises y, newest first.
    """
    weights = jnp.asarray(coefficients[1:], rows.dtype).reshape(-1, *(1,) * fresh.ndim)
    noise = fresh - (weights * rows).sum(0)
    return noise, jnp.concatenate([noise[None], rows[:-1]]) if rows.shape[0] else rows


def _tree(fresh: Array, rows: Array, round_number: Array) -> tuple[Array, Array]:
    """The noise of a round under the tree: (the noise of the new node minus that of the nodes that it merges, rows).

    Args:
      fresh: the noise of the new node.
      rows: row l holds the noise of the node of 2^l rounds that is not merged yet.
      round_number: [] int32, from 0.
    """
    # The level of the new node is the number of zeros at the end of the round's number, counted from 1.
    level = jax.lax.population_count(round_number & ~(round_number + 1))
    levels = jnp.arange(rows.shape[0]).reshape(-1, *(1,) * fresh.ndim)
    noise = fresh - jnp.where(levels < level, rows, 0).sum(0)
    return noise, jnp.where(levels < level, 0, jnp.where(levels == level, fresh[None], rows))


def square_root_coefficients(bands: int) -> np.ndarray:
    """Computes the first b coefficients of (1 - x)^(-1/2), the square root of summing over rounds: [b] float64.

    Guarantees: their product with themselves is all ones (tests/transform/test_matrix.py::test_square_root).

    References: Bennett 1977; Henzinger, Upadhyay and Upadhyay 2023.

    >>> square_root_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    steps = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


@validate.named_arguments
def optimal_coefficients(num_rounds: int, bands: int, *, error: Literal["mean", "max"] = "mean") -> np.ndarray:
    """Computes the banded Toeplitz strategy of least error over T rounds, with jax-privacy.

    The error is that of the sums over the first t rounds, times the sensitivity to one participation. Further
    participations, at least b rounds apart, multiply it by a constant. Coefficients are rounded to five decimals, so
    that all machines agree on them.

    Args:
      num_rounds: T in [1, 10,000].
      bands: b in [1, min(T, 1024)].
      error: "mean" of the squared errors over t, or "max".

    Returns: [b] float64; the first coefficient is 1.

    Raises: ImportError without jax-privacy, naming the extra.

    Guarantees: with all bands and "max" it is the square root, which is known to be optimal; no coefficient moved in
    either direction gives less error (tests/transform/test_matrix.py::test_optimal_coefficients).

    References: McKenna 2024, section 3; Dvijotham et al. 2024 (the square root is optimal).

    >>> optimal_coefficients(10, 1).tolist()
    [1.0]
    """
    hint = "Strategy 'banded' has no such limit."
    validate.integer("num_rounds", num_rounds, 1, MAX_OPTIMAL_ROUNDS, hint=hint)
    validate.integer("bands", bands, 1, min(num_rounds, MAX_OPTIMAL_BANDS), hint=hint)
    return np.array(_optimal(num_rounds, bands, error))


@functools.lru_cache(maxsize=32)
def _optimal(num_rounds: int, bands: int, error: str) -> tuple[float, ...]:
    """Returns `optimal_coefficients` as a tuple, computed once for each argument."""
    if bands == 1:
        return (1.0,)
    try:
        from jax_privacy.matrix_factorization import toeplitz
    except ImportError as missing:
        hint = "Install the extra: pip install 'fedjax_sim[privacy]'."
        raise ImportError(f"strategy: expected jax-privacy to be installed. {hint}") from missing
    reduce = {"mean": jnp.mean, "max": jnp.max}[error]
    # On the CPU in any case, and outside of a trace in progress.
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        coefficients = np.asarray(toeplitz.optimize_banded_toeplitz(num_rounds, bands, reduction_fn=reduce), np.float64)
    return tuple(np.round(coefficients / coefficients[0], 5).tolist())


def strategy_sensitivity(coefficients: np.ndarray | None, num_rounds: int, separation: int) -> float:
    """Computes the sensitivity S of a strategy: the most that a client moves C times the sums, in clip norms.

    - Toeplitz matrices with positive, non-increasing coefficients: S is exact, and reached by a client that takes part
      in rounds 0, s, 2s, ... with the same update.
    - Other Toeplitz matrices: S is a bound, that of the smallest non-increasing coefficients that are at least as large
      in magnitude.
    - Trees: S is exact for one participation in a full tree. Otherwise S is a bound, the sum of what each level may
      hold: k participations, of which a node of 2^l rounds sees at most ceil(2^l / s).

    Args:
      coefficients: [b], the first column of a Toeplitz matrix; None = the tree.
      num_rounds: T.
      separation: s, the least number of rounds from one participation to the next.

    Guarantees: no participation pattern moves more (tests/transform/test_matrix.py::test_privacy_of_all_participations,
    ::test_other_coefficients_have_a_bound).

    References: Kalinin and Lampert 2024, theorem 2; Kairouz et al. 2021, section 4 and appendix D.

    >>> strategy_sensitivity(None, 8, 8), strategy_sensitivity(np.ones(1), 8, 4)
    (2.0, 1.4142135623730951)
    """
    participations = -(-num_rounds // separation)
    if coefficients is None:
        seen_by_node = [min(participations, -(-(2**level) // separation)) for level in range(num_rounds.bit_length())]
        return math.sqrt(participations * sum(seen_by_node))
    coefficients = np.maximum.accumulate(np.abs(coefficients)[::-1])[::-1]
    motion = np.zeros(num_rounds)  # of C times the sums, by a client that takes part as often as it may
    for first_round in range(0, num_rounds, separation):
        window = motion[first_round : first_round + len(coefficients)]
        window += coefficients[: len(window)]
    return float(np.linalg.norm(motion))


def prefix_error(coefficients: np.ndarray | None, num_rounds: int) -> np.ndarray:
    """Computes the standard deviation of the noise in the sum of the first t rounds, for z_t of variance 1.

    Args:
      coefficients: [b], as in `strategy_sensitivity`; None = the tree.
      num_rounds: T.

    Returns: [T] float64, for t = 1, ..., T.

    Guarantees: the simulated noise of 7 rounds has this standard deviation within five standard errors, for banded and
    optimal coefficients and for the tree (tests/transform/test_matrix.py::test_noise_has_the_strategys_covariance).

    >>> prefix_error(np.ones(1), 4).tolist(), prefix_error(None, 4)[-1].tolist()
    ([1.0, 1.4142135623730951, 1.7320508075688772, 2.0], 1.0)
    """
    if coefficients is None:
        return np.sqrt([float(t.bit_count()) for t in range(1, num_rounds + 1)])
    from scipy import signal

    impulse = np.zeros(num_rounds)
    impulse[0] = 1
    return np.sqrt(np.cumsum(np.cumsum(signal.lfilter([1.0], coefficients, impulse)) ** 2))

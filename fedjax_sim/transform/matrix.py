"""Noise that is correlated over rounds: privacy for the whole run at once, without sampling (the DP-FTRL family).

A strategy is a lower triangular matrix C over rounds. What is released in round t is the clipped sum plus noise

    y = C^-1 z,    z_t ~ N(0, (z C_clip S)^2 I) fresh in each round,

so that C (sums + y) is one Gaussian mechanism with noise multiplier z, if one client moves C times the sums by at most
S C_clip: S is the strategy's sensitivity, over the rounds in which a client may take part. Later noise cancels earlier
noise: the error of a model, a sum over rounds, grows with log T in place of T.

    banded          C Toeplitz with the first b coefficients of (1 - x)^(-1/2): 1, 1/2, 3/8, ...; b - 1 vectors of state
    optimal_banded  the same with b coefficients that make the error of a run of T rounds least, found by jax-privacy
    tree            C adds up the rounds of every node of a binary tree; floor(log2 T) + 1 vectors of state

One coefficient, b = 1, is independent noise.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, prng, tree, validate
from fedjax_sim.transform.clip import clip, clip_metrics
from fedjax_sim.transform.noise import check_multiplier, check_sensitivity
from fedjax_sim.types import Array, Noise, UpdateTransform

__all__ = [
    "matrix_mechanism",
    "optimal_coefficients",
    "prefix_error",
    "square_root_coefficients",
    "strategy_sensitivity",
]

STRATEGIES = ("banded", "optimal_banded", "tree")
ERRORS = ("mean", "max")
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
    error: str | None = None,
) -> UpdateTransform:
    """Central differential privacy by noise that is correlated over rounds: clipped updates, with y_t added to their
    sum.

    Sampling amplifies nothing, so no sampler must be trusted to be random; but participation must be bounded: the
    sampler calls a client at most once every `separation` rounds, whatever clients do. `sampling.cyclic` over N clients
    with m slots, not shuffled, has a separation of floor(N / m). A round skipped because the model overflowed is not
    released, and leaves one round less between those around it.

    Args:
      clip_norm: C_clip, as in `clip`.
      noise_multiplier: z >= 0, of the WHOLE run: its privacy is that of one Gaussian mechanism with this multiplier.
      num_rounds: T. Later rounds release nothing: the model stays, and the round counts as skipped.
      strategy: "banded"; "optimal_banded", which needs the extra `privacy`, a second or more, and T <= 10,000; "tree".
      bands: b in [1, min(T, 4096)] of "banded", in [1, min(T, `separation`, 1024)] of "optimal_banded"; default: the
        least of T, `separation` and 64. State: b - 1 updates.
      separation: rounds between two participations of a client, 1 if in every round; None: at most one in the run.
      error: what "optimal_banded" makes least, of the sums over the first 1, ..., T rounds: the "mean" squared error
        (default) or the "max", which is the last one's.

    Returns: a transform with `noise.mechanism` "banded_toeplitz" or "tree", place "central", the multiplier z, and in
    `details`: `num_rounds` (T), `separation` (T for None), `participations` (k, at most), `sensitivity` (S, in clip
    norms), `bands` (0 for a tree), `noise_std` (of the noise in the sum of all T rounds, in z clip norms).

    Raises: ValueError, TypeError for options out of range; where the aggregate has no bounded sensitivity, when traced;
    ImportError without the extra that a strategy needs.

    Guarantees: noise has the covariance of C^-1, over rounds, and none over coordinates
    (tests/transform/test_matrix.py::test_noise_has_the_strategys_covariance); no admissible participation is more
    visible than under one Gaussian mechanism of multiplier z, and one is as visible
    (::test_privacy_of_all_participations); one band is independent noise (::test_one_band_is_independent_noise); rounds
    past the last release nothing (::test_rounds_past_the_last); factors, sensitivities, errors and streams are
    jax-privacy's (::test_factors_are_jax_privacys, ::test_streams_are_the_inverse); the same bits on 1, 2 and 8 devices
    (tests/laws/test_invariance.py::test_noise_on_1_2_8_devices).

    References: Kairouz et al. 2021 (DP-FTRL), algorithm 1; Henzinger, Upadhyay and Upadhyay 2023, section 3 (square
    root); Kalinin and Lampert 2024 (banded square root); Choquette-Choo et al. 2023 (banded matrices, separation);
    McKenna 2024, section 3 (optimal banded Toeplitz).

    >>> made = matrix_mechanism(1.0, 2.0, num_rounds=100, bands=4)
    >>> noise = made.facts.noise
    >>> noise.mechanism, noise.details["participations"], round(noise.details["sensitivity"], 4)
    ('banded_toeplitz', 1, 1.22)
    """
    check_multiplier(noise_multiplier)
    validate.integer("num_rounds", num_rounds, 1, MAX_ROUNDS)
    if separation is not None:
        validate.integer("separation", separation, 1, num_rounds)
    apart = num_rounds if separation is None else separation
    if strategy != "optimal_banded" and error is not None:
        validate.fail("error", f"None for {strategy!r}", error, "Only 'optimal_banded' has a choice.")
    if strategy == "tree":
        if bands is not None:
            validate.fail("bands", "None for a tree", bands)
        coefficients, levels = None, num_rounds.bit_length()
    else:
        bands = min(num_rounds, apart, 64) if bands is None else bands
        if strategy == "banded":
            validate.integer("bands", bands, 1, min(num_rounds, MAX_BANDS))
            coefficients = square_root_coefficients(bands)
        else:
            hint = "It is optimal for bands up to the separation; strategy 'banded' may have more."
            validate.integer("bands", bands, 1, min(num_rounds, apart, MAX_OPTIMAL_BANDS), hint=hint)
            coefficients = optimal_coefficients(num_rounds, bands, error="mean" if error is None else error)
    base, moves = clip(clip_norm), strategy_sensitivity(coefficients, num_rounds, apart)

    def init(update_spec):
        kept = levels if coefficients is None else bands - 1

        def rows(x):
            return jnp.zeros((kept, *x.shape), tree.at_least_float32(x.dtype))

        return jnp.zeros((), jnp.int32), jax.tree.map(rows, update_spec)

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        check_sensitivity(sensitivity)
        done, kept = state
        leaves, structure = jax.tree.flatten(aggregate)
        std = noise_multiplier * clip_norm * sensitivity * moves
        zero = engine.hidden_zero(key)
        noisy, after = [], []
        for i, (x, rows) in enumerate(zip(leaves, structure.flatten_up_to(kept), strict=True)):
            fresh = engine.computed_once(prng.normal(jax.random.fold_in(key, i), x.shape), zero)
            noise, rows = _tree(fresh, rows, done) if coefficients is None else _banded(fresh, rows, coefficients, zero)
            # rounded here: otherwise some programs fuse a product into the sum
            noise, rows = engine.rounded_here((std * noise, rows), zero)
            x = x.astype(tree.at_least_float32(x.dtype)) + noise
            noisy.append(jnp.where(done < num_rounds, x, jnp.nan))  # NaN: the engine skips the round
            after.append(rows)
        return structure.unflatten(noisy), (done + 1, structure.unflatten(after)), clip_metrics(measured)

    details = {
        "num_rounds": num_rounds,
        "separation": apart,
        "participations": -(-num_rounds // apart),
        "sensitivity": moves,
        "bands": bands or 0,
        "noise_std": moves * float(prefix_error(coefficients, num_rounds)[-1]),
    }
    name = "tree" if strategy == "tree" else "banded_toeplitz"
    noise = Noise(name, "central", noise_multiplier, clip_norm, "client", details=details)
    return base._replace(init=init, on_server=on_server).stating(releases_when_empty=True, noise=noise)


def _banded(fresh: Array, rows: Array, coefficients: np.ndarray, zero: engine.HiddenZero) -> tuple[Array, Array]:
    """(y_t = z_t - sum_j c_j y_{t-j}, the last b - 1 of y, newest first)."""
    weights = jnp.asarray(coefficients[1:], rows.dtype).reshape(-1, *(1,) * fresh.ndim)
    noise = fresh - engine.computed_once(engine.computed_once(weights * rows, zero).sum(0), zero)
    return noise, jnp.concatenate([noise[None], rows[:-1]]) if rows.shape[0] else rows


def _tree(fresh: Array, rows: Array, done: Array) -> tuple[Array, Array]:
    """(noise of the new node less that of the nodes it merges, rows); row l holds the unmerged node of 2^l rounds."""
    level = jax.lax.population_count(done & ~(done + 1))  # the zeros at the end of done + 1
    levels = jnp.arange(rows.shape[0]).reshape(-1, *(1,) * fresh.ndim)
    noise = fresh - jnp.where(levels < level, rows, 0).sum(0)
    return noise, jnp.where(levels < level, 0, jnp.where(levels == level, fresh[None], rows))


def square_root_coefficients(bands: int) -> np.ndarray:
    """[b] float64: the first coefficients of (1 - x)^(-1/2), the square root of summing over rounds.

    Guarantees: their product with themselves is all ones (tests/transform/test_matrix.py::test_square_root).

    References: Bennett 1977; Henzinger, Upadhyay and Upadhyay 2023.

    >>> square_root_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    steps = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


@validate.named_arguments
def optimal_coefficients(num_rounds: int, bands: int, *, error: Literal["mean", "max"] = "mean") -> np.ndarray:
    """[b] float64, the first one 1: the banded Toeplitz strategy of least error over T rounds, found by jax-privacy.

    The error is that of the sums over the first t rounds, times the sensitivity to one participation; participations at
    least b rounds apart multiply that by a constant. Coefficients are rounded to five decimals, so that machines agree
    on them.

    Args:
      num_rounds: T in [1, 10,000].
      bands: b in [1, min(T, 1024)].
      error: "mean" of the squared errors over t, or "max".

    Raises: ImportError without jax-privacy, naming the extra.

    Guarantees: all bands and the "max" give the square root, which is known to be optimal, and no coefficient moved
    either way gives less (tests/transform/test_matrix.py::test_optimal_coefficients).

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
    if bands == 1:
        return (1.0,)
    try:
        from jax_privacy.matrix_factorization import toeplitz
    except ImportError as missing:
        hint = "Install the extra: pip install 'fedjax_sim[privacy]'."
        raise ImportError(f"strategy: expected jax-privacy to be installed. {hint}") from missing
    reduce = {"mean": jnp.mean, "max": jnp.max}[error]
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = np.float64(toeplitz.optimize_banded_toeplitz(num_rounds, bands, reduction_fn=reduce))
    return tuple(np.round(found / found[0], 5).tolist())


def strategy_sensitivity(coefficients: np.ndarray | None, num_rounds: int, separation: int) -> float:
    """S: the most that a client moves C times the sums, in clip norms; None for coefficients is the tree.

    Toeplitz matrices with positive, non-increasing coefficients: exact, reached by a client that takes part in rounds
    0, s, 2s, ... with the same update. Others: a bound, the S of the smallest non-increasing coefficients that are at
    least as large in magnitude. Trees: exact for one participation in a full tree; otherwise a bound, the sum of what
    each level may hold: k participations, of which a node of 2^l rounds sees at most ceil(2^l / s).

    Guarantees: no participation pattern moves more (tests/transform/test_matrix.py::test_privacy_of_all_participations,
    ::test_other_coefficients_have_a_bound).

    References: Kalinin and Lampert 2024, theorem 2; Kairouz et al. 2021, section 4 and appendix D.

    >>> strategy_sensitivity(None, 8, 8), strategy_sensitivity(np.ones(1), 8, 4)
    (2.0, 1.4142135623730951)
    """
    participations = -(-num_rounds // separation)
    if coefficients is None:
        seen = [min(participations, -(-(2**level) // separation)) for level in range(num_rounds.bit_length())]
        return math.sqrt(participations * sum(seen))
    coefficients = np.maximum.accumulate(np.abs(coefficients)[::-1])[::-1]
    moved = np.zeros(num_rounds)
    for first in range(0, num_rounds, separation):
        window = moved[first : first + len(coefficients)]
        window += coefficients[: len(window)]
    return float(np.linalg.norm(moved))


def prefix_error(coefficients: np.ndarray | None, num_rounds: int) -> np.ndarray:
    """[T] float64: standard deviation of the noise in the sum of the first t rounds, for z_t of variance 1.

    Guarantees: the simulated noise's (tests/transform/test_matrix.py::test_noise_has_the_strategys_covariance).

    >>> prefix_error(np.ones(1), 4).tolist(), prefix_error(None, 4)[-1].tolist()
    ([1.0, 1.4142135623730951, 1.7320508075688772, 2.0], 1.0)
    """
    if coefficients is None:
        return np.sqrt([float(t.bit_count()) for t in range(1, num_rounds + 1)])
    from scipy import signal

    impulse = np.zeros(num_rounds)
    impulse[0] = 1
    return np.sqrt(np.cumsum(np.cumsum(signal.lfilter([1.0], coefficients, impulse)) ** 2))

"""This module audits a mechanism: it tests a privacy claim on the scores of many releases, with a canary and without.

Host code. The mechanism is a black box: `release(key, with_canary) -> score` runs it once. `instruments.audit`
builds such a function for a federated algorithm. Three tests compare the two samples of scores:

    threshold   counts alarms at one threshold, which is chosen on one half of the releases and counted on the other,
                with Clopper-Pearson bounds; valid for every law of the scores, but of no use for deltas below 1 / R
    power       counts alarms in the same way, and compares the power with the most that the claim allows any test at
                that false alarm rate
    gaussian    estimates mu, the mean shift over the standard deviation, and uses the exact Gaussian trade-off; it
                bounds epsilon from both sides. It is valid if scores are Gaussian or, with subsampling, a mixture of
                two Gaussians. So it is used only if the claim states this and a chi-square test (level 1e-6) does not
                refute it

The error 1 - confidence is divided into quarters (Bonferroni): one each for `threshold`, `power`, and the lower and
the upper end of `gaussian`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim
from fedjax_sim.privacy.scores import Estimate, best_threshold, parametric, power_excess
from fedjax_sim.text.bounds import shown_down, shown_up
from fedjax_sim.types import Array
from fedjax_sim.validate import Integer, Number, OpenShare, Positive


@dataclasses.dataclass(frozen=True)
class Audit:
    """An `Audit` is the result of an audit.

    The verdict is one of four:

        "confirmed"      the interval of epsilon contains the claim, and is at most `tolerance` times the claim wide
        "violated"       a lower bound of epsilon lies above the claim
        "loose"          the upper bound lies below the claim, so more noise is added than is accounted for
        "inconclusive"   none of these
    """

    verdict: str
    reason: str
    claim: str
    claimed: float  # the claimed epsilon at delta
    delta: float
    lower: float  # of the realised epsilon at delta, against this canary
    upper: float  # infinite if only thresholds are valid: no count of alarms excludes a rarer event
    estimates: tuple[Estimate, ...]
    num_releases: int  # on each side
    confidence: float
    without: np.ndarray = dataclasses.field(repr=False, compare=False)  # [R] scores of releases without the canary
    with_canary: np.ndarray = dataclasses.field(repr=False, compare=False)  # [R] scores of releases with the canary

    def record(self) -> dict:
        """Returns all figures as JSON values. Numbers that are not finite become None."""
        names = ("verdict", "reason", "claim", "claimed", "delta", "lower", "upper", "num_releases", "confidence")
        record = {name: getattr(self, name) for name in names}
        record["estimates"] = [dataclasses.asdict(value) for value in self.estimates]

        def plain(value: Any) -> Any:
            """Returns `value` with None in place of each number that is not finite, at any depth."""
            # JSON has no infinity and no NaN.
            if isinstance(value, dict):
                return {name: plain(entry) for name, entry in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(entry) for entry in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {name: plain(value) for name, value in record.items()}

    def text(self) -> str:
        """Returns the result as text of several lines."""
        lines = [
            f"{self.verdict}: {self.reason}",
            f"claim: {self.claim}; epsilon {shown_up(self.claimed, 5)} at delta {shown_up(self.delta, 6)}",
            f"found: epsilon in {_interval(self)} at confidence {self.confidence:g}, from "
            f"{self.num_releases:,} releases with the canary and as many without",
        ]
        lines += [
            f"  {estimate.method}: epsilon in {_interval(estimate)}; {estimate.note}" for estimate in self.estimates
        ]
        return "\n".join(lines)


def _interval(bounds: Audit | Estimate) -> str:
    """Shows an interval of epsilon, rounded outwards."""
    return f"[{shown_down(bounds.lower, 5)}, {shown_up(bounds.upper, 5)}]"


@validate.named_arguments
def judge(
    without: np.ndarray,
    with_canary: np.ndarray,
    claim: Claim,
    *,
    delta: OpenShare = 1e-5,
    confidence: Annotated[float, Number(0.5, 1, open_high=True)] = 0.99,
    tolerance: Positive = 0.1,
) -> Audit:
    """Gives the verdict on a privacy claim, from scores of independent releases.

    Args:
      without, with_canary: [R] scores of independent releases without and with the canary, R >= 1,000. Their order must
        not depend on the scores, because one half chooses the threshold and the other half is counted.
      claim: the privacy profile that is promised.
      delta: in (0, 1).
      confidence: of the whole verdict: with this probability no statement in it is wrong.
      tolerance: the largest width of the interval, as a multiple of the claimed epsilon, that confirms the claim.

    Returns: `Audit`.

    Raises: ValueError for scores that are not finite, for fewer than 1,000 scores, and for samples of different
    sizes.

    Guarantees: A true claim is judged violated or loose with probability at most 1 - confidence, and 5 % more or
    less noise than claimed is found at 10^5 releases (tests/privacy/test_audit.py::test_error_rates). The error rate
    holds also if the scores follow neither of the two laws that are fitted (::test_scores_of_another_law). An
    infinite epsilon is never confirmed (::test_claims_of_nothing).

    References: Nasr et al. 2023, section 4.3 (Gaussian trade-off from the scores); Jagielski, Ullman and Oprea 2020,
    section 4 (Clopper-Pearson).
    """
    without, with_canary = (np.asarray(scores, np.float64) for scores in (without, with_canary))
    samples = (without, with_canary)
    for name, scores in zip(("without", "with_canary"), samples, strict=True):
        if scores.ndim != 1 or not np.isfinite(scores).all():
            validate.fail(
                name, "a vector of finite scores", f"shape {scores.shape}, {(~np.isfinite(scores)).sum()} not finite"
            )
        validate.integer(f"releases {name}", scores.size, 1000, hint="Fewer show nothing.")
    # `power_excess` divides the alarms of both samples by a single number of releases.
    if without.size != with_canary.size:
        validate.fail("releases", "as many with the canary as without", tuple(scores.size for scores in samples))

    # Bonferroni: four statements, each wrong with probability at most a quarter of the allowed error.
    error = (1 - confidence) / 4
    claimed = claim.epsilon(delta)
    estimates = [best_threshold(*samples, delta=delta, error=error)]
    fitted = None if claim.scores is None else parametric(*samples, delta=delta, error=error, law=claim.scores)
    estimates += [fitted] if fitted is not None else []
    excess, power_test = power_excess(without, with_canary, claim.power, error=error)
    # The fitted interval is the tighter one, where its law holds. Thresholds bound epsilon from below only.
    lower = estimates[-1].lower if fitted is not None else estimates[0].lower
    upper = fitted.upper if fitted is not None else math.inf
    highest_lower_bound = max(estimate.lower for estimate in estimates)
    # The order of the verdicts: violations first, because they hold whatever the upper bound is.
    if excess > 0:
        description = "of {:.3%} false alarms, at most, has power {:.3%}, at least; the claim allows {:.3%}".format(
            *power_test
        )
        verdict = "violated"
        reason = f"a test {description}"
    elif highest_lower_bound > claimed:
        verdict = "violated"
        reason = f"epsilon is at least {shown_down(highest_lower_bound, 5)}, and {shown_up(claimed, 5)} was claimed"
    elif upper < claimed:
        verdict = "loose"
        reason = f"epsilon is at most {shown_up(upper, 5)}, and {shown_up(claimed, 5)} was claimed"
    elif math.isinf(claimed):
        verdict = "inconclusive"
        reason = "no finite epsilon is claimed, so there is nothing to confirm"
    elif upper - lower <= tolerance * claimed:
        relative_width = (upper - lower) / claimed if claimed else 0.0
        verdict = "confirmed"
        reason = f"the interval holds the claim and is {relative_width:.1%} of it wide"
    else:
        verdict = "inconclusive"
        reason = "no bound excludes the claim, and they are too wide to confirm it"
    return Audit(
        verdict=verdict,
        reason=reason,
        claim=claim.text,
        claimed=claimed,
        delta=delta,
        lower=lower,
        upper=upper,
        estimates=tuple(estimates),
        num_releases=without.size,
        confidence=confidence,
        without=without,
        with_canary=with_canary,
    )


@validate.named_arguments
def audit_release(
    key: Array,
    release: Callable,
    claim: Claim,
    *,
    num_releases: Annotated[int, Integer(1000)] = 1_000_000,
    chunk: int = 50_000,
    delta: float = 1e-5,
    confidence: float = 0.99,
    tolerance: float = 0.1,
) -> Audit:
    """Runs a mechanism many times with a canary and without, in one vmapped program, and judges its claim.

    Args:
      key: a JAX key.
      release: (key, with_canary [] bool) -> [] score; pure and traceable.
      claim: the privacy profile that is promised.
      num_releases: R, with the canary and as many without; rounded up to whole chunks.
      chunk: the number of releases that run at once, which bounds the memory.
      delta, confidence, tolerance: as in `judge`.

    Returns: `Audit`.

    Guarantees: For the central Gaussian mechanism at z = 1 and delta = 1e-5, the interval contains the analytic
    epsilon and is at most 4 % wide (tests/privacy/test_audit.py::test_central_mechanism_is_confirmed). Planted bugs
    are flagged (::test_planted_bugs).

    >>> import jax
    >>> from fedjax_sim.privacy import gaussian_claim
    >>> def release(key, with_canary):
    ...     return jax.random.normal(key) + with_canary
    >>> too_strong = audit_release(jax.random.key(0), release, gaussian_claim(2.0), num_releases=5_000)
    >>> true_claim = audit_release(jax.random.key(0), release, gaussian_claim(1.0), num_releases=50_000)
    >>> too_strong.verdict, true_claim.verdict
    ('violated', 'confirmed')
    """
    import jax
    import jax.numpy as jnp

    validate.integer("chunk", chunk)
    chunk = min(chunk, num_releases)

    @jax.jit
    # [2, chunk] keys: the releases with the canary and without use independent noise.
    def run(key):
        keys = jax.random.split(key, (2, chunk))
        return jax.vmap(jax.vmap(release, (0, None)))(keys, jnp.array([False, True]))

    # -(-a // b) is a / b rounded up.
    score_chunks = [np.asarray(run(jax.random.fold_in(key, index))) for index in range(-(-num_releases // chunk))]
    without, with_canary = np.concatenate(score_chunks, axis=1)
    return judge(without, with_canary, claim, delta=delta, confidence=confidence, tolerance=tolerance)

"""An audit: is a mechanism as private as it claims? Judged from scores of many releases, half of them with a canary.

Host code. The mechanism is a black box: `release(key, with_canary) -> score` runs it once (`instruments.audit` makes
one for a federated algorithm). Three tests look at the two samples of scores:

    threshold   counts of alarms at one threshold, chosen on one half of the releases and counted on the other, with
                Clopper-Pearson bounds: true whatever the law of the scores, but of no use below deltas of about 1 / R
    power       the same, against the most power that any test may have under the claim at that false alarm rate
    gaussian    mean shift over standard deviation, mu; an interval on both sides, exact Gaussian trade-off; it holds if
                scores are Gaussian, or, with subsampling, a mixture of two, and is used only where the claim states so
                and a chi-square test (level 1e-6) does not refute it

The error 1 - confidence is shared out (Bonferroni): a quarter each to `threshold`, `power`, and the lower and the upper
end of `gaussian`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim
from fedjax_sim.privacy.scores import Estimate, best_threshold, parametric, power_excess
from fedjax_sim.types import Array
from fedjax_sim.validate import Integer, Number, OpenShare, Positive

__all__ = ["Audit", "audit_release", "judge"]


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit.

    verdict: "confirmed": the interval holds the claim and is at most `tolerance` of it wide; "violated": a lower bound
    lies above the claim; "loose": the upper bound lies below it, so more noise is added than is accounted for;
    "inconclusive": none of these.
    """

    verdict: str
    reason: str
    claim: str
    claimed: float  # epsilon at delta
    delta: float
    lower: float  # of the realised epsilon at delta, against this canary
    upper: float  # infinite where only thresholds can be trusted: no count of alarms excludes a rarer event
    estimates: tuple[Estimate, ...]
    num_releases: int  # on each side
    confidence: float
    without: np.ndarray = dataclasses.field(repr=False, compare=False)  # [R] scores
    with_canary: np.ndarray = dataclasses.field(repr=False, compare=False)

    def record(self) -> dict:
        """All figures, ready for JSON: an infinite number is None."""
        names = ("verdict", "reason", "claim", "claimed", "delta", "lower", "upper", "num_releases", "confidence")
        record = {name: getattr(self, name) for name in names}
        record["estimates"] = [dataclasses.asdict(x) for x in self.estimates]

        def plain(x):
            if isinstance(x, dict):
                return {name: plain(value) for name, value in x.items()}
            if isinstance(x, (list, tuple)):
                return [plain(value) for value in x]
            return None if isinstance(x, float) and not math.isfinite(x) else x

        return plain(record)

    def text(self) -> str:
        """The result as text of several lines."""
        lines = [
            f"{self.verdict}: {self.reason}",
            f"claim: {self.claim}; epsilon {self.claimed:.4f} at delta {self.delta:g}",
            f"found: epsilon in [{self.lower:.4f}, {self.upper:.4f}] at confidence {self.confidence:g}, from "
            f"{self.num_releases:,} releases with the canary and as many without",
        ]
        lines += [f"  {x.method}: epsilon in [{x.lower:.4f}, {x.upper:.4f}]; {x.note}" for x in self.estimates]
        return "\n".join(lines)


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
    """The verdict on a claim, from scores of releases.

    Args:
      without, with_canary: [R] scores of independent releases, R >= 1,000, in an order that does not depend on the
        scores.
      claim: what is promised.
      delta: in (0, 1).
      confidence: of the whole verdict: with this probability no statement is wrong.
      tolerance: the widest interval, over the claim, that confirms it.

    Raises: ValueError for scores that are not finite, too few or of unequal numbers.

    Guarantees: a true claim is judged violated or loose with probability at most 1 - confidence, and 5 % more or less
    noise than claimed is found at 10^5 releases (tests/privacy/test_audit.py::test_error_rates), also where the law of
    the scores is none of the two that are fitted (::test_scores_of_another_law); an infinite epsilon is never confirmed
    (::test_claims_of_nothing).

    References: Nasr et al. 2023, section 4.3 (Gaussian trade-off from the scores); Jagielski, Ullman and Oprea 2020,
    section 4 (Clopper-Pearson).
    """
    samples = [np.asarray(x, np.float64) for x in (without, with_canary)]
    for name, x in zip(("without", "with_canary"), samples, strict=True):
        if x.ndim != 1 or not np.isfinite(x).all():
            validate.fail(name, "a vector of finite scores", f"shape {x.shape}, {(~np.isfinite(x)).sum()} not finite")
        validate.integer(f"releases {name}", x.size, 1000, hint="Fewer show nothing.")
    if samples[0].size != samples[1].size:
        validate.fail("releases", "as many with the canary as without", tuple(x.size for x in samples))

    share = (1 - confidence) / 4
    claimed = claim.epsilon(delta)
    estimates = [best_threshold(*samples, delta=delta, error=share)]
    fitted = None if claim.scores is None else parametric(*samples, delta=delta, error=share, law=claim.scores)
    estimates += [fitted] if fitted is not None else []
    powerful, rates = power_excess(*samples, claim.power, error=share)
    lower = estimates[-1].lower if fitted is not None else estimates[0].lower
    upper = fitted.upper if fitted is not None else math.inf
    highest = max(x.lower for x in estimates)
    if powerful > 0:
        words = "of {:.3%} false alarms, at most, has power {:.3%}, at least; the claim allows {:.3%}".format(*rates)
        verdict, reason = "violated", f"a test {words}"
    elif highest > claimed:
        verdict, reason = "violated", f"epsilon is at least {highest:.4f}, and {claimed:.4f} was claimed"
    elif upper < claimed:
        verdict, reason = "loose", f"epsilon is at most {upper:.4f}, and {claimed:.4f} was claimed"
    elif math.isinf(claimed):
        verdict, reason = "inconclusive", "no finite epsilon is claimed, so there is nothing to confirm"
    elif upper - lower <= tolerance * claimed:
        wide = (upper - lower) / claimed if claimed else 0.0
        verdict, reason = "confirmed", f"the interval holds the claim and is {wide:.1%} of it wide"
    else:
        verdict, reason = "inconclusive", "no bound excludes the claim, and they are too wide to confirm it"
    return Audit(
        verdict=verdict,
        reason=reason,
        claim=claim.text,
        claimed=claimed,
        delta=delta,
        lower=lower,
        upper=upper,
        estimates=tuple(estimates),
        num_releases=samples[0].size,
        confidence=confidence,
        without=samples[0],
        with_canary=samples[1],
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
      num_releases: R, on each side; rounded up to whole chunks.
      chunk: releases that are run at once, which bounds the memory.
      Others as in `judge`.

    Guarantees: for the central Gaussian mechanism at z = 1 the interval at delta = 1e-5 holds the analytic value and is
    at most 4 % wide (tests/privacy/test_audit.py::test_central_mechanism_is_confirmed); planted bugs are flagged
    (::test_planted_bugs).

    >>> import jax
    >>> from fedjax_sim.privacy import gaussian_claim
    >>> def release(key, with_canary):
    ...     return jax.random.normal(key) + with_canary
    >>> found = audit_release(jax.random.key(0), release, gaussian_claim(2.0), num_releases=5_000)
    >>> found.verdict, audit_release(jax.random.key(0), release, gaussian_claim(1.0), num_releases=50_000).verdict
    ('violated', 'confirmed')
    """
    import jax
    import jax.numpy as jnp

    validate.integer("chunk", chunk)
    chunk = min(chunk, num_releases)

    @jax.jit
    def run(key):
        keys = jax.random.split(key, (2, chunk))
        return jax.vmap(jax.vmap(release, (0, None)))(keys, jnp.array([False, True]))

    parts = [np.asarray(run(jax.random.fold_in(key, i))) for i in range(-(-num_releases // chunk))]
    without, with_canary = np.concatenate(parts, axis=1)
    return judge(without, with_canary, claim, delta=delta, confidence=confidence, tolerance=tolerance)

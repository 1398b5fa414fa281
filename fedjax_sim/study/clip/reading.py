"""This module writes the reading of `clip`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.clip.clients import UnequalClients
from fedjax_sim.study.findings import Comparison


def clip_reading(
    problem: UnequalClients, best: dict[float, float], multiplier: float, found: Sequence[Comparison]
) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      problem: the clients.
      best: the best clip norm for each noise multiplier.
      multiplier: z that was held fixed along the clip norms.
      found: the comparisons of the study.
    """
    clip_norm = best[multiplier]
    at_best, low, high = (problem.parts(C, multiplier) for C in (clip_norm, clip_norm / 4, clip_norm * 4))
    clipped_share = float((problem.norms > clip_norm).mean())
    yield (
        "The error of the released mean has three parts: the bias of clipping, the variance of sampling, and noise of "
        f"variance d (z C / m)^2. For z = {multiplier:g} their sum is least at C = {clip_norm:.3g} median norms, where "
        f"{clipped_share:.0%} of the clients are clipped: bias {at_best.bias / at_best.total:.0%}, sampling "
        f"{at_best.sampling / at_best.total:.0%}, noise {at_best.noise / at_best.total:.0%} of {at_best.total:.3g}. A "
        f"quarter of that C costs {low.total / at_best.total:.2f} times as much, {low.bias / low.total:.0%} of it "
        f"bias; four times that C costs {high.total / at_best.total:.2f} times as much, {high.noise / high.total:.0%} "
        "of it noise."
    )
    norms = ", ".join(f"{C:.3g} at z = {z:g}" for z, C in best.items())
    yield (
        f"The best C falls as noise grows: {norms}. All of these were computed from the clients' data, which a private "
        "run must not do: it pays for a private quantile (adaptive_clip) or takes C from elsewhere. Clipping is not "
        "scaling: updates shorter than C stay as they are."
    )
    yield (
        "A clip that follows each client's own norm keeps every direction and scales the mean alike, and no epsilon "
        "may be stated for it: its sensitivity is the factor times the longest update that any possible client could "
        "send, which is not known beforehand, and the norms themselves leak. Its rows carry noise for the longest "
        "update of these clients, and serve for comparison only."
    )
    lowest_floor = min(rows_of(found, part="floor"), key=lambda row: row["measured"])
    yield (
        "Runs to the error floor have the same two limits, with another balance: the least squared distance, "
        f"{lowest_floor['measured']:.3g}, was at C = {lowest_floor['clip_norm']:g}. Clipped updates no longer add up "
        "to zero at the optimum, so a small C moves the fixed point; that has no closed form here. Where no update is "
        "clipped the floor is that of sampling and noise, (eta^2 variance of the cohort's mean + d (z eta C / m)^2) / "
        "(1 - r^2) with r = 1 - eta: it is a property of constant steps."
    )

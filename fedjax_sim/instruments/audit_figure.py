"""Draws the figure of an audit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedjax_sim.privacy.audit import Audit
from fedjax_sim.report import charts, plots


@plots.style()
def audit_figure(found: Audit) -> Any:
    """Draws scores with the canary and without, and each method's interval for epsilon.

    Args:
      found: the audit.

    Returns: a matplotlib Figure.

    Raises: ImportError without matplotlib.
    """
    figure, (left, right) = charts.panels(1, 2, height=2.9, width_ratios=[1.5, 1])
    # All but the most extreme scores, which would leave the rest in a few bins.
    first, last = np.quantile(np.concatenate([found.without, found.with_canary]), [1e-4, 1 - 1e-4])
    # Equal scores, without noise, have no range.
    edges = np.linspace(first, last, 81) if first < last else first + np.linspace(-0.5, 0.5, 81)
    samples = {"without the canary": found.without, "with the canary": found.with_canary}
    shares = [row for name, scores in samples.items() for row in charts.bins(scores, edges, sample=name)]
    thresholds = [estimate.at for estimate in found.estimates if estimate.at is not None]
    levels = {"chosen threshold": thresholds[0]} if thresholds else None
    charts.histogram(left, shares, "share", by="sample", levels=levels, xlabel="Score of a release",
                     ylabel="Share of releases")  # fmt: skip
    left.set_title(f"{found.verdict.capitalize()}: {found.reason}", wrap=True)

    finite = [bound for e in found.estimates for bound in (e.lower, e.upper) if math.isfinite(bound)]
    finite += [found.claimed] if math.isfinite(found.claimed) else []
    most = 1.15 * max([*finite, 1e-3])
    intervals = [{"method": e.method, "low": e.lower, "high": min(e.upper, most)} for e in found.estimates]
    charts.dots(right, intervals, "method", "low", levels={"claim": min(found.claimed, most)},
                label=f"Epsilon at delta = {found.delta:g}")  # fmt: skip
    # An arrow marks an interval without an upper end.
    endless = [row for row, estimate in enumerate(found.estimates) if math.isinf(estimate.upper)]
    right.plot([most] * len(endless), endless, ">", color=charts.BLUE, clip_on=False)
    right.set_xlim(0, most)
    return figure

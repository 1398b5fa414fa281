"""Draws the figure of an audit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedjax_sim.privacy.audit import Audit
from fedjax_sim.report import plots


def audit_figure(found: Audit) -> Any:
    """Draws scores with the canary and without, and each method's interval for epsilon.

    Args:
      found: the audit.

    Returns: a matplotlib Figure.

    Raises: ImportError without matplotlib.
    """
    with plots.style():
        figure, (left, right) = plots.panels(2, 2.9, width_ratios=[1.5, 1])
        # All but the most extreme scores, which would leave the rest in a few bins.
        scores = np.concatenate([found.without, found.with_canary])
        first, last = np.quantile(scores, [1e-4, 1 - 1e-4])
        edges = np.linspace(first, last, 81)
        if not edges[0] < edges[-1]:
            # Equal scores, without noise, have no range.
            edges = edges[0] + np.linspace(-0.5, 0.5, 81)
        for x, colour, line, name in (
            (found.without, plots.GREY, "-", "without the canary"),
            (found.with_canary, plots.BLUE, (0, (4, 1.6)), "with the canary"),
        ):
            counts = np.histogram(x, edges)[0] / x.size
            left.stairs(counts, edges, fill=True, color=colour, alpha=0.25)
            left.stairs(counts, edges, color=colour, linestyle=line, linewidth=1.3, label=name)
        left.set(xlabel="Score of a release", ylabel="Share of releases")
        threshold = next((x.at for x in found.estimates if x.at is not None), None)
        if threshold is not None:
            left.axvline(threshold, color=plots.BLACK, linewidth=0.9, linestyle=":", label="chosen threshold")
        finite = [bound for e in found.estimates for bound in (e.lower, e.upper) if math.isfinite(bound)]
        finite += [found.claimed] if math.isfinite(found.claimed) else []
        most = 1.15 * max([*finite, 1e-3])
        for row, estimate in enumerate(found.estimates):
            upper = min(estimate.upper, most)
            right.plot([estimate.lower, upper], [row, row], color=plots.BLUE, linewidth=4, solid_capstyle="butt")
            # An arrow marks an interval without an upper end.
            if math.isinf(estimate.upper):
                right.plot([upper], [row], marker=">", color=plots.BLUE, markersize=6)
        right.axvline(min(found.claimed, most), color=plots.ORANGE, linestyle=(0, (4, 1.6)), label="claim")
        right.set(xlabel=f"Epsilon at delta = {found.delta:g}", xlim=(0, most), ylim=(len(found.estimates) - 0.4, -0.6))
        right.set_yticks(range(len(found.estimates)), [estimate.method for estimate in found.estimates])
        left.set_title(f"{found.verdict.capitalize()}: {found.reason}", wrap=True)
        plots.legend(figure, (left, right))
    return figure

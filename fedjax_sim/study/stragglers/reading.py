"""This module writes the reading of `stragglers`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.stragglers.proximal_map import MAP, best_weights
from fedjax_sim.study.stragglers.training import FEDAVG, FEDPROX, PARTIAL

LOSS = "training loss, difference"
VARIANCE = "log10 of the variance, difference"
ACCURACY = "test accuracy, difference"
TENTH = math.log10(1.1)  # a smaller change of a variance is not called steadier


def stragglers_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    yield _levels(found, options)
    yield (
        f"Keeping the partial work of stragglers, beside dropping it: {_verdict(found, PARTIAL, FEDAVG)} "
        f"FedProx's term, beside partial work alone: {_verdict(found, FEDPROX, PARTIAL)} "
        f"FedProx as a whole, beside FedAvg: {_verdict(found, FEDPROX, FEDAVG)}"
    )
    yield _paper(found, options)
    yield _map(found, options)


def _levels(found: Sequence[Comparison], options: dict[str, Any]) -> str:
    """Writes the training losses and accuracies of the most heterogeneous data set, by share of stragglers.

    Args:
      found: the comparisons of the study. The map is their last part, and the most heterogeneous data set the one
        before.
      options: the study's options.

    Returns: a paragraph.
    """
    part = list(dict.fromkeys(comparison.conditions["part"] for comparison in found))[-2]  # before the map
    sentences = []
    for share in options["shares"]:
        numbers = []
        for algorithm in (FEDAVG, PARTIAL, FEDPROX):
            loss, variance, accuracy = (
                comparisons_of(found, part, quantity, stragglers=share, algorithm=algorithm)[0].measured
                for quantity in ("training loss", "variance of the loss", "test accuracy")
            )
            numbers.append(f"{algorithm} {loss:.3g} (variance {variance:.2g}, accuracy {accuracy:.3f})")
        sentences.append(f"with {100 * share:g} % stragglers {'; '.join(numbers)}")
    rows = [comparison.conditions for comparison in found if comparison.quantity == "training loss"]
    best = {row["part"]: row["coefficient"] for row in rows if row["algorithm"] == FEDPROX}
    chosen = ", ".join(f"{coefficient:g} on {part}" for part, coefficient in best.items())
    return (
        f"On {part}, training loss over the second half of {options['num_rounds']} rounds, its variance over these "
        f"rounds, and test accuracy: {'. '.join(sentences)}. mu of FedProx is {chosen}, the best of "
        f"{', '.join(f'{value:g}' for value in options['coefficients'])} in a further run."
    )


def _verdict(found: Sequence[Comparison], algorithm: str, baseline: str) -> str:
    """Writes in how many settings a difference is certain, by quantity."""
    sentences = []
    for quantity, name, sign in ((LOSS, "the loss is lower", -1), (VARIANCE, "its variance is lower", -1),
                                 (ACCURACY, "the accuracy is higher", 1)):  # fmt: skip
        rows = rows_of(found, quantity=quantity, algorithm=algorithm, minus=baseline)
        num_better, num_worse = (
            sum(min(sign * side * row["low"], sign * side * row["high"]) > 0 for row in rows) for side in (1, -1)
        )
        sentences.append(f"{name} in {num_better} of {len(rows)} settings, and the opposite in {num_worse}")
    return f"{'; '.join(sentences)} (beyond the spread of the runs)."


def _paper(found: Sequence[Comparison], options: dict[str, Any]) -> str:
    """Writes where the runs agree with figure 1 of the paper and where not, and what is different here.

    FedAvg's variance over FedProx's is 10^-x, with x the mean of log10 (variance of FedProx / variance of FedAvg). With
    a share s of stragglers nobody of a cohort of m finishes with probability s^m.

    Args:
      found: the comparisons of the study.
      options: the study's options.

    Returns: a paragraph.
    """
    parts = []
    for share in options["shares"]:
        rows = rows_of(found, quantity=VARIANCE, algorithm=FEDPROX, minus=FEDAVG, stragglers=share)
        factors = ", ".join(f"{10 ** -row['measured']:.2g} on {row['part']}" for row in rows)
        parts.append(f"at {100 * share:g} % {factors}")
    most = options["shares"][-1]
    empty = 100 * most ** options["cohort_size"]
    return (
        "Figure 1 of Li et al. 2020, a run on Synthetic(1, 1) and on real data, says that partial work makes the loss "
        f"lower and steadier than dropping it. Here it does on average{_except(found, PARTIAL, FEDAVG)}. It also "
        "says that the proximal term makes the loss lower and steadier, with and without stragglers. Here it does on "
        f"average{_except(found, FEDPROX, PARTIAL)}. FedAvg's variance over FedProx's is, as a geometric mean of "
        f"{options['num_runs']} runs, {'; '.join(parts)}; it includes how far the loss falls over these rounds. By "
        "stability the paper means what one sees in a curve, so the comparison is qualitative. Here each client "
        "straggles by a chance of its own, in the paper an exact share of the cohort does: at "
        f"{100 * most:g} % nobody finishes in {empty:.2g} % of FedAvg's rounds, which change nothing. The paper has "
        "200 rounds, and data of the same distribution from another seed."
    )


def _except(found: Sequence[Comparison], algorithm: str, baseline: str) -> str:
    """Writes in which settings a loss is not lower on average, and in which its variance is not by a tenth.

    Args:
      found: the comparisons of the study; paired differences of the two algorithms are read.
      algorithm: whose loss should be lower.
      baseline: the algorithm that it is compared with.

    Returns: the end of a sentence.
    """
    exceptions = []
    for quantity, name, limit in (
        (LOSS, "the loss is not lower", 0.0),
        (VARIANCE, "it is not a tenth steadier", -TENTH),
    ):
        rows = rows_of(found, quantity=quantity, algorithm=algorithm, minus=baseline)
        shares_by_part: dict[str, list[str]] = {}
        for row in rows:
            if row["measured"] >= limit:
                shares_by_part.setdefault(row["part"], []).append(f"{100 * row['stragglers']:g} %")
        if shares_by_part:
            places = ", ".join(f"{part} at {' and '.join(shares)}" for part, shares in shares_by_part.items())
            exceptions.append(f"{name} on {places}")
    return f", except that {', and '.join(exceptions)}" if exceptions else " in every setting"


def _map(found: Sequence[Comparison], options: dict[str, Any]) -> str:
    """Writes how the best proximal weight moves with the local step."""
    best = best_weights(found)
    weights = ", ".join(f"{row.conditions['proximal_weight']:g} at step {step:g}" for step, row in best.items())
    gaps = comparisons_of(found, MAP)
    num_diverging = sum(comparison.conditions["contraction"] >= 1 for comparison in gaps)
    return (
        f"On quadratics, where every gap is a closed form, the proximal weight with the smallest gap after "
        f"{options['map_rounds']} rounds of {options['map_steps']} local steps is {weights}. With small steps clients "
        "drift little and a weight only makes rounds slower. With larger steps drift is what remains, and a weight "
        "takes it away. Beyond a step of about 2 / (L + lambda) local work diverges, so "
        f"{num_diverging} of {len(gaps)} pairs do, and large steps allow small weights alone. Weight and step must be "
        "tuned together."
    )

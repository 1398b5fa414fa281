"""This module draws the figure of `availability`: bias and excess loss by correlation, by persistence, over a day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_sim.report import charts
from fedjax_sim.study.availability import laws
from fedjax_sim.study.availability.clients import DAYS, correlated, day, rates_of
from fedjax_sim.study.claims import Row, selected

LAWS = {"mean": laws.naive, "corrected": laws.corrected}
WORDS = {"mean": "mean over available clients", "corrected": "weighted by 1 / response rate"}


def availability_figure(rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    """Draws four panels, with theory as lines and measurements as points.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    figure, (bias, excess, stays, hours) = charts.panels(2, 2)
    by_client = [row | {"series": WORDS[row["aggregate"]]} for row in selected(rows, part="by client")]
    predictions = list(_by_correlation(options))
    for panel, quantity, label in ((bias, "bias", "Bias of the model, first coordinate"),
                                   (excess, "excess loss", "Excess loss")):  # fmt: skip
        charts.lines(panel, selected(by_client, quantity=quantity), "correlation", by="series",
                     theory=selected(predictions, quantity=quantity),
                     xlabel="Correlation of data and response rate", ylabel=label)  # fmt: skip
    charts.lines(stays, selected(rows, part="for a while", quantity="excess loss"), "stay",
                 theory=_by_stay(options), xlabel="Rounds that a client stays, or is away",
                 ylabel="Excess loss")  # fmt: skip
    of_hours = selected(rows, part="by hour")
    by_hour = [row | {"series": _training(row["training"], row["step_size"])} for row in of_hours]
    step_sizes = dict.fromkeys(row["step_size"] for row in of_hours)
    charts.lines(hours, by_hour, "hour", by="series", theory=list(_over_a_day(options, step_sizes)),
                 xlabel="Hour of the day", ylabel="Distance to the optimum")  # fmt: skip
    for panel in (excess, stays, hours):
        panel.set_ylim(bottom=0)
    return figure


def _training(training: str, step_size: float) -> str:
    """Returns the name of a series of the panel of hours."""
    return f"{training}, step {step_size:g}"


def _by_correlation(options: Mapping[str, Any]) -> Iterator[Row]:
    """Yields bias and excess loss by theory for each aggregate, as rows, at correlations from 0 to 1."""
    seed = options["seed"]
    rates = rates_of(options["num_clients"], seed)
    s = laws.round_contraction(options["num_steps"], options["step_size"])
    for aggregate, law in LAWS.items():
        for correlation in np.linspace(0, 1, 21).tolist():
            centers = correlated(rates, correlation, options["dimension"], seed)
            optimum = centers.mean(0)
            moments = law(centers, rates, s)
            place = {"correlation": correlation, "series": WORDS[aggregate]}
            yield place | {"quantity": "bias", "predicted": float((moments.mean - optimum)[0])}
            yield place | {"quantity": "excess loss", "predicted": moments.excess(optimum)}


def _by_stay(options: Mapping[str, Any]) -> list[Row]:
    """Returns the excess loss by theory where clients stay for several rounds, as rows."""
    rates = rates_of(options["num_clients"], options["seed"])
    centers = correlated(rates, 0.0, options["dimension"], options["seed"])
    s = laws.round_contraction(options["num_steps"], options["step_size"])
    return [
        {"stay": stay, "predicted": laws.persistent(centers, 1 / stay, 1 / stay, s).excess(centers.mean(0))}
        for stay in np.geomspace(2, max(*options["stays"], 2.5), 12).tolist()
    ]


def _over_a_day(options: Mapping[str, Any], step_sizes: Iterable[float]) -> Iterator[Row]:
    """Yields |w_h - w*| for each hour h and step size, as rows of theory.

    w_h is the model before the round of hour h (`laws.daily`), and w* the mean of the optima.

    Args:
      options: the study's options.
      step_sizes: eta of training around the clock.
    """
    _, is_available, centers = day(options["zone_clients"], options["share"], options["seed"])
    for step_size in step_sizes:
        path = laws.daily(centers, is_available, laws.round_contraction(options["num_steps"], step_size), DAYS)
        for hour, distance in enumerate(np.linalg.norm(path - centers.mean(0), axis=1).tolist()):
            yield {"hour": hour, "series": _training("around the clock", step_size), "predicted": distance}

"""Implements `fedjax-sim audit`: the audit, its text and its figure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from fedjax_sim import aggregation, sampling, server, validate
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.audit import audit_algorithm, one_run_release, sends_its_data
from fedjax_sim.instruments.audit_figure import audit_figure
from fedjax_sim.privacy.one_run import audit_one_run
from fedjax_sim.report.axes import style
from fedjax_sim.text.bounds import shown_down
from fedjax_sim.transform.gaussian import gaussian_mechanism
from fedjax_sim.types import Algorithm

FIGURES = (".png", ".svg", ".pdf")


def audit_command(options: Mapping[str, Any], algorithm: Algorithm | None = None) -> tuple[str, dict]:
    """Audits the central Gaussian mechanism, or a given algorithm.

    Args:
      options: the audit's options, with these defaults. Of the mechanism, and only without `algorithm`:
        noise_multiplier (1.0), clip_norm (1.0), sampling_rate (1.0), and num_canaries (1,000), the canaries of a
        further audit by a single run, which needs a rate of 1; 0 for none. Of the audit: num_rounds (1), delta (1e-5),
        num_releases (1,000,000), confidence (0.99), length (10.0), seed (0), figure (None, or the path of the file to
        write).
      algorithm: the algorithm that is audited, with its own sampler; None for the plain mechanism.

    Returns: (a text to print, a dict that JSON can hold).

    Raises: ValueError for an unknown option, for an option out of range, and for a figure that cannot be written,
    before anything is run.

    Guarantees: the default is confirmed (tests/privacy/test_audit.py::test_the_command).
    """
    mechanism_defaults = {"noise_multiplier": 1.0, "clip_norm": 1.0, "sampling_rate": 1.0, "num_canaries": 1000}
    audit_defaults = {"num_rounds": 1, "length": 10.0, "num_releases": 1_000_000, "delta": 1e-5, "confidence": 0.99}
    defaults = (mechanism_defaults if algorithm is None else {}) | audit_defaults | {"seed": 0, "figure": None}
    for name in options:
        validate.one_of("options", name, defaults)
    chosen = defaults | dict(options)
    validate.integer("seed", chosen["seed"], 0)
    num_canaries = chosen.get("num_canaries", 0)
    validate.integer("num_canaries", num_canaries, 0, 100_000)
    if chosen["figure"] is not None:
        _check_figure(Path(chosen["figure"]))
    build = None
    if algorithm is None:
        validate.in_range("sampling_rate", chosen["sampling_rate"], 0, 1, open_low=True)
        build = functools.partial(_central, chosen["clip_norm"], chosen["noise_multiplier"])
        algorithm = build(1, chosen["sampling_rate"])
        num_canaries = num_canaries if chosen["sampling_rate"] == 1 else 0
    key = jax.random.key(chosen["seed"])
    result = audit_algorithm(key, algorithm, **{name: chosen[name] for name in audit_defaults})
    text = result.text()
    record = result.record()
    if build is not None and num_canaries:
        # Every client is a canary, so the population has as many clients as there are canaries.
        release = jax.jit(one_run_release(build(num_canaries, 1), length=chosen["length"]))
        included, scores = release(jax.random.fold_in(key, 1))
        one_run = audit_one_run(included, scores, delta=chosen["delta"], confidence=chosen["confidence"])
        text += f"\n  {one_run.method}: epsilon at least {shown_down(one_run.lower, 5)}; {one_run.note}"
        record["one_run"] = {"lower": one_run.lower, "note": one_run.note, "num_canaries": num_canaries}
    if chosen["figure"] is not None:
        audit_figure(result).savefig(chosen["figure"])
    return text, record


def _check_figure(path: Path) -> None:
    """Refuses a figure of an unknown kind, or in a place that cannot be written, before the audit takes its time.

    Args:
      path: of the figure.

    Raises: ImportError without matplotlib.
    """
    with style():
        pass  # it needs what the figure will need
    if path.suffix not in FIGURES:
        validate.fail("figure", "a file that ends in " + ", ".join(FIGURES), str(path))
    try:
        missing = not path.exists()
        path.open("ab").close()
        # A later refusal must leave no empty figure.
        if missing:
            path.unlink()
    except OSError as error:
        validate.fail("figure", "a file that can be written", str(path), f"{error.strerror}.")


def _central(clip_norm: float, noise_multiplier: float, num_clients: int, rate: float) -> Algorithm:
    """Returns the central Gaussian mechanism over clients that are invited independently with probability `rate`."""
    return federated(
        sampling.full(num_clients) if rate == 1 else sampling.poisson(num_clients, rate),
        sends_its_data(),
        aggregation.fixed_mean(float(num_clients)),
        server.optimizer(optax.sgd(1.0)),
        gaussian_mechanism(clip_norm, noise_multiplier),
        mesh=None,
    )

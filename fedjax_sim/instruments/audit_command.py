"""The function behind `fedjax-sim audit`."""

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
from fedjax_sim.transform.gaussian import gaussian_mechanism
from fedjax_sim.types import Algorithm

__all__ = ["audit_command"]

FIGURES = (".png", ".svg", ".pdf")


def audit_command(options: Mapping[str, Any], algorithm: Algorithm | None = None) -> tuple[str, dict]:
    """The function behind `fedjax-sim audit`: audits the central Gaussian mechanism, or a given algorithm.

    Args:
      options: noise_multiplier (1.0), clip_norm (1.0), sampling_rate (1.0), num_rounds (1), delta (1e-5), num_releases
        (1,000,000), confidence (0.99), length (10.0), num_canaries (1,000: of a further audit by one run, which needs a
        rate of 1; 0 = without), seed (0), figure (None, or a path to write one to). The first three and num_canaries
        only without `algorithm`.
      algorithm: audited instead of the plain mechanism, with its own sampler.

    Returns: (a text to print, a dict that JSON can hold).

    Raises: ValueError for an unknown option or one out of range, and for a figure that cannot be written, before
    anything is run.

    Guarantees: the default is confirmed (tests/privacy/test_audit.py::test_the_command).
    """
    mechanism = {"noise_multiplier": 1.0, "clip_norm": 1.0, "sampling_rate": 1.0, "num_canaries": 1000}
    judged = {"num_rounds": 1, "length": 10.0, "num_releases": 1_000_000, "delta": 1e-5, "confidence": 0.99}
    known = (mechanism if algorithm is None else {}) | judged | {"seed": 0, "figure": None}
    for name in options:
        validate.one_of("options", name, known)
    chosen = known | dict(options)
    validate.integer("seed", chosen["seed"], 0)
    canaries = chosen.get("num_canaries", 0)
    validate.integer("num_canaries", canaries, 0, 100_000)
    if chosen["figure"] is not None:
        _check_figure(Path(chosen["figure"]))
    if algorithm is None:
        validate.in_range("sampling_rate", chosen["sampling_rate"], 0, 1, open_low=True)
        build = functools.partial(_central, chosen["clip_norm"], chosen["noise_multiplier"])
        algorithm = build(1, chosen["sampling_rate"])
        canaries = canaries if chosen["sampling_rate"] == 1 else 0
    key = jax.random.key(chosen["seed"])
    found = audit_algorithm(key, algorithm, **{name: chosen[name] for name in judged})
    text = found.text()
    record = found.record()
    if canaries:
        included, seen = jax.jit(one_run_release(build(canaries, 1), length=chosen["length"]))(
            jax.random.fold_in(key, 1)
        )
        once = audit_one_run(included, seen, delta=chosen["delta"], confidence=chosen["confidence"])
        text += f"\n  {once.method}: epsilon at least {once.lower:.4f}; {once.note}"
        record["one_run"] = {"lower": once.lower, "note": once.note, "num_canaries": canaries}
    if chosen["figure"] is not None:
        audit_figure(found).savefig(chosen["figure"])
    return text, record


def _check_figure(path: Path) -> None:
    if path.suffix not in FIGURES:
        validate.fail("figure", "a file that ends in " + ", ".join(FIGURES), str(path))
    try:
        missing = not path.exists()
        path.open("ab").close()
        if missing:
            path.unlink()  # what is refused next leaves no empty figure
    except OSError as error:
        validate.fail("figure", "a file that can be written", str(path), f"{error.strerror}.")


def _central(clip_norm: float, noise_multiplier: float, num_clients: int, rate: float) -> Algorithm:
    """The central Gaussian mechanism over clients that are invited independently with probability `rate`."""
    return federated(
        sampling.full(num_clients) if rate == 1 else sampling.poisson(num_clients, rate),
        sends_its_data(),
        aggregation.fixed_mean(float(num_clients)),
        server.optimizer(optax.sgd(1.0)),
        gaussian_mechanism(clip_norm, noise_multiplier),
        mesh=None,
    )

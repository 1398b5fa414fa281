"""This module states in sentences what a privacy guarantee assumes, and what it means."""

from __future__ import annotations

import math
from typing import Any

from fedjax_sim.privacy.mechanism import CORRELATED, INTEGERS, PURE, Mechanism
from fedjax_sim.text.bounds import shown_up

ADJACENCY_WORDS = {
    "add_or_remove_one": "one added or removed",
    "replace_one": "one replaced by another",
    "zero_out": "one's contribution replaced by nothing",
}
_TRUST = {
    "central": "The server is trusted: it sees every message, and adds the noise.",
    "distributed": "Nobody sees less than the sum of all messages: secure aggregation, of messages that all arrive.",
    "local": "Nobody is trusted with data: noise is added before anything leaves the client.",
}
ONE_RUN = (
    "It covers one run with a secret seed, used once: whoever knows the seed can remove the noise, and configs, "
    "commands, reports and checkpoints show it; other runs over the same data, and other points of a sweep, add to "
    "what is spent."
)
UNRECORDED = (
    "Each client's inputs are assumed to depend on its own rows alone, for nothing records how they were prepared: a "
    "mean, a vocabulary or classes that were learnt from the rows of several clients are not covered."
)
UNCOVERED = (
    "What else a run shows of its clients is not covered: losses and measurements at clients, evaluations of clients "
    "and their spread, counts of who was invited, reported, was dropped or clipped, norms, bytes, times, variance "
    "probes, sizes, label mixes and digests of data, and client memory and states of samplers in checkpoints."
)


def describe_rate(made: Mechanism) -> str:
    """Describes the law of the cohort as a phrase.

    Args:
      made: the mechanism that the accountant reads.
    """
    clients = f"{made.detail('level', 'client')}s"
    size = f"{made.cohort_size:,.6g} of {made.population_size:,} {clients}"
    # A record is drawn in the steps of its client, whatever cohorts are drawn.
    if made.unit == "record":
        steps = made.detail("steps")
        how_often = f"with probability {made.drawn_from[1]:.6g}"
        how_often = "surely" if made.law == "always" else how_often
        return f"{steps} noisy steps a round, each of which sees a record {how_often}; a client may be in every round"
    # All rounds are one mechanism, whose noise depends on how often a client takes part.
    if made.kind in CORRELATED:
        participations = made.detail("participations")
        separation = made.detail("separation")
        sender = made.detail("level", "client")
        often = f"at most {participations:,} times, {separation:,} rounds apart or more"
        return f"each {sender} {often}; being sampled amplifies nothing"
    if made.place == "local":
        return "every message by itself; sampling amplifies nothing"
    return {
        "full": f"all {made.population_size:,} {clients} in every round",
        "poisson": f"Poisson, {size} expected (q = {made.rate:.6g})",
        "truncated_poisson": f"Poisson in {made.num_slots:,} slots, {size} expected (q = {made.rate:.6g})",
        "uniform_without_replacement": f"exactly {size}, without replacement",
    }[made.scheme]


_PURE_WORDS = {
    "laplace": "Laplace noise",
    "privunit": "PrivUnit",
    "randomized_response": "Randomised response",
}


def assumptions(mechanism: Mechanism, delta: float) -> tuple[str, ...]:
    """States the assumptions that an epsilon of this mechanism relies on, one sentence each.

    Args:
      mechanism: a `Mechanism`.
      delta: at which epsilon is stated; 0 to leave out the sentences that delta is too large.

    Returns: sentences.

    >>> mechanism = Mechanism(noise_multiplier=1.0, scheme="full", population_size=10, cohort_size=10, num_slots=10)
    >>> assumptions(mechanism, 1e-5)[0]
    'The server is trusted: it sees every message, and adds the noise.'
    """
    return (
        *_trust(mechanism),
        *_preparation(mechanism),
        *_drawing_and_dropouts(mechanism),
        *_simulation_and_noise(mechanism),
        *_large_delta(mechanism, delta),
    )


def _trust(mechanism: Mechanism) -> list[str]:
    """Says who is trusted, what others see, and what a level of a hierarchy changes.

    Args:
      mechanism: its place, and the details "level" and "protects", decide the sentences.

    Returns: sentences; those about trust, one run and what others see are there for every mechanism.
    """
    level = mechanism.detail("level")
    sentences = [_TRUST[mechanism.place]]
    if level is not None and mechanism.place == "local":
        sentences = [f"The server is not trusted: each {level} adds noise to its own message before that leaves it."]
    # The first assumptions hold for every mechanism: trust, one run, and what others see.
    visible = "Messages and models" if mechanism.place == "local" else "Models"
    sentences += [ONE_RUN, f"{visible} alone are seen by others. {UNCOVERED}"]
    if level is not None:
        sentences.append(
            f"Each {level} is trusted by its clients: it sees their messages, and no noise is added below it."
        )
    if mechanism.detail("protects") == "members":
        sentences.append(
            f"A client that is added, removed or replaced changes the message of its {level}, which moves the sum by "
            f"up to two clip norms. Whole {level}s are drawn: drawing clients inside of one gains nothing."
        )
    return sentences


def _preparation(mechanism: Mechanism) -> list[str]:
    """Says what is assumed about how the clients' inputs were prepared."""
    sentences = mechanism.detail("preparation", UNRECORDED)
    return [sentences] if sentences else []


def _drawing_and_dropouts(mechanism: Mechanism) -> list[str]:
    """Says how units are drawn, what has to stay secret for that, and what dropouts and local noise change.

    Args:
      mechanism: its law, unit, place and `thinned` decide the sentences.

    Returns: sentences, perhaps none.
    """
    sentences = []
    # How units are drawn, and what has to stay secret for that.
    if mechanism.unit == "record":
        sentences.append(
            "How many examples a client has is no secret; what it measures beside its message is not covered."
        )
    elif mechanism.law in ("poisson", "truncated_poisson", "without_replacement"):
        sentences.append("Who is invited stays secret, and is drawn afresh in each round, whatever the data.")
    if mechanism.law == "truncated_poisson":
        drawn = mechanism.detail("level", mechanism.unit)
        slots = f"Of more than {mechanism.drawn_from[2]:,} drawn {drawn}s a uniform choice is kept"
        sentences.append(f"{slots}: that one may take another's slot is accounted for, not added to delta.")
    if mechanism.law == "without_replacement":
        sentences.append(
            "Cohorts of fixed size are no Poisson samples: one client more means another one less, so neighbours "
            "differ by two clip norms, and only a looser bound (Wang et al. 2019) is known."
        )
    # Dropouts and local noise.
    if mechanism.thinned:
        sentences.append(
            "Who drops out does so whatever others hold. A sample of a sample is the same with a lower rate, so the "
            "epsilon of all those invited still holds; nothing is gained from dropouts."
        )
    if mechanism.place == "local":
        sentences.append(
            "Sampling amplifies nothing against whoever receives messages: a client may be in every round."
        )
        sentences.append("That a client sends is no secret, nor that one without examples does not.")
    return sentences


def _simulation_and_noise(mechanism: Mechanism) -> list[str]:
    """Says where a simulation and its kind of noise limit the statement.

    Args:
      mechanism: its kind, and the details "noise_cohort_size" and "adaptive", decide the sentences.

    Returns: sentences, at least one about numerics.
    """
    sentences = []
    # Limits of a simulation: simulated cohorts and adaptive clipping.
    if (noise_cohort_size := mechanism.detail("noise_cohort_size")) is not None:
        simulated = mechanism.detail("simulated_cohort_size")
        sentences.append(
            f"It holds for cohorts of {noise_cohort_size:,} clients only, whose noise is simulated, and NOT for the "
            f"cohorts of {simulated:,.6g} that this run draws."
        )
    if mechanism.detail("adaptive"):
        sentences.append(
            "The clip norm follows a noisy quantile; the noise multiplier is that of both releases together."
        )
    # Limits of the noise: correlation, integers and float32.
    if mechanism.kind in CORRELATED:
        sentences.append(
            f"Noise is correlated over the {mechanism.detail('num_rounds'):,} rounds of the run, which are one "
            "Gaussian mechanism: all of it is charged with the first round. Later rounds release nothing."
        )
    if mechanism.kind in INTEGERS:
        sentences.append(
            f"Noise in integers, accounted for at the longest rounded update, {mechanism.detail('l2_units'):.6g} units "
            f"of the grid in {mechanism.detail('dimension'):,} numbers; the tables' error is taken from delta."
        )
    else:
        sentences.append("Idealised numerics: float32 noise of a simulation hardens no deployment (Mironov 2012).")
    return sentences


def _large_delta(mechanism: Mechanism, delta: float) -> list[str]:
    """Says where delta is too large to mean anything: not below the chance of being drawn, or not below 1 / units.

    Args:
      mechanism: with the number of units that are protected, None if it is not known.
      delta: in [0, 1); 0 is never too large.

    Returns: sentences; none for a small delta and a known number of units.
    """
    sentences = []
    # With delta above this chance, a mechanism could publish the data of a drawn unit and still meet (0, delta).
    if mechanism.law != "always" and not (delta < (draw_probability := mechanism.drawn_from[1])):
        sentences.append(
            f"delta {delta:g} is not below {draw_probability:g}, the chance that one "
            f"{mechanism.detail('level', mechanism.unit)} is drawn: what is published once without any noise could "
            "meet it."
        )
    # A useful delta lies below one over the number of units.
    if mechanism.num_units is None:
        sentences.append(
            "How many clients there are in all is not known here: delta means something below one over it."
        )
    elif not (delta < 1 / mechanism.num_units):
        noun = "client" if mechanism.detail("protects") == "members" else mechanism.detail("level", mechanism.unit)
        too_large = f"delta {delta:g} is not below one over the number of {noun}s, {1 / mechanism.num_units:g}"
        sentences.append(f"{too_large}: a mechanism that publishes one client's data outright could meet it.")
    return sentences


def explain(subject: Any) -> str:
    """Explains a mechanism, or the privacy that was spent, in several lines.

    Args:
      subject: a `Mechanism` or a `PrivacySpent`.

    Returns: text of several lines.

    Guarantees: The text names adjacency, unit, sampler, accountant, numerics and every assumption
    (tests/privacy/test_commands.py::test_explanations_leave_nothing_out).

    >>> mechanism = Mechanism(noise_multiplier=1.0, scheme="full", population_size=10, cohort_size=10, num_slots=10)
    >>> print(explain(mechanism).splitlines()[0])
    Gaussian noise with a standard deviation of 1 clip norms (1) in the sum of the messages, by the server.
    """
    if isinstance(subject, Mechanism):
        assert subject.adjacency is not None, "a Mechanism chooses one if none is given"
        sender = subject.detail("level", "client")
        # For a mechanism: the noise, the sampling, the neighbours, and then the assumptions.
        where = {
            "central": "in the sum of the messages, by the server",
            "distributed": f"in the sum of the messages, a share by each {sender}",
            "local": f"in every message, by its {sender}",
        }[subject.place]
        if subject.unit == "record":
            where = "in every step of a client, on the sum of its examples' gradients"
        kinds = {"discrete_gaussian": "Discrete Gaussian", "skellam": "Skellam", "gaussian": "Gaussian"}
        kind = kinds.get(subject.kind, "Correlated Gaussian")
        where = "relative to what a client moves in all rounds together" if subject.kind in CORRELATED else where
        std = f"{shown_up(subject.noise_multiplier, 6)} clip norms"
        std += f" ({shown_up(subject.noise_multiplier * subject.clip_norm, 6)})"
        noise = f"{kind} noise with a standard deviation of {std} {where}."
        if subject.kind in PURE:
            epsilon = 1 / subject.noise_multiplier
            noise = f"{_PURE_WORDS[subject.kind]}, with epsilon {shown_up(epsilon, 6)} and no delta {where}."
        moves = f"what the noise is added to by at most {subject.moves} clip norm{'s' if subject.moves > 1 else ''}"
        lines = [
            noise,
            f"Sampling: {describe_rate(subject)}.",
            f"Neighbours: data sets with {ADJACENCY_WORDS[subject.adjacency]} (unit: {subject.protected}), which "
            + ("changes one message in any way." if subject.kind in PURE else f"moves {moves}."),
            *(f"- {sentence}" for sentence in assumptions(subject, 0.0)),
        ]
        return "\n".join(lines)
    return "\n".join([f"{subject}.", _meaning(subject), f"Numerics: {subject.numerics}.",
                      *(f"- {sentence}" for sentence in subject.assumptions)])  # fmt: skip


def _meaning(spent: Any) -> str:
    """States the meaning of (epsilon, delta) in a sentence."""
    if math.isinf(spent.epsilon):
        return "There is no guarantee at all."
    # e^700 is near the largest float64.
    factor = math.exp(min(spent.epsilon, 700))
    return (
        f"Whatever one learns from what is released is at most {shown_up(factor)} times as likely with the data of one "
        f"{spent.unit} as with its neighbour ({ADJACENCY_WORDS[spent.adjacency]}), but for a chance of "
        f"{shown_up(spent.delta, 6)}."
    )

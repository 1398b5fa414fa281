"""What a round inside of a hierarchy tells the levels above it, and how it sees the clients of its group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, population
from fedjax_sim.round.counts import bytes_of, from_int
from fedjax_sim.round.levels import Told, by_own_ids, named_by, summed_over_rounds, told, without_empty_places
from fedjax_sim.sampling.time.lost_reports import losing
from fedjax_sim.types import Aggregator, Cohort, Count, Inside, Mean, Metric, Received, Round
from tests.laws import problems as p
from tests.refusals import refused

GROUPS = np.arange(p.NUM_CLIENTS) % 5 % 3  # groups of 10, 9 and 5 clients
MEMBERS = np.flatnonzero(GROUPS == 2)
GROUP = population.grouped(p.ragged(), GROUPS).group(jnp.int32(2))
PLACES = np.array([7, 0, 4, 9, 2], np.int32)  # of which 7 and 9 are empty


def value(words) -> int:
    """Python's integer of two words."""
    return (int(words[0]) << 32) + int(words[1])


def test_nothing_is_sent_by_an_empty_place():
    """Catches an empty place that is invited, that reports, whose late message costs bytes or whose loss is counted."""
    is_there = PLACES < len(MEMBERS)
    everyone = jnp.ones(5, bool)
    cohort = Cohort(jnp.array(PLACES), everyone, everyone)
    cohort = losing(cohort, "late", jnp.array([True, True, False, False, False]), 9).timed(sent=everyone)
    found = without_empty_places(cohort, GROUP)
    assert found.invited.tolist() == found.timing.sent.tolist() == is_there.tolist()
    assert found.reported.tolist() == (is_there & [False, False, True, True, True]).tolist()
    assert (int(cohort.metrics["late"]), int(found.metrics["late"])) == (2, 1)
    assert without_empty_places(cohort, p.ragged()) is cohort  # in a whole population there is a client for each id
    assert without_empty_places(cohort.timed(sent=None), GROUP).timing.sent is None  # nobody's message is late


def test_an_aggregator_sees_the_ids_of_the_whole_population():
    """Faults: a place in the group in the place of an id, a function of the aggregator that is left out, a cohort whose
    ids are not those of its messages, an empty place whose id is negative."""
    seen = {}

    def keep(name):
        def function(key, round, *arguments):
            received = [x.ids.tolist() for x in arguments if isinstance(x, Received)]
            seen[name] = [round.cohort.ids.tolist(), *received]

        return function

    names = ("accumulate", "finalize", "stays", "view")
    rule = Aggregator(init=None, **{name: keep(name) for name in names})
    expected = [int(MEMBERS[place]) if place < len(MEMBERS) else 0 for place in PLACES]
    round = Round(Cohort(jnp.array(PLACES), jnp.ones(5, bool), jnp.ones(5, bool)))
    received = Received((), jnp.ones(5), jnp.array(PLACES), jnp.arange(5))
    translated = by_own_ids(rule, GROUP)
    translated.accumulate(None, round, "carry", received)
    translated.view(None, round, received)
    translated.finalize(None, round, "carry")
    translated.stays(None, round)
    assert seen == {name: [expected] * (2 if name in ("accumulate", "view") else 1) for name in names}
    without = by_own_ids(rule._replace(stays=None, view=None), GROUP)
    assert without.stays is None and without.view is None
    assert by_own_ids(rule, p.ragged()) is rule
    people = p.ragged()
    with refused("population", value=type(people).__name__, rule="own ids"):
        by_own_ids(aggregation.mean().stating(attackers=lambda key, ids: ids < 2), people)


def report(**info) -> Told:
    """The report of a round whose clients have a metric `loss` and a count `steps`."""
    info = {"skipped_rounds": jnp.int32(0)} | info
    means = {"loss": Mean(jnp.float32(6), jnp.float32(2))}
    return told(Inside(info, means, {"steps": bytes_of(jnp.int32(40))}, jnp.float32(5), jnp.array(False)), "edge")


def test_what_a_round_tells():
    """Faults: the clients' own numbers twice, once under the level's name; a mean that counts rounds without a value;
    an array that cannot be summed; a round that was skipped and counts as used."""
    found = report(
        uplink_bytes=Count.of(jnp.int32(3), 2**31),
        clients_reported=jnp.int32(3),
        update_norm=jnp.float32(0.5),
        utilisation=jnp.float32(np.nan),
        loss=jnp.float32(3),
        client_loss=jnp.float32(3),
        steps=Count.of(jnp.int32(40), 1),
        error_ids=jnp.arange(8),
    )
    assert {name: value(x) for name, x in found.counts.items()} == {
        "steps": 40,
        "edge_uplink_bytes": 3 * 2**31,
        "edge_clients_reported": 3,
        "edge_skipped_rounds": 0,
    }
    scalars = {name: (float(x.total), float(x.weight)) for name, x in found.scalars.items()}
    assert scalars == {"edge_update_norm": (0.5, 1.0), "edge_utilisation": (0.0, 0.0)}
    assert set(found.means) == {"loss"} and bool(found.used) and not bool(report(skipped_rounds=jnp.int32(1)).used)
    with refused("name", value="edge", rule="a level inside"):
        told(Inside({"steps": jnp.int32(1)}, {}, {"edge_steps": bytes_of(jnp.int32(1))}, 1.0, False), "edge")


def test_the_sum_over_rounds():
    """Faults: counts that wrap at 32 bits, a mean of means, the weight of a round that was skipped."""
    sizes, used = [2**32 - 1, 2**32 - 1, 2**40], [True, False, True]
    reports = [
        Told(
            means={"loss": Mean(jnp.float32(total), jnp.float32(weight))},
            scalars={"edge_norm": Mean(jnp.float32(total / 4), jnp.float32(1))},
            counts={"edge_bytes": from_int(size)},
            weight=jnp.float32(weight),
            used=jnp.array(is_used),
            broken=jnp.array(False),
        )
        for total, weight, size, is_used in zip([6, 1, 4], [2, 8, 1], sizes, used, strict=True)
    ]
    means, counts, (used_weight, num_used) = summed_over_rounds(jax.tree.map(lambda *x: jnp.stack(x), *reports))
    assert value(counts["edge_bytes"]) == sum(sizes) > 2**32
    assert {name: (float(x.total), float(x.weight)) for name, x in means.items()} == {
        "loss": (11.0, 11.0),
        "edge_norm": (2.75, 3.0),
    }
    assert (float(used_weight), int(num_used)) == (2 + 1, 2)


def test_names_of_a_level():
    """Catches a metric of the level that points to the number of another level."""
    metric = Metric("late", "clients too late", "count", "mean", instead="lost", by="clients_reported")
    (found,) = named_by("edge", (metric,))
    names = (found.name, found.words, found.instead, found.by)
    assert names == ("edge_late", "clients too late (edge)", "edge_lost", "edge_clients_reported")
    (plain,) = named_by("edge", (Metric("late", "clients too late"),))
    assert plain.instead is None and plain.by is None

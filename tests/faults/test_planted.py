"""Real faults, planted one at a time: the law that must notice each of them does.

The laws themselves run unharmed in tests/laws and tests/oracles; here each meets its fault and must fail.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import aggregation, engine, prng, server, tree, types
from fedjax_sim.engine import shuffling
from fedjax_sim.engine.arithmetic import exact_sum, exact_sums
from fedjax_sim.engine.client_memory import disk
from fedjax_sim.privacy import accountant
from fedjax_sim.running import fingerprint
from tests import compiler, test_prng
from tests.engine.arithmetic import test_exact_sums
from tests.engine.client_memory import test_disk
from tests.laws import cases, laws, test_facts, test_foreign_updates, test_rounding
from tests.privacy import test_accountant
from tests.running import test_privacy_ledger
from tests.sampling import test_participation
from tests.sweeps import test_ragged

pytestmark = pytest.mark.optimised(False)  # each law fails, whatever compiles it

# modules, for subpackages export functions of their names
composer, rounds, gathering, one_client = (
    importlib.import_module(f"fedjax_sim.round.{name}") for name in ("federated", "round", "collect", "message")
)
training = importlib.import_module("fedjax_sim.client.local_sgd")
losses = importlib.import_module("fedjax_sim.client.losses")
FAULTS, LATER = {}, set()


def fault(law, *, full=False):
    """Registers a fault and the law that must fail under it; a law's first is planted in every run, unless `full`."""

    def register(plant):
        FAULTS[plant.__name__] = (plant, law)
        LATER.update({law} if full else ())
        return plant

    return register


@fault(laws.order_is_irrelevant)
def key_by_slot(patch):
    fold = engine.fold

    def by_slot(each, accumulate, shared, carry, slots, **options):
        def keyed(shared, slot):
            return each(shared, slot._replace(keys=[words + slot.position.astype(jnp.uint32) for words in slot.keys]))

        return fold(keyed, accumulate, shared, carry, slots, **options)

    patch.setattr(engine, "fold", by_slot)


@fault(laws.clients_share_no_stream)
def key_that_ignores_the_client(patch):
    keys = engine.client_keys
    patch.setattr(engine, "client_keys", lambda key, ids: keys(key, jnp.zeros_like(ids)))


@fault(laws.clients_share_no_stream)
def transform_key_that_ignores_the_round(patch):
    def frozen(key, name):
        return prng.stream(jax.random.key(0) if name == "transform" else key, name)

    patch.setattr(gathering, "stream", frozen)


@fault(laws.keys_decide_everything)
def key_that_ignores_seed_and_round(patch):
    patch.setattr(engine, "shuffle", lambda key, mask: shuffling.shuffle(jax.random.key(0), mask))


@fault(laws.matches_the_numpy_oracle)
def padding_that_leaks(patch):
    original = losses.loss_and_metrics

    def leaking(loss_fn, params, examples, mask, key):
        return original(loss_fn, params, examples, jnp.ones_like(mask), key)

    patch.setattr(losses, "loss_and_metrics", leaking)


@fault(laws.nonfinite_clients_are_dropped)
def mask_by_multiplication(patch):
    def multiplied(messages):
        def kept(x):
            return x * messages.arrived.reshape((-1,) + (1,) * (x.ndim - 1))

        return messages._replace(**{name: jax.tree.map(kept, getattr(messages, name)) for name in ("update", "weight")})

    patch.setattr(gathering, "usable_rows", multiplied)


@fault(laws.matches_the_numpy_oracle)
def weights_by_steps(patch):
    patch.setattr(training, "Report", lambda u, w, m: types.Report(u, m["local_steps"].total, m))


@fault(laws.matches_the_numpy_oracle)
def last_partial_batch_dropped(patch):
    patch.setattr(training, "ClientData", lambda x, mask: types.ClientData(x, mask & mask.all()))


@fault(laws.matches_the_numpy_oracle)
def examples_drawn_with_repetition(patch):
    def again(key, mask):
        return lambda epoch, positions: shuffling.shuffle(key, mask)(epoch, positions // 2 * 2)

    patch.setattr(engine, "shuffle", again)


@fault(laws.order_is_irrelevant)
def float_sums(patch):
    patch.setattr(exact_sums, "zeros", lambda spec: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), spec))
    patch.setattr(exact_sums, "add", lambda acc, values: jax.tree.map(lambda a, x: a + x.sum(0), acc, values))
    patch.setattr(exact_sums, "total", lambda acc: acc)


@fault(laws.absent_clients_leave_no_trace)
def memory_of_absent_clients_written(patch):
    put = engine.put
    patch.setattr(engine, "put", lambda memory, ids, rows, where: put(memory, ids, rows, jnp.ones_like(where)))


class Everything:
    """Compares as larger than any number, NaN included."""

    def __gt__(self, other):
        return jnp.ones(jnp.shape(other), bool)


@fault(laws.nonfinite_clients_are_dropped)
def nonfinite_messages_pass(patch):
    patch.setattr(one_client, "LARGEST", Everything())
    patch.setattr(one_client, "stays_finite", lambda old, new, finite=(): jnp.asarray(True))
    patch.setattr(one_client.engine, "all_finite", lambda tree: jnp.asarray(True))


@fault(laws.nonfinite_clients_are_dropped)
def dropped_clients_not_counted(patch):
    message = one_client.Message

    def silent(*, dropped, **fields):
        return message(dropped=jnp.zeros_like(dropped), **fields)

    patch.setattr(one_client, "Message", silent)


@fault(laws.padding_is_irrelevant)
def denominator_counts_the_slots(patch):
    patch.setattr(aggregation, "mean", _mean_over(lambda round: round.cohort.ids.shape[0]))


@fault(laws.absent_clients_leave_no_trace)
def denominator_counts_the_invited(patch):
    patch.setattr(aggregation, "mean", _mean_over(lambda round: round.cohort.invited.sum()))


def _mean_over(count):
    def mean():
        total = aggregation.total(weighting="examples")

        def finalize(key, cohort, carry):
            update, metrics = total.finalize(key, cohort, carry)
            return jax.tree.map(lambda x: x / (3.0 * count(cohort)), update), metrics

        return total._replace(finalize=finalize)

    return mean


@fault(laws.one_step_of_everybody_is_centralised)
def sign_of_the_pseudo_gradient(patch):
    original = server.optimizer

    def uphill(rule):
        step = original(rule)

        def apply(key, aggregate, state):
            return step.apply(key, jax.tree.map(jnp.negative, aggregate), state)

        return step._replace(apply=apply)

    patch.setattr(server, "optimizer", uphill)


@fault(laws.one_step_of_everybody_is_centralised)
def uniform_weights_for_examples(patch):
    mean = aggregation.mean
    patch.setattr(aggregation, "mean", lambda: mean(weighting="uniform"))


@fault(laws.nothing_received_changes_nothing)
def empty_rounds_not_skipped(patch):
    identity = composer.identity
    patch.setattr(composer, "identity", lambda: identity().stating(releases_when_empty=True))


@fault(laws.diverging_server_steps_are_skipped)
def overflowed_moments_kept(patch):
    patch.setattr(rounds, "stays_finite", lambda old, new, finite=(): jnp.asarray(True))
    patch.setattr(rounds.engine, "all_finite", lambda tree: jnp.asarray(True))


@fault(laws.gathered_sums_ignore_the_order)
def rows_by_slot(patch):
    """A real one: rows stood where the sampler had put them, and float sums over them followed."""
    rule = importlib.import_module("fedjax_sim.aggregation.gather")
    by_slot = lambda rows, slots: engine.all_rows(rows, jnp.arange(slots.size))  # noqa: E731
    patch.setattr(rule, "engine", SimpleNamespace(**vars(engine) | {"all_rows": by_slot}))


@fault(test_prng.test_draws_among_many_are_uniform)
def clients_drawn_by_modulus(patch):
    """A real one: 32 random bits modulo N."""
    uniform = importlib.import_module("fedjax_sim.sampling.uniform")
    patch.setattr(uniform, "below", lambda key, n, shape: jax.random.randint(key, shape, 0, n, jnp.int32))


@fault(test_facts.test_unbiased_in_every_dtype)
def messages_rounded_to_their_leaves(patch):
    """A real one: what a quantiser decodes was rounded again, to the model's bfloat16."""
    grid = importlib.import_module("fedjax_sim.transform.grid")
    leafwise = grid.leafwise

    def narrowed(fn, key, update):
        return jax.tree.map(lambda y, x: y.astype(x.dtype), leafwise(fn, key, update), update)

    patch.setattr(grid, "leafwise", narrowed)


@fault(test_facts.test_no_metric_hides_another)
def metrics_that_hide_others(patch):
    """A real one: the last member of a chain to name a metric had it."""
    chaining = importlib.import_module("fedjax_sim.transform.chain")
    hiding = lambda parts: dict(pair for part in parts.values() for pair in part.items())  # noqa: E731
    patch.setattr(chaining.tree, "joined_metrics", hiding)


@fault(laws.gathered_rows_stand_by_id)
def rows_by_arrival(patch):
    fill = engine.fill
    patch.setattr(engine, "fill", lambda buffer, slots, rows: fill(buffer, jnp.arange(slots.shape[0]), rows))


def bins_hold_what_they_say() -> None:
    """The order of a small and a much larger value is irrelevant."""
    values = np.full((test_exact_sums.ROWS, test_exact_sums.WIDTH), 0.75 * 2**14, np.float32)
    values[-1] = 2.0**40
    results = []
    for rows, sizes in ((values, (11, 1)), (values[::-1], (1, 11))):
        acc, start = exact_sums.zeros(test_exact_sums.SPEC), 0
        for size in sizes:
            acc, start = exact_sums.add(acc, jnp.array(rows[start : start + size])), start + size
        results.append(np.asarray(exact_sums.total(acc)).tolist())
    assert results[0] == results[1]


@fault(bins_hold_what_they_say)
def bins_that_end_at_the_next_unit(patch):
    """A real one, found while these tests were written: values in the top octave of a bin round up into the next."""

    patch.setattr(exact_sum, "_bin", lambda magnitude: (((magnitude >> 23) + 20) * 357) >> 13)


@fault(test_ragged.test_lanes_end_one_by_one)
def lanes_that_end_together(patch):
    patch.setattr(tree, "where", lambda going, new, old: new)  # a sweep's vmapped loop goes on in every lane


def no_row_divides_bare() -> None:
    test_rounding.test_no_row_divides_bare("algorithms", "fedavg")


@fault(no_row_divides_bare, full=True)
def a_round_left_to_the_compiler(patch):
    """A real one: A / c became A (1 / c) in some programs."""
    patch.setattr(engine, "reproducible", lambda function, source=None: function)


@fault(test_facts.test_nobody_counts_twice, full=True)
def parts_that_nobody_compares(patch):
    """A real one: clients drawn for their size were weighed for it again."""
    patch.setattr(composer, "check_parts", lambda *parts: None)


@fault(test_foreign_updates.test_what_the_aggregator_makes_decides, full=True)
def aggregates_of_any_shape(patch):
    """A real one: one number for all weights was added to each."""
    patch.setattr(rounds, "check_aggregate", lambda *shapes: None)


@fault(test_facts.test_a_rule_that_says_nothing_is_taken_at_its_worst, full=True)
def weights_that_are_not_stated(patch):
    """A real one: `gather` said that it takes no weights, whatever its rule did."""
    gather = aggregation.gather
    patch.setattr(aggregation, "gather", lambda *rule, **facts: gather(*rule, **{"weighted": False} | facts))


@fault(test_participation.test_late_messages_are_counted, full=True)
def late_messages_cost_nothing(patch):
    """A real one: 400 bytes where 520 were sent."""
    limit = test_participation.with_over_invitation

    def silent(*arguments):
        sampler = limit(*arguments)

        def sample(key, state):
            cohort, state = sampler.sample(key, state)
            return cohort.timed(sent=cohort.reported), state

        return sampler._replace(sample=sample)

    patch.setattr(test_participation, "with_over_invitation", silent)


@fault(test_accountant.test_sampling_never_costs, full=True)
def sampling_that_costs(patch):
    """A real one: 29.734 for 49 of 50 clients, 14.887 for all."""
    patch.setattr(accountant, "_epsilon", accountant._epsilon.__wrapped__)  # nothing of this stays in its cache
    patch.setattr(accountant, "min", lambda bounds, key=None: bounds[0] if key else min(bounds), raising=False)


@fault(test_privacy_ledger.test_changed_runs_share_nothing, full=True)
def keys_without_their_runs(patch):
    """A real one: two runs with one seed had one noise."""
    patch.setattr("fedjax_sim.running.log._changed_code", lambda *_: [])  # the law's own fixture, `any_program`
    patch.setattr(fingerprint, "bound", lambda key, stream: key)


@fault(test_disk.test_a_lost_record_is_no_hole, full=True)
def zeros_that_count_as_holes(patch):
    """A real one: a lost record was the initial state."""
    patch.setattr(disk, "has_bits", lambda written, ids: np.zeros(len(ids), bool))


FIRST = {law: name for name, (_, law) in reversed(FAULTS.items()) if law not in LATER}


@pytest.mark.default_rows("key_by_slot", "padding_that_leaks", "sign_of_the_pseudo_gradient", "mask_by_multiplication")
@pytest.mark.parametrize("name", cases.rows(sorted(FAULTS), FIRST.values()))
def test_planted_fault_is_noticed(name, monkeypatch, tmp_path):
    """The law fails by its own assertion, not by an error of the plant."""
    plant, law = FAULTS[name]
    compiler.alone()
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        law(*[tmp_path] * ("tmp_path" in inspect.signature(law).parameters))


def test_bins_hold_what_they_say():
    """The one law of this file that no other test runs."""
    bins_hold_what_they_say()

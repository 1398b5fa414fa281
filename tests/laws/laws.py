"""The laws of a federated round as functions, so that tests/faults can plant a fault and see each of them fail.

Each takes no argument, builds what it checks and raises AssertionError where the law is broken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, algorithms, client, engine, server, transform
from fedjax_sim.engine import shuffle
from fedjax_sim.prng import client_key, stream
from tests import compiler
from tests.laws import problems as p


def check_equal_bits(a, b, what: str) -> None:
    """Raises where any bit of two pytrees differs."""
    compiler.check_bits_may_be_compared()
    differing = [
        jax.tree_util.keystr(path)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
        if np.ascontiguousarray(x).tobytes() != np.ascontiguousarray(y).tobytes()
    ]
    assert not differing, f"{what}: {differing}"


def _compare(a, b, what: str) -> None:
    check_equal_bits(p.outcome(*a), p.outcome(*b), what)


def order_is_irrelevant(federation: p.Federation | None = None) -> None:
    """A permuted cohort gives the same bits: keys by identity, exact sums."""
    federation = federation or p.Federation()
    order = np.random.default_rng(0).permutation(p.SLOTS)
    _compare(federation.run(p.COHORT), federation.run(p.COHORT[order]), "permuted cohort")


def padding_is_irrelevant(federation: p.Federation | None = None) -> None:
    """Uninvited slots give the same bits as a smaller cohort, wherever they stand."""
    federation = federation or p.Federation()
    few = p.COHORT[:8]
    padded = federation.run(few)
    spread = p.cohort(np.r_[few, 9, 9], invited=np.arange(10) < 8)
    spread = jax.tree.map(lambda x: x[jnp.array([8, 0, 1, 2, 3, 9, 4, 5, 6, 7])], spread)
    _compare(padded, federation.run(spread), "padding among the slots")
    small = p.Federation(num_slots=8)
    _compare(padded, small.run(few), "padding behind the slots")


def chunk_is_irrelevant(**parts) -> None:
    """Another chunk with the same lanes gives the same bits."""
    small = p.Federation(plan=engine.Plan(2, 2), **parts)
    large = p.Federation(plan=engine.Plan(2, 6), **parts)
    _compare(small.run(p.COHORT), large.run(p.COHORT), "chunk")


@jax.jit
def _order(round_key, id, size, epoch):
    """The order of a client's rows, its own ones first."""
    key = client_key(stream(round_key, "client"), id)
    return shuffle(key, jnp.arange(p.ROWS) < size)(epoch, jnp.arange(p.ROWS))


def numpy_local_sgd(params, id: int, key, *, size: int, epochs: int | None = None, proximal: float = 0.0):
    """float64 local training of client `id`; only the order of its examples comes from the library."""
    w, start, n = np.array(params, np.float64), np.array(params, np.float64), int(size)
    per_epoch = -(-n // p.BATCH)
    for step in range(p.STEPS if epochs is None else epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = np.asarray(_order(key, np.int32(id), n, epoch))[:n]
        rows = order[place * p.BATCH : (place + 1) * p.BATCH]
        x, y = p.FEATURES[id][rows].astype(np.float64), p.TARGETS[id][rows].astype(np.float64)
        w = w - p.RATE * (x.T @ (x @ w - y) / len(rows) + proximal * (w - start))
    return w - start


def matches_the_numpy_oracle(*, epochs: int | None = None) -> None:
    """Ragged, example-weighted FedAvg with shuffled and partial batches, to 1e-5."""
    parts = {}
    if epochs is not None:
        work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_epochs=epochs, batch_size=p.BATCH))
        parts = {"client": p.counting(work)}
    state, infos = p.Federation(**parts).run(p.COHORT, num_rounds=2)
    w = p.START.astype(np.float64)
    for i in range(2):
        key = jax.random.fold_in(jax.random.key(1), i)
        updates = [numpy_local_sgd(w, id, key, size=p.SIZES[id], epochs=epochs) for id in p.COHORT]
        weights = p.SIZES[p.COHORT]
        w = w + np.average(updates, axis=0, weights=weights)
        assert infos[i]["total_weight"] == weights.sum(), "weights are numbers of examples"
    np.testing.assert_allclose(np.asarray(state.server.params), w, rtol=1e-5, atol=1e-5)


def absent_clients_leave_no_trace(federation: p.Federation | None = None) -> None:
    """Not reporting, holding no example and not being invited are one, and nobody else's memory is written."""
    federation = federation or p.Federation()
    there = np.arange(p.SLOTS) != 4
    lost = federation.run(p.cohort(p.COHORT, reported=there))
    uninvited = federation.run(p.cohort(p.COHORT, invited=there))
    empty = federation.run(p.COHORT, p.ragged(sizes=np.where(np.arange(p.NUM_CLIENTS) == p.COHORT[4], 0, p.SIZES)))
    same = ("local_loss", "clients_reported", "dropped_clients", "skipped_rounds", "update_norm", "total_weight")
    for other, name in ((uninvited, "uninvited"), (empty, "without examples")):
        check_equal_bits(lost[0]._replace(sampler=()), other[0]._replace(sampler=()), name)
        check_equal_bits([{k: i[k] for k in same} for i in lost[1]], [{k: i[k] for k in same} for i in other[1]], name)
    took_part = np.isin(np.arange(p.NUM_CLIENTS), p.COHORT[there])
    assert (np.asarray(lost[0].clients["rounds"]) == 2 * took_part).all(), "memory of absent clients"
    assert (np.asarray(lost[0].clients["sum"]) != 0).tolist() == took_part.tolist()


def nonfinite_clients_are_dropped(value: float = np.nan, federation: p.Federation | None = None) -> None:
    """A client whose update is not finite equals an absent one bit for bit, and is counted and named."""
    federation = federation or p.Federation()
    bad = p.COHORT[4]
    there = p.COHORT != bad
    state, infos = federation.run(p.COHORT, p.ragged(spoil={bad: value}))
    without, expected = federation.run(p.cohort(p.COHORT, reported=there))
    check_equal_bits(state._replace(sampler=()), without._replace(sampler=()), "state")
    for info, clean in zip(infos, expected, strict=True):
        check_equal_bits(
            [info[k] for k in ("local_loss", "update_norm")], [clean[k] for k in ("local_loss", "update_norm")], "info"
        )
        assert info["dropped_clients"] == 1 and clean["dropped_clients"] == 0
        assert info["clients_reported"] == len(p.COHORT) - 1
        assert info["error_ids"].tolist() == [bad] + [-1] * 7
        assert clean["error_ids"].tolist() == [-1] * 8


def nothing_received_changes_nothing(federation: p.Federation | None = None) -> None:
    """An empty cohort and a cohort of dropped messages alone leave the model's bits and count as skipped."""
    federation = federation or p.Federation()
    start = federation.init()
    everybody_bad = p.ragged(spoil={int(id): np.nan for id in p.COHORT})
    nobody = p.cohort(p.COHORT, reported=False)
    without_examples = p.ragged(sizes=np.zeros(p.NUM_CLIENTS, int))
    for who, data in ((nobody, None), (p.COHORT, without_examples), (p.COHORT, everybody_bad)):
        state, infos = federation.run(who, data)
        check_equal_bits((start.server, start.clients), (state.server, state.clients), "state")
        assert [int(info["skipped_rounds"]) for info in infos] == [1, 1]
        assert all(info["clients_reported"] == 0 for info in infos)
        assert int(state.round) == 2


def diverging_server_steps_are_skipped(rule: optax.GradientTransformation | None = None) -> None:
    """A server step that overflows, be it in a moment only, leaves the server as it was."""
    rule = rule or optax.chain(optax.scale(1e25), optax.adam(0.1))
    federation = p.Federation(server=server.optimizer(rule))
    start = federation.init()
    state, infos = federation.run(p.COHORT)
    check_equal_bits(start.server, state.server, "server")
    assert [int(info["skipped_rounds"]) for info in infos] == [1, 1]
    assert np.isfinite(p.flat(state.server)).all()


def keys_decide_everything(federation: p.Federation | None = None) -> None:
    """The same key gives the same bits; another round or seed gives other batches."""
    federation = federation or p.Federation()
    once, again = (federation.run(p.COHORT, keys=[5]) for _ in range(2))
    _compare(once, again, "same key")
    assert p.digest(federation.run(p.COHORT, keys=[6])[0].server) != p.digest(once[0].server), "another round"
    assert p.digest(federation.run(p.COHORT, keys=[5], seed=2)[0].server) != p.digest(once[0].server), "another seed"


def clients_share_no_stream() -> None:
    """Two clients draw different numbers at the same stage of the same round, and two rounds do too."""

    def noise(key, update):
        return jax.random.normal(key, update.shape)

    federation = p.Federation(transform=transform.stateless(noise))
    draws = [federation.params(p.COHORT[i : i + 1], keys=[r]) - p.START for i, r in ((0, 0), (1, 0), (0, 1))]
    for i in range(3):
        for j in range(i):
            assert np.abs(draws[i] - draws[j]).min() > 1e-4, (i, j)


def one_step_of_everybody_is_centralised(num_rounds: int = 50) -> None:
    """Full participation, one full-batch step: gradient descent on the pooled data, to 1e-6, and FedSGD too."""
    everybody = np.arange(p.NUM_CLIENTS)

    def average(sampler, **options):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), num_steps=1, **options)

    def gradient(sampler, **options):
        return algorithms.fedsgd(p.linear_loss, sampler, optax.sgd(p.RATE), **options)

    rows = np.arange(p.ROWS) < p.SIZES[:, None]
    x, y = p.FEATURES[rows].astype(np.float64), p.TARGETS[rows].astype(np.float64)
    for make in (average, gradient):
        federation = p.Federation(num_slots=p.NUM_CLIENTS, plan=engine.Plan(8, 8), make=make)
        w, state = p.START.astype(np.float64), None
        for i in range(num_rounds):
            state, _ = federation.run(everybody, state=state, keys=[i])
            w = w - p.RATE * x.T @ (x @ w - y) / len(y)
            np.testing.assert_allclose(np.asarray(state.server.params), w, rtol=1e-6, atol=1e-6)


def gathered_rows_stand_by_id() -> None:
    """A rule that sees every message gets them by client id, whatever the chunk."""

    def first(key, updates, weights, ids):
        return jnp.where(weights[2] > 0, updates[2], 0.0) + 0.001 * (updates * jnp.arange(1.0, 11)[:, None]).sum(0)

    chunk_is_irrelevant(aggregator=aggregation.gather(first))
    alone = p.Federation(aggregator=aggregation.gather(lambda key, updates, weights, ids: updates[2])).params(
        p.COHORT, num_rounds=1
    )
    third = int(np.sort(p.COHORT)[2])
    expected = numpy_local_sgd(p.START, third, jax.random.fold_in(jax.random.key(1), 0), size=p.SIZES[third])
    np.testing.assert_allclose(alone - p.START, expected, rtol=1e-5, atol=1e-6)


def gathered_sums_ignore_the_order() -> None:
    """A rule of float sums, written as for any array, gives the same bits for a permuted cohort.

    Running sums: the aggregator's own `sum` has one order of halves, which some permutations leave alone.
    """

    def rule(key, updates, weights, ids):
        return jnp.cumsum(updates * weights[:, None], axis=0)[-1] / weights.sum()

    order_is_irrelevant(p.Federation(aggregator=aggregation.gather(rule)))

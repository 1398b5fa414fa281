"""Federated boosted trees against histogram boosting in NumPy on the pooled rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, aggregation, algorithms, engine, network, privacy, run, sampling, transform
from fedjax_sim.algorithms import as_client_update
from fedjax_sim.algorithms.analytics.forest import Growth
from fedjax_sim.round.costs import message_spec
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import ClientData
from tests.algorithms.analytics import problem as p
from tests.refusals import refused

BINS = {"low": -2.0, "high": 6.0, "num_bins": 8, "input_shape": (p.WIDTH,)}
SMALL = BINS | {"num_trees": 3, "max_depth": 2, "least_share": 0.05, "penalty": 0.02}
LABELS = (p.Y % 3 == 0).astype(np.int32)  # clouds in opposite corners
NUMBERS = (np.sin(p.X[..., 0]) + 0.3 * p.X[..., 1] + 0.1 * p.Y).astype(np.float32)
EDGES = np.linspace(-2, 6, 9)[1:-1]


def gradients(objective, scores, y):
    if objective == "squared":
        return scores - y, np.ones_like(scores)
    chances = 1 / (1 + np.exp(-scores))
    return chances - y, chances * (1 - chances)


def best_split(x, g, h, rows, *, penalty, least_share):
    """The (gain, feature, edge, sides) of largest gain among these rows, the first of equals; None without any."""

    def score(g, h):
        return g**2 / (h + penalty)

    best = None
    for j in range(x.shape[1]):
        for edge in EDGES:
            goes_right = x[:, j] >= edge
            sides = [(g[side].sum(), h[side].sum()) for side in (rows & ~goes_right, rows & goes_right)]
            gain = sum(score(*side) for side in sides) - score(g[rows].sum(), h[rows].sum())
            if min(side[1] for side in sides) >= least_share and gain > (0 if best is None else best[0]):
                best = gain, j, edge, sides
    return best


def boosting(objective, y, *, num_trees, max_depth, penalty, least_share, rate=0.3, **_):
    """The forest after each round, from all rows in float64. The first hessian is the unit of sums."""
    x, y = p.pooled()[0], y[p.MASK].astype(np.float64)
    features = np.full((num_trees, 2**max_depth - 1), -1)
    thresholds, values = np.zeros(features.shape), np.zeros((num_trees, 2 ** (max_depth + 1) - 1))
    scores, forests = np.zeros(len(x)), []
    unit = gradients(objective, scores, y)[1].sum()
    for t in range(num_trees):
        g, h = (sums / unit for sums in gradients(objective, scores, y))
        node = np.zeros(len(x), int)  # of each row
        for level in range(max_depth):
            open_nodes = sorted(set(node[node >= 2**level - 1]))
            for i in open_nodes:
                rows = node == i
                values[t, i] = -rate * g[rows].sum() / (h[rows].sum() + penalty)
                if (best := best_split(x, g, h, rows, penalty=penalty, least_share=least_share)) is None:
                    continue
                _, features[t, i], thresholds[t, i], sides = best
                values[t, 2 * i + 1 : 2 * i + 3] = [-rate * side[0] / (side[1] + penalty) for side in sides]
                node[rows] = 2 * i + 1 + (x[rows, features[t, i]] >= thresholds[t, i])
            forests.append({"features": features.copy(), "thresholds": thresholds.copy(), "values": values.copy()})
            if (features[t, open_nodes] < 0).all():
                break
        scores = scores + values[t][node]
    return forests


def alike(estimate, forest):
    np.testing.assert_array_equal(estimate["features"], forest["features"])
    np.testing.assert_allclose(estimate["thresholds"], forest["thresholds"], atol=1e-6)
    np.testing.assert_allclose(estimate["values"], forest["values"], atol=1e-5)


@pytest.mark.default_rows("logistic")
@pytest.mark.parametrize("objective, y", [("logistic", LABELS), ("squared", NUMBERS)], ids=["logistic", "squared"])
def test_everybody_together_is_boosting(objective, y):
    """The whole forest after every round, and none changes after the last. Catches gradients at the tree that grows,
    padding that counts, sides that are swapped, a level too few, and the mean weighted by rows."""
    expected = boosting(objective, y, **SMALL)
    made = algorithms.boosted_trees(p.EVERYBODY, objective=objective, **SMALL)
    estimates, _ = p.rounds(made, len(expected) + 2, data=p.people(y=y))
    assert len(expected) > 3 and (expected[-1]["features"] >= 0).sum() > 4
    for estimate, forest in zip(estimates, [*expected, expected[-1], expected[-1]], strict=True):
        alike(estimate, forest)


@pytest.mark.full
def test_a_tree_without_splits_takes_one_round():
    """Catches a tree that waits for levels that it does not have, and a root without a value."""
    options = SMALL | {"least_gain": 10.0}
    made = algorithms.boosted_trees(p.EVERYBODY, objective="squared", **options)
    estimates, _ = p.rounds(made, 3, data=p.people(y=NUMBERS))
    assert (estimates[-1]["features"] == -1).all() and (estimates[-1]["values"][:, 0] != 0).all()
    expected = 0.3 * NUMBERS[p.MASK].mean() / 1.02  # the penalty is 0.02 of the rows
    assert estimates[0]["values"][0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_squared_loss_never_rises(rate):
    """On the training rows, from each round to the next, with a penalty. Catches gradients at another forest than the
    one that the tree is added to, and values of nodes that are not those of their rows."""
    options = BINS | {"num_trees": 4, "max_depth": 3, "least_share": 0.0, "penalty": 0.05, "learning_rate": rate}
    made = algorithms.boosted_trees(p.EVERYBODY, objective="squared", **options)
    estimates, infos = p.rounds(made, 12, data=p.people(y=NUMBERS))
    examples = {"x": jnp.array(p.pooled()[0]), "y": jnp.array(NUMBERS[p.MASK])}
    judge = jax.jit(lambda forest: made.evaluated.loss_fn(forest, examples, None)["loss"].mean())
    losses = np.array([judge(forest) for forest in estimates])
    assert (np.diff(losses) <= 1e-6).all() and losses[-1] < 0.3 * (NUMBERS[p.MASK] ** 2).mean()
    # The info has the loss of complete trees, before the round.
    assert infos[0]["local_loss"] == pytest.approx((NUMBERS[p.MASK] ** 2).mean(), rel=1e-5)
    assert infos[3]["local_loss"] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.full
def test_a_stump_is_exact():
    """One split that separates the labels: at its feature and edge, with the values -G / (H + lambda) of each side.
    Catches features or bins that are shifted by one, and a row at an edge that goes to the wrong side."""
    x = p.X.copy()
    x[..., 1] = np.where(LABELS, 3.0, 2.0)  # 3 is the edge itself
    options = BINS | {"num_trees": 1, "max_depth": 1, "learning_rate": 1.0, "penalty": 0.0}
    made = algorithms.boosted_trees(p.EVERYBODY, **options)
    (stump,), _ = p.rounds(made, 1, data=p.people(x=x, y=LABELS))
    assert stump["features"].tolist() == [[1]] and stump["thresholds"].tolist() == [[3.0]]
    share = LABELS[p.MASK].mean()
    np.testing.assert_allclose(stump["values"], [[4 * (share - 0.5), -2, 2]], rtol=1e-5)
    examples = {"x": jnp.array(x[p.MASK]), "y": jnp.array(LABELS[p.MASK])}
    values = made.evaluated.loss_fn(stump, examples, None)
    assert (values["accuracy"] == 1).all()
    np.testing.assert_allclose(values["loss"], np.log1p(np.exp(-2.0)), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fixed_mean", "modular_sum", "additive_shares", "secure_sum"])
def test_any_multiple_of_the_sum_will_do(name):
    """Catches a penalty or a least share in the unit of what the aggregator divides by."""
    integers = transform.quantize(16, range=8.0, integers=True)
    plain = aggregation.modular_sum(2.0)
    rule, change = {
        "fixed_mean": (aggregation.fixed_mean(1.0, weighting="uniform"), None),
        "additive_shares": (aggregation.additive_shares(plain, 3), integers),
        "modular_sum": (plain, integers),
        "secure_sum": (aggregation.secure_sum(plain, 20), integers),
    }[name]
    made = algorithms.boosted_trees(p.EVERYBODY, aggregator=rule, transform=change, **SMALL)
    estimates, _ = p.rounds(made, 4, data=p.people(y=LABELS))
    forest = boosting("logistic", LABELS, **SMALL)[3]
    np.testing.assert_array_equal(estimates[-1]["features"], forest["features"])
    np.testing.assert_allclose(estimates[-1]["values"], forest["values"], atol=1e-5 if change is None else 2e-3)


@pytest.mark.full
def test_bins_of_each_feature():
    """The same edges, given for each feature, make the same bits; other ones make the thresholds. Catches edges that
    are read across features."""
    equal = algorithms.boosted_trees(p.EVERYBODY, **SMALL)
    own = SMALL | {"low": None, "high": None}
    same = algorithms.boosted_trees(p.EVERYBODY, edges=[EDGES.tolist()] * 2, **own)
    other = algorithms.boosted_trees(p.EVERYBODY, edges=np.stack([EDGES - 100, EDGES + 0.25]), **own)
    (first,), (second,), (third,) = (p.rounds(x, 1, data=p.people(y=LABELS))[0] for x in (equal, same, other))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert third["features"][0, 0] == 1 and third["thresholds"][0, 0] in EDGES + 0.25


def row_norms(made):
    """(value, y) -> the norm of the message of a client with one row, whose label or number is y and whose score is
    `value`."""

    @jax.jit
    def message(value, y):
        state = made.parts.server.broadcast(made.parts.server.init(()))
        state |= {"values": state["values"].at[0].set(value), "tree": jnp.int32(1)}
        data = ClientData({"x": jnp.ones((1, p.WIDTH)), "y": y[None]}, jnp.ones(1, bool))
        return made.parts.client.apply(jax.random.key(0), state, (), data)[0].update

    def norm(value, y):
        leaves = jax.tree.leaves(message(value, np.asarray(y)))
        return float(np.sqrt(sum((np.asarray(x) ** 2).sum() for x in leaves)))

    return norm


def test_a_row_has_its_norm():
    """At most sqrt(d), reached by a row that is certain and wrong; sqrt(d (b^2 + 1)) with residuals beyond b. Catches a
    row in two bins of a feature or in two nodes, and residuals without a bound."""
    made = algorithms.boosted_trees(p.EVERYBODY, **SMALL)
    norm = row_norms(made)
    norms = [norm(value, y) for value in (-30.0, -3.0, 0.0, 1.0, 30.0) for y in (0, 1)]
    assert max(norms) == pytest.approx(np.sqrt(p.WIDTH), rel=1e-6)
    assert norms[4] == pytest.approx(np.sqrt(p.WIDTH * (0.5**2 + 0.25**2)), rel=1e-6)
    bounded = algorithms.boosted_trees(p.EVERYBODY, objective="squared", residual_bound=1.5, **SMALL)
    norm = row_norms(bounded)
    for value in (-9.0, 9.0):
        assert norm(value, 0.0) == pytest.approx(np.sqrt(p.WIDTH * (1.5**2 + 1)), rel=1e-6)
    assert norm(1.0, 0.0) == pytest.approx(np.sqrt(p.WIDTH * 2), rel=1e-6)


def test_noise_divides_by_nothing():
    """Histograms of noise alone, 300 of each level: where a node is split, both sides have the least hessian, and
    values stay below the largest gradient sum over the least divisor. Catches a hessian below 0 in a gain, which would
    win with a gain below 0 turned round or one without end."""
    growth = Growth(
        num_trees=1,
        max_depth=2,
        learning_rate=1.0,
        penalty=0.0,
        least_share=0.1,
        least_gain=0.0,
        edges=np.tile(EDGES.astype(np.float32), (2, 1)),
    )
    rng = np.random.default_rng(3)
    sums = rng.normal(size=(2, 2, 300, *growth.shape)).astype(np.float32)  # level, gradient or hessian, draws

    @jax.jit
    @jax.vmap
    def trees(first, second):
        middle = growth.grown(*first, growth.planted())
        return middle, growth.grown(*second, middle)

    middle, last = jax.device_get(trees(*(tuple(x) for x in sums)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((middle, last)))
    num_splits = 0
    for draw in range(300):
        unit = middle["first_hessian"][draw]
        for level, state, nodes in ((0, middle, [0]), (1, last, [1, 2])):
            for node in nodes:
                feature = state["features"][draw, 0, node]
                if feature < 0:
                    continue
                edge = int(np.searchsorted(EDGES, state["thresholds"][draw, 0, node] - 1e-4))
                hessians = sums[level, 1, draw, node - (2**level - 1), feature] / unit
                assert min(hessians[: edge + 1].sum(), hessians[edge + 1 :].sum()) >= 0.1 - 1e-4
                num_splits += 1
        if unit > 0:
            assert np.abs(last["values"][draw]).max() <= np.abs(sums[:, 0, draw]).sum() / unit / 0.1
    assert num_splits > 100


@pytest.mark.full
def test_noise_has_its_epsilon():
    """Catches weights that tell the number of rows, and messages of clients without rows that are left out."""
    sampler = sampling.uniform(p.NUM_CLIENTS, 20)
    noise = transform.discrete_gaussian_mechanism(p.WIDTH**0.5, 2.0, 20, bits=24)
    rule = aggregation.modular_sum(20.0, modulus_bits=24)
    made = algorithms.boosted_trees(sampler, transform=noise, aggregator=rule, rows="one", **SMALL)
    estimates, infos = p.rounds(made, 3, data=p.people(y=LABELS))
    assert [int(info["clients_reported"]) for info in infos] == [20, 20, 20]  # clients without rows report too
    assert not any(info["skipped_rounds"] for info in infos)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(estimates))
    mechanism = privacy.mechanism_of(made, dimension=2 * 2 * 2 * 8)
    assert mechanism.unit == "client" and 0 < privacy.account(mechanism, 3, 1e-3).epsilon < np.inf
    with refused("aggregator", rule="bounded amount"):
        algorithms.boosted_trees(sampler, transform=transform.gaussian_mechanism(1.0, 2.0), **SMALL)


@pytest.mark.full
def test_rounds_without_rows_change_nothing():
    """Catches a tree that ends because nobody in the cohort had a row, and a first hessian of 0."""
    made = algorithms.boosted_trees(sampling.cyclic(p.NUM_CLIENTS, 5), **SMALL)
    nobody = p.people(mask=np.zeros_like(p.MASK))
    step = jax.jit(made.step)
    state = made.init(jax.random.key(0), (), nobody)
    for data, changes in ((nobody, False), (p.people(y=LABELS), True), (nobody, False)):
        after, info = step(jax.random.key(1), state, data)
        before, now = (jax.device_get(x.server) for x in (state, after))
        assert all(np.array_equal(before[name], now[name]) for name in now) != changes and not info["skipped_rounds"]
        state = after


@pytest.mark.full
def test_the_same_bits_in_any_order_and_chunk():
    """Of clients, and of chunks with the same lanes. Catches float sums over clients."""

    def forest(order, plan):
        made = algorithms.boosted_trees(p.EVERYBODY, objective="squared", plan=plan, mesh=None, **SMALL)
        data = p.people(p.X[order], NUMBERS[order], p.MASK[order])
        return p.rounds(made, 4, data=data)[0][-1]

    ids = np.arange(p.NUM_CLIENTS)
    first = forest(ids, engine.Plan(2, 2))
    for other in (forest(ids[::-1], engine.Plan(2, 2)), forest(np.roll(ids, 7), engine.Plan(2, 8))):
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)


@pytest.mark.full
def test_a_resume_within_a_tree(tmp_path):
    """Catches a level, or a unit of the penalty, that is not in the checkpoint."""
    made = algorithms.boosted_trees(sampling.uniform(p.NUM_CLIENTS, 20), **SMALL)
    data, key = p.people(y=LABELS), jax.random.key(0)
    whole, _ = run(key, made, (), data, 5)
    stopped, _ = run(key, made, (), data, 3, directory=tmp_path / "run")
    resumed, _ = run(key, made, (), data, 5, directory=tmp_path / "run", resume=True)
    assert int(stopped.server["level"]) == 1 and (made.params(whole)["features"][1:] >= 0).any()
    jax.tree.map(np.testing.assert_array_equal, whole.server, resumed.server)


@pytest.mark.full
@pytest.mark.parametrize("spoiled", ["feature", "label"])
def test_rows_that_are_none_drop_their_client(spoiled):
    """A feature that is NaN or a label of 2: the round is that without the client, which is counted. Catches a NaN that
    goes to the first bin, and a label that counts as 0 or 1."""
    x, y = p.X.copy(), LABELS.copy()
    wrong = int(np.argmax(p.SIZES))
    (x if spoiled == "feature" else y)[wrong, 0] = np.nan if spoiled == "feature" else 2
    made = algorithms.boosted_trees(p.EVERYBODY, **SMALL)
    estimates, infos = p.rounds(made, 2, data=p.people(x=x, y=y))
    assert [int(info["dropped_clients"]) for info in infos] == [1, 1]
    others = p.MASK & (np.arange(p.NUM_CLIENTS) != wrong)[:, None]
    without, _ = p.rounds(made, 2, data=p.people(y=LABELS, mask=others))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), estimates, without)
    values = made.evaluated.loss_fn(estimates[-1], {"x": jnp.array(x[wrong]), "y": jnp.array(y[wrong])}, None)
    assert np.isnan(values["loss"][0]) and np.isfinite(values["loss"][1:]).all()


@pytest.mark.full
def test_a_message_counts_its_numbers():
    """Bytes are those of two histograms of the widest level, both ways with the whole forest. On devices they take
    time."""
    devices = network.heterogeneous(p.NUM_CLIENTS, speed=100.0, bandwidth_down=10.0, bandwidth_up=5.0)
    made = algorithms.boosted_trees(sampling.with_clock(p.EVERYBODY, devices), **SMALL)
    _, (info,) = p.rounds(made, 1, data=p.people(y=LABELS))
    message, forest = 2 * 2 * 2 * 8, 3 * (3 + 3 + 7) + 2  # nodes, features, bins; and the tree and level that grow
    found = [int(info[name].total()) for name in ("uplink_bytes", "downlink_bytes")]
    assert found == [p.NUM_CLIENTS * 4 * message, p.NUM_CLIENTS * 4 * forest]
    server = made.parts.server
    spec = message_spec(made.parts, server.broadcast(server.init(())), p.people(y=LABELS))
    assert wire_of(made.parts.transform, spec).values == message
    assert info["simulated_seconds"] > 4 * message / 5 + 4 * forest / 10


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_categories": 3}, "objective: expected data of two classes or of numbers, got .3 classes"),
        ({"residual_bound": 1.0}, "residual_bound: expected None beside 'logistic'"),
        ({"low": None}, "low, high: expected both, or edges in their place"),
        ({"edges": [[0.0] * 7] * 2}, "low, high: expected both, or edges in their place"),
        ({"high": -2.0}, "high: expected more than low = -2"),
        ({"low": 1e8, "high": 1e8 + 1}, "num_bins: expected bins whose edges are finite and rise"),
        ({"num_bins": 1}, "num_bins: expected an integer"),
        ({"low": None, "high": None, "edges": [[0.0] * 7] * 3}, "edges: expected 2 lists of 7 numbers"),
        ({"low": None, "high": None, "edges": [[0.0] * 6] * 2}, "edges: expected 2 lists of 7 numbers"),
        ({"low": None, "high": None, "edges": [list(range(7)), [0] * 7]}, r"edges\[1\]: expected bins whose edges"),
        ({"max_depth": 16, "num_bins": 64}, "max_depth: expected messages of at most 4,194,304 numbers"),
        ({"num_trees": 100_000, "max_depth": 8}, "num_trees: expected a forest of at most 4,194,304 numbers"),
        ({"learning_rate": 1.5}, "learning_rate: expected a number"),
        ({"aggregator": aggregation.median()}, "aggregator: expected a mean or a sum, for a statistic"),
        ({"transform": transform.error_feedback(transform.top_k(0.1))}, "transform: expected one without a memory"),
    ],
)
def test_what_is_refused(options, words):
    """Before anything compiles."""
    with pytest.raises(ValueError, match=words):
        algorithms.boosted_trees(p.EVERYBODY, **SMALL | options)


def test_rows_and_cohorts_that_are_refused():
    """Numbers as labels, rows of other lengths, a forest to start from, and an edge that would average forests."""
    made = algorithms.boosted_trees(p.EVERYBODY, **SMALL)
    with refused("data", value="float32", rule="0 and 1", kind=InvalidType):
        p.rounds(made, 1, data=p.people(y=NUMBERS))
    with refused("data", value=2, rule="3 features"):
        p.rounds(algorithms.boosted_trees(p.EVERYBODY, **SMALL | {"input_shape": (3,)}), 1)
    with pytest.raises(ValueError, match=r"params: expected \(\)"):
        made.init(jax.random.key(0), {"values": jnp.zeros(3)}, p.people(y=LABELS))
    with pytest.raises(ValueError, match="server: expected one that can go on"):
        as_client_update(made.parts, keep=True)

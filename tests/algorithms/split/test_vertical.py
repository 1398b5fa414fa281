"""Vertical learning against centralised oracles, message by message."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, algorithms, models, network, population, sampling, transform
from fedjax_sim.algorithms.split.vertical import party_functions_of
from fedjax_sim.network.link import link, wires
from fedjax_sim.privacy import mechanism_of
from fedjax_sim.round.counts import word_pair_product, word_pair_sum
from fedjax_sim.types import ClientData, noisy_parts
from tests.refusals import refused

RNG = np.random.default_rng(0)
COLUMNS, ROWS = (3, 1, 2), 40
X = RNG.normal(size=(ROWS, 6))
Y = (X @ RNG.normal(size=6) + RNG.normal(size=ROWS) > 0).astype(np.int32)
LINEAR = models.vertical_linear(columns=COLUMNS, num_outputs=1)
LOSSES = {
    "linear": (models.squared_error, lambda z, y: 2 * (z - y)),
    "exact": (models.sigmoid_cross_entropy, lambda z, y: 1 / (1 + np.exp(-z)) - y),
    "taylor": (models.taylor_cross_entropy, lambda z, y: z / 4 - (2 * y - 1) / 2),
}


def _params(weights, bias, dtype=None):
    kernels = np.split(np.asarray(weights, dtype)[:, None], np.cumsum(COLUMNS)[:-1])
    parties = {f"party_{p}": {"score": {"kernel": jnp.array(kernel)}} for p, kernel in enumerate(kernels)}
    return {"parties": parties, "bias": jnp.array([bias], dtype)}


def _flat(params):
    return np.concatenate([np.asarray(params["parties"][f"party_{p}"]["score"]["kernel"])[:, 0] for p in range(3)])


def _consortia(x=X, y=Y, sizes=(ROWS,)):
    return population.stored({"x": np.float32(x), "y": y}, np.concatenate([[0], np.cumsum(sizes)]))


def _vertical(num=1, loss=models.sigmoid_cross_entropy, model=LINEAR, **options):
    options = {"num_steps": 1} | options
    return algorithms.vertical(model, loss, sampling.full(num), optax.sgd(0.5), mesh=None, **options)


def _round(algorithm, data, params, rounds=1):
    state, step = algorithm.init(jax.random.key(0), params, data), jax.jit(algorithm.step)
    for t in range(rounds):
        state, info = step(jax.random.fold_in(jax.random.key(1), t), state, data)
    return algorithm.params(state), info


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_centralised(name):
    """In float64, to 1e-10, against X^T r / n by hand: the joint loss's gradient and the protocol's.

    Catches a residual divided by the wrong n, a party that reads another's columns, a bias left out.
    """
    loss, residual = LOSSES[name]
    w, b = RNG.normal(size=6), 0.3
    with jax.enable_x64(True):
        params, examples = _params(w, b, np.float64), {"x": jnp.array(X), "y": jnp.array(Y)}
        loss_fn = algorithms.vertical_loss(LINEAR, loss)
        slope = jax.jit(jax.grad(lambda params, examples: loss_fn(params, examples)["loss"].mean()))
        joint = jax.device_get(slope(params, examples))
        r = residual(X @ w + b, Y) / ROWS
        np.testing.assert_allclose(_flat(joint), X.T @ r, rtol=0, atol=1e-10)
        np.testing.assert_allclose(joint["bias"], r.sum(), rtol=0, atol=1e-10)
        seen = algorithms.vertical_transcript(LINEAR, loss, params, examples)
        for p, (low, high) in ((1, (3, 4)), (2, (4, 6))):  # partial scores out, residuals back
            (out,) = [message for message in seen.seen_by(0) if message.source == p]
            (back,) = seen.seen_by(p)
            np.testing.assert_allclose(out.value[:, 0], X[:, low:high] @ w[low:high], rtol=0, atol=1e-10)
            np.testing.assert_allclose(back.value[:, 0], r, rtol=0, atol=1e-10)
        moved = np.array(X)
        moved[:, 3:] = np.roll(X[:, 3:], 1, axis=0)  # the others' rows belong to somebody else
        wrong = slope(params, examples | {"x": jnp.array(moved)})
        assert np.abs(_flat(wrong) - X.T @ r).max() > 1e-2


def test_what_each_party_sees():
    """Which inputs each message and gradient depends on, by changing what it must not depend on.

    Catches labels or another's columns at a party without labels, and columns at the label holder.
    """
    model = models.vertical_mlp(columns=COLUMNS, num_outputs=1, embedding=2)
    params, x = model.init(jax.random.key(0))[0], np.float32(X)
    loss = models.sigmoid_cross_entropy

    @jax.jit
    def compiled(x, y):
        seen = algorithms.vertical_transcript(model, loss, params, {"x": x, "y": y})
        found = {(m.source, m.target, m.kind): m.value for m in seen.messages}
        assert len(found) == len(seen.messages)
        return found

    def views(x, y):
        return jax.device_get(compiled(x, y))

    plain, spoiled = views(x, Y), x.copy()
    ways = {(1, 0, "activations"), (2, 0, "activations"), (0, 1, "gradients"), (0, 2, "gradients")}
    assert plain.keys() == ways and {value.shape for value in plain.values()} == {(ROWS, 2)}  # no labels, no columns
    spoiled[:, :3] += 1
    other, flipped = views(spoiled, Y), views(x, 1 - Y)
    for p in (1, 2):
        np.testing.assert_array_equal(plain[p, 0, "activations"], other[p, 0, "activations"])  # of own columns alone
        np.testing.assert_array_equal(plain[p, 0, "activations"], flipped[p, 0, "activations"])  # and of no label
        assert (plain[0, p, "gradients"] != other[0, p, "gradients"]).any()

    @jax.jit
    def slopes(params, sent):
        joint = jax.grad(lambda params: algorithms.vertical_loss(model, loss)(params, {"x": x, "y": Y})["loss"].mean())
        return joint(params), *jax.vjp(lambda own: party_functions_of(model).bottoms[1](own, x), params)[1](sent)

    whole, own = slopes(params, plain[0, 1, "gradients"])
    for got, expected in zip(
        jax.tree.leaves(own["parties"]["party_1"]), jax.tree.leaves(whole["parties"]["party_1"]), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)  # from its columns and what it received
    rest = {name: part for name, part in own["parties"].items() if name != "party_1"}
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(rest))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", LOSSES)
def test_a_round_is_centralised_descent(name):
    """Three rounds of full-batch descent against NumPy in float64."""
    loss, residual = LOSSES[name]
    if name == "taylor":
        made = _vertical(objective="taylor")
    else:
        made = _vertical(loss=loss)
    w, b = np.zeros(6), 0.0
    for _ in range(3):
        r = residual(X @ w + b, Y) / ROWS
        w, b = w - 0.5 * X.T @ r, b - 0.5 * r.sum()
    found, info = _round(made, _consortia(), _params(np.zeros(6), 0.0, np.float32), rounds=3)
    np.testing.assert_allclose(_flat(found), w, atol=2e-6)
    np.testing.assert_allclose(found["bias"], b, atol=2e-6)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == 0  # the model stays where it is
    assert [_total(info[name]) for name in ("forward_bytes", "backward_bytes")] == [2 * ROWS * 4] * 2


@pytest.mark.full
def test_optimisers_start_anew():
    """The first step of Adam moves each weight by the rate: so does each round of one step, and not a second step.

    Catches moments that one consortium carries over, which is said of none.
    """

    def moved(rounds, steps):
        work = {"num_steps": steps, "mesh": None}
        made = algorithms.vertical(LINEAR, models.sigmoid_cross_entropy, sampling.full(1), optax.adam(0.1), **work)
        return _flat(_round(made, _consortia(), _params(np.zeros(6), 0.0, np.float32), rounds)[0])

    once, twice, together = moved(1, 1), moved(2, 1), moved(1, 2)
    np.testing.assert_allclose(np.abs(twice - once), 0.1, rtol=1e-4)
    assert np.abs(twice - together).max() > 1e-4


@pytest.mark.full
def test_misaligned_rows_change_it():
    """The same tables in another order at one party: another model, and a worse one."""
    start, moved = _params(np.zeros(6), 0.0, np.float32), X.copy()
    moved[:, 3:] = np.roll(X[:, 3:], 7, axis=0)
    right, good = _round(_vertical(), _consortia(), start, rounds=40)
    wrong, bad = _round(_vertical(), _consortia(moved), start, rounds=40)
    assert np.abs(_flat(right) - _flat(wrong)).max() > 0.1 and good["local_loss"] < bad["local_loss"]


@pytest.mark.full
@pytest.mark.parametrize(
    "batch_size, num_steps, visits",
    [
        (16, 4, 56),
        *(pytest.param(*x, marks=pytest.mark.full) for x in ((None, 3, 120), (16, 3, 40), (7, 6, 40), (100, 2, 80))),
    ],
)
def test_bytes_are_those_of_the_arrays(batch_size, num_steps, visits):
    """Two parties send 2 float32 a row visited, there and back: partial batches count by their rows."""
    model = models.vertical_mlp(columns=COLUMNS, num_outputs=1, embedding=2)
    params = model.init(jax.random.key(0))[0]
    _, info = _round(_vertical(model=model, num_steps=num_steps, batch_size=batch_size), _consortia(), params)

    def bytes_seen(*parties):
        def values():
            rows = {"x": np.float32(X), "y": Y}
            seen = algorithms.vertical_transcript(model, models.sigmoid_cross_entropy, params, rows)
            return [message.value for p in parties for message in seen.seen_by(p)]

        return sum(x.size * x.dtype.itemsize for x in jax.eval_shape(values))

    a_row = bytes_seen(0) // ROWS
    assert a_row == 16 == bytes_seen(1, 2) // ROWS
    assert [_total(info[name]) for name in ("forward_bytes", "backward_bytes")] == [visits * a_row] * 2


def _total(count):
    return count.total() if hasattr(count, "total") else (int(count[0]) << 32) + int(count[1])


@pytest.mark.full
def test_bytes_through_a_link():
    """8-bit codes and a scale one way, numbers the other way, and what encryption adds to each batch and message."""
    model = models.vertical_mlp(columns=COLUMNS, num_outputs=1, embedding=4)
    made = _vertical(model=model, num_steps=3, batch_size=16, forward=transform.quantize(8), encrypted=True)
    _, info = _round(made, _consortia(), model.init(jax.random.key(0))[0])
    there, back = wires(link(forward=transform.quantize(8)), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert (there.bits, back.bits) == (4 * 8 + 32, 4 * 32)
    assert _total(info["forward_bytes"]) == 40 * 2 * 8 + 3 * 2 * 28
    assert _total(info["backward_bytes"]) == 40 * 2 * 16 + 3 * 2 * 28


def test_counts_past_32_bits():
    """Rows times steps times bytes, against Python. Catches a product that wraps."""
    for held, steps, factor in ((100_000, 70_000, 96), (2**31 - 1, 2**20, 1024), (7, 1, 3)):
        steps_words = jnp.array([0, steps], jnp.uint32)
        visits = word_pair_product(jnp.int32(held), steps_words)
        found = word_pair_sum(
            word_pair_product(jnp.uint32(factor), visits), word_pair_product(jnp.uint32(28), steps_words)
        )
        assert _total(found) == held * steps * factor + 28 * steps


def test_noise_on_links_is_not_accounted_as_something_else():
    """Catches an epsilon of DP-SGD for noise on embeddings, and one that is silently missing."""
    made = _vertical(num=3, forward=transform.local_gaussian(1.0, 2.0))
    assert noisy_parts(made.parts)["client"].multiplier == 2.0
    with pytest.raises(ValueError, match="noise on links"):
        mechanism_of(made)
    assert mechanism_of(_vertical(num=3)) is None


@pytest.mark.full
def test_consortia_are_fedavg():
    """Three consortia of unequal size are FedAvg on the joint model, to 1e-7, and their models do travel."""
    sizes, model = (10, 25, 5), models.vertical_mlp(columns=COLUMNS, num_outputs=1)
    params, data = model.init(jax.random.key(0))[0], _consortia(sizes=(10, 25, 5))
    work = {"num_epochs": 2, "batch_size": 8}
    found, info = _round(_vertical(3, model=model, num_steps=None, **work), data, params, rounds=2)
    joint = models.supervised(model, models.sigmoid_cross_entropy)
    fedavg = algorithms.fedavg(joint, sampling.full(3), optax.sgd(0.5), mesh=None, **work)
    expected, other = _round(fedavg, data, params, rounds=2)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)
    assert info["uplink_bytes"].total() == other["uplink_bytes"].total() > 0 and sum(sizes) == ROWS


def test_no_clock_prices_a_consortium():
    """Catches a consortium whose parties' work a clock prices as that of one device without links."""
    devices = network.heterogeneous(3, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e6)
    timed = sampling.with_clock(sampling.full(3), devices)
    with pytest.raises(ValueError, match="take no time"):
        algorithms.vertical(LINEAR, models.sigmoid_cross_entropy, timed, optax.sgd(0.5), num_steps=1, mesh=None)


def test_one_consortium_is_no_edge():
    """Its model is sent to nobody, which an edge over its parts would count. Catches parts that say they are all."""
    for federation in (_vertical(), _vertical().parts):
        with pytest.raises(ValueError, match="the parts of a whole algorithm"):
            algorithms.as_client_update(federation)
    assert algorithms.as_client_update(_vertical(2)).facts.metrics


@pytest.mark.full
def test_arrays_by_party_train_alike():
    """P arrays in place of one: the same model, without a copy of the columns."""
    parts = tuple(jnp.asarray(np.float32(part)) for part in np.split(X, np.cumsum(COLUMNS)[:-1], axis=1))
    rows = {"x": parts, "y": jnp.asarray(Y)}
    data = population.generated(1, lambda rows, id: ClientData(rows, jnp.ones(ROWS, bool)), rows)
    start = _params(np.zeros(6), 0.0, np.float32)
    one, two = _round(_vertical(), data, start, 2)[0], _round(_vertical(), _consortia(), start, 2)[0]
    np.testing.assert_allclose(_flat(one), _flat(two), atol=1e-7)


def test_what_does_not_fit_is_refused():
    flat = models.mlp(input_shape=(6,), num_outputs=1)
    with pytest.raises(ValueError, match="a branch for each party"):
        _vertical(model=flat)
    with pytest.raises(ValueError, match="objective"):
        _vertical(objective="taylor", loss=models.squared_error)
    with pytest.raises(ValueError, match="none with one consortium"):
        _vertical(transform=transform.top_k(0.5))
    with pytest.raises(TypeError, match="a Model"):
        algorithms.vertical_loss(lambda x: x, models.squared_error)
    with refused("links", value="party_0", rule="'party_1'"):
        _vertical(links={"party_0": network.link()})
    with pytest.raises(TypeError, match=r"links\['party_1'\]: expected a Link"):
        _vertical(links=3)
    for links in (3, {"party_1": network.link()}):
        with refused("links", rule="beside forward"):
            _vertical(links=links, encrypted=True)
    model = models.vertical_linear(columns=(1, 1), num_outputs=1)
    params, loss_fn = model.init(jax.random.key(0))[0], algorithms.vertical_loss(model, models.squared_error)
    for call in (loss_fn, lambda *rest: algorithms.vertical_transcript(model, models.squared_error, *rest)):
        with refused("examples", rule='"x" and "y"', kind=InvalidType):
            call(params, {"x": jnp.ones((2, 2))})

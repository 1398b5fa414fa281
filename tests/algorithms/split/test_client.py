"""Training through a cut: tiers, bytes, optimisers of several parties, and what refuses it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, network, sampling, server, transform
from fedjax_sim.algorithms import split_client, split_costs, split_loss
from fedjax_sim.algorithms.split.loss import split_transcript
from fedjax_sim.algorithms.split.traffic import bits_by_direction, crossings
from fedjax_sim.models import mlp, softmax_cross_entropy, squared_error, supervised, vertical_linear
from fedjax_sim.types import ClientData

KEY = jax.random.key(0)
DEEP = mlp(input_shape=(10,), num_outputs=3, hidden=(9, 8, 7, 6))
X = jax.random.normal(jax.random.key(1), (40, 10))
Y = jax.random.randint(jax.random.key(2), (40,), 0, 3)


def data(n=37):
    return ClientData({"x": X, "y": Y}, jnp.arange(40) < n)


def values_of(transcript, name):
    return [m.value for m in transcript.messages if m.name == name]


def test_bytes_are_those_of_the_arrays():
    """Catches messages of padding, a partial batch counted as full, a hop that is not counted, bits of a batch."""
    made = network.link(forward=transform.quantize(8), batch_bits=16)
    split = split_loss(DEEP, softmax_cross_entropy, ("hidden_0", "hidden_1"), link={"hidden_2": made})
    params = DEEP.init(KEY)[0]
    seen = jax.eval_shape(lambda: values_of(split_transcript(split, params, {"x": X, "y": Y}, KEY), "hidden_1"))
    found = crossings(split, params, {"x": X[0], "y": Y[0]})
    assert [(c.name, c.there, c.back, c.batch) for c in found] == [
        ("labels", 32, 0, 0),
        ("hidden_1", 9 * 32, 9 * 32, 0),
        ("hidden_2", 8 * 8 + 32, 8 * 32, 16),
    ]
    assert [8 * x.size * x.dtype.itemsize for x in seen] == [40 * 9 * 32] * 2
    work = client.work(num_steps=7, batch_size=8)  # 37 examples are 5 batches, the last of 5; 7 steps are 37 + 16
    made = split_client(split, optax.sgd(0.1), work)
    counted = jax.jit(lambda *given: made.apply(*given)[0].counts)
    counts = counted(KEY, params, (), data())
    visited = 37 + 16
    assert {name: x.tolist() for name, x in counts.items()} == {
        "split_up_bytes": [0, visited * (4 + 36)],
        "split_down_bytes": [0, visited * 36],
        "split_other_bytes": [0, visited * (12 + 32) + 7 * 4],
    }
    nobody = counted(KEY, params, (), data(0))
    assert all((x == 0).all() for x in nobody.values())
    assert bits_by_direction(found, training=False) == {"up": (288, 0), "down": (0, 0), "other": (96, 16)}


def test_messages_are_whole_bytes():
    """34 bits are 5 bytes, in every message and wherever they are told. Catches bits that are added up before."""
    few = network.link(forward=transform.top_k(count=1), batch_bits=4)
    split, params = split_loss(DEEP, softmax_cross_entropy, ("hidden_0", "hidden_2"), link=few), DEEP.init(KEY)[0]
    batch = {"x": X[:8], "y": Y[:8]}
    costs = split_costs(split, params, batch)
    assert [x.there for x in costs.crossed] == [32, 40, 40] and [x.batch for x in costs.crossed] == [8, 8, 8]
    made = split_client(split, optax.sgd(0.1), client.work(num_steps=1))
    counts = jax.jit(lambda: made.apply(KEY, params, (), ClientData(batch, jnp.ones(8, bool)))[0].counts)()
    assert sum(int(x[1]) for x in counts.values()) == sum(bits for *_, bits in costs.messages()) // 8


def test_long_work_is_counted():
    """2^24 steps of 3,000 examples: 5.0e10 visits. Catches a number of visits that wraps at 2^31."""
    from fedjax_sim.algorithms.split.client import _bytes
    from fedjax_sim.algorithms.split.traffic import visits

    mask, split = jnp.ones(3000, bool), split_loss(DEEP, softmax_cross_entropy, "hidden_0")
    many = ClientData({"x": jnp.zeros((3000, 10)), "y": jnp.zeros(3000, jnp.int32)}, mask)
    visited, steps = visits(client.work(num_steps=1 << 24), many)
    assert [int(x[0]) * 2**32 + int(x[1]) for x in (visited, steps)] == [3000 << 24, 1 << 24]
    found = _bytes(split, DEEP.init(KEY)[0], many, visited, steps)
    assert int(found["up"][0]) * 2**32 + int(found["up"][1]) == (3000 << 24) * 40


@pytest.mark.full
def test_each_party_has_its_own_optimiser():
    """A clip by the global norm, against two machines. Catches a norm over gradients that no party has together."""
    split, params, full = split_loss(DEEP, softmax_cross_entropy, "hidden_1"), DEEP.init(KEY)[0], data(40)
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0, momentum=0.9))
    update = split_client(split, optimizer, client.work(num_steps=1)).apply(KEY, params, (), full)[0].update
    gradient = jax.grad(lambda p: split(p, full.examples)["loss"].mean())(params)
    for part, moved in zip(split.cut.split(gradient), split.cut.split(update), strict=True):
        length = optax.tree.norm(part)
        for g, u in zip(jax.tree.leaves(part), jax.tree.leaves(moved), strict=True):
            np.testing.assert_allclose(u, -g * 0.01 / length, atol=2e-7)
        assert length > 0.01


@pytest.mark.full
def test_tiers_train_the_same_model():
    """Catches a cut that changes the result, counts of another tier, and links of another tier."""
    work = client.work(num_steps=3, batch_size=8)
    splits = [split_loss(DEEP, softmax_cross_entropy, at) for at in ("hidden_0", "hidden_2")]
    params = DEEP.init(KEY)[0]
    plain = client.local_sgd(supervised(DEEP, softmax_cross_entropy), optax.sgd(0.1), work)
    expected = jax.jit(lambda: plain.apply(KEY, params, (), data())[0].update)()
    for tier, width in ((0, 9), (1, 7)):
        tiered = split_client(splits, optax.sgd(0.1), work, tier=lambda key, data, tier=tier: tier)
        report = jax.jit(lambda made=tiered: made.apply(KEY, params, (), data())[0])()
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(report.update), strict=True):
            np.testing.assert_array_equal(a, b)
        assert report.counts["split_down_bytes"].tolist() == [0, 24 * 4 * width]
    coarse = network.link(forward=transform.stateless(lambda key, x: jnp.round(x)))
    mixed = [splits[0], split_loss(DEEP, softmax_cross_entropy, "hidden_2", link=coarse)]
    both = [
        split_client(mixed, optax.sgd(0.1), work, tier=lambda key, data, tier=tier: tier).apply(KEY, params, (), data())
        for tier in (0, 1)
    ]
    alone = split_client(mixed[1], optax.sgd(0.1), work).apply(KEY, params, (), data())[0].update
    np.testing.assert_allclose(both[0][0].update["hidden_0"]["kernel"], expected["hidden_0"]["kernel"], atol=1e-6)
    np.testing.assert_allclose(both[1][0].update["hidden_0"]["kernel"], alone["hidden_0"]["kernel"], atol=1e-6)
    assert (jnp.abs(alone["hidden_0"]["kernel"] - expected["hidden_0"]["kernel"]) > 1e-4).any()


def star(sampler, made):
    return algorithms.federated(sampler, made, aggregation.mean(), server.optimizer(optax.sgd(1.0)), mesh=None)


def test_no_clock_prices_what_others_help_with():
    """Catches a device that is charged for its gateway's layers, on any level and in flight, and bytes of late clients
    that nobody counts."""
    devices = network.heterogeneous(5, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e6)
    full, work = sampling.full(5), client.work(num_steps=1)
    made = split_client(split_loss(DEEP, softmax_cross_entropy, "hidden_0"), optax.sgd(0.1), work)
    edge = algorithms.as_client_update(star(full, made).parts, 1, name="edge")
    for client_ in (made, edge):
        with pytest.raises(ValueError, match="take no time"):
            star(sampling.with_clock(full, devices), client_)
    with pytest.raises(ValueError, match="take no time"):
        algorithms.asynchronous(
            devices, made, aggregation.mean(), server.optimizer(optax.sgd(1.0)),
            population_size=5, concurrency=2, buffer_size=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="late clients"):
        star(sampling.with_over_invitation(sampling.uniform(5, 3), 2), made)
    star(sampling.with_stragglers(full, 0.5), made)


def test_a_loss_of_several_parties_is_no_clients_own():
    """Catches a cut whose bytes nobody counts, and whose server's layers a clock prices at the client."""
    model, full, step = vertical_linear(columns=(4, 6), num_outputs=1), sampling.full(5), optax.sgd(0.1)
    losses = split_loss(DEEP, softmax_cross_entropy, "hidden_0"), algorithms.vertical_loss(model, squared_error)
    for loss_fn in losses:
        for make in (
            lambda loss_fn: algorithms.fedavg(loss_fn, full, step, num_steps=1),
            lambda loss_fn: algorithms.fedprox(loss_fn, full, step, coefficient=0.1, num_steps=1),
            lambda loss_fn: algorithms.scaffold(loss_fn, full, step, num_steps=1, weighting="uniform"),
            lambda loss_fn: client.full_gradient(loss_fn),
            lambda loss_fn: client.private_sgd(loss_fn, 1.0, 1.0, 0.1, num_steps=1, batch_size=2, num_examples=9),
        ):
            words = "loss_fn: expected one that the client computes by itself.* take algorithms.split_client, splitfed"
            with pytest.raises(ValueError, match=words):
                make(loss_fn)


def test_noise_on_links_has_no_epsilon():
    """Catches noise that no part states: a run that stops on a client, or names it, would tell what the noise hides."""
    split = split_loss(
        DEEP, softmax_cross_entropy, "hidden_0", link=network.link(backward=transform.local_gaussian(1.0, 1.0))
    )
    made = split_client(split, optax.sgd(0.1), client.work(num_steps=1))
    assert made.facts.noise.mechanism == "noise on links" and made.facts.noise.unit == "record"
    with pytest.raises(ValueError, match="nonfinite"):
        algorithms.federated(
            sampling.full(5), made, aggregation.mean(), server.optimizer(optax.sgd(1.0)), nonfinite="error"
        )


def test_tiers_that_cannot_be():
    """Catches tiers without a function that tells them, and cuts of other models."""
    split = split_loss(DEEP, softmax_cross_entropy, "hidden_0")
    work, step = client.work(num_steps=1), optax.sgd(0.1)
    for tier in (None, 3):
        with pytest.raises(TypeError, match=r"tier: expected a function \(key, data\)"):
            split_client([split, split], step, work, tier=tier)
    with pytest.raises(ValueError, match="tier: expected None with one split"):
        split_client(split, step, work, tier=lambda key, data: 0)
    with pytest.raises(ValueError, match="split: expected a Split"):
        split_client([], step, work)
    with pytest.raises(TypeError, match=r"split\[0\]: expected a Split"):
        split_client(softmax_cross_entropy, step, work)
    other = split_loss(mlp(input_shape=(10,), num_outputs=3), softmax_cross_entropy, "hidden_0")
    with pytest.raises(ValueError, match="several models"):
        split_client([split, other], optax.sgd(0.1), client.work(num_steps=1), tier=lambda key, data: 0)

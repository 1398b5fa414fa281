"""Evaluation pools over examples, whatever the clients' sizes and the padding."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import metrics
from fedjax_sim.metrics.baseline import constant_baseline
from fedjax_sim.models import next_token_cross_entropy
from fedjax_sim.population import from_clients, generated, indexed, stored
from fedjax_sim.types import ClientData
from tests.refusals import refused

SIZES = (3, 1, 7, 0, 5)


def loss_fn(params, examples, key):
    assert key is None  # evaluation
    error = examples["x"] @ params - examples["y"]
    return {"loss": error**2, "accuracy": (jnp.abs(error) < 1).astype(jnp.float32)}


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(n, 4)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)} for n in SIZES
    ]


PARAMS = jnp.array([0.5, -1.0, 2.0, 0.1])


def test_matches_a_loop_over_clients(clients):
    """Fault: a padded row, or a client's last batch, counted in a mean."""
    record = metrics.evaluation(loss_fn, held_out=from_clients(clients))(PARAMS)
    losses = [((c["x"].astype(float) @ np.asarray(PARAMS, float)) - c["y"]) ** 2 for c in clients]
    np.testing.assert_allclose(record["held_out_loss"], np.concatenate(losses).mean(), rtol=1e-6)
    own = [x.mean() for x in losses if len(x)]
    np.testing.assert_allclose(
        record["held_out_loss_quantiles"], np.quantile(own, metrics.evaluation.__globals__["QUANTILES"]), rtol=1e-6
    )


@pytest.mark.default_rows("False")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_metrics_of_16_bits(dtype, weighted):
    """10,000 rows of loss 11 and accuracy 1, weighed alike or by 1 and 9/8. Catches sums in the loss's own dtype,
    rounded or past it."""

    def loss_fn(params, examples, key):
        ones = jnp.ones(examples["x"].shape, dtype)
        values = {"loss": 11 * ones, "accuracy": ones}
        return values | {"weight": ones + examples["x"].astype(dtype) / 8} if weighted else values

    x = np.arange(10_000, dtype=np.float32) % 2
    people = from_clients([{"x": x}, {"x": x[:1]}])
    record = metrics.evaluation(loss_fn, test={"x": x}, held_out=people, train=people)(PARAMS)
    for who in ("test", "held_out", "train"):
        assert (record[f"{who}_loss"], record[f"{who}_accuracy"]) == (11.0, 1.0)


def test_numbers_of_python():
    """A weight of 1.0, and the same metric for every row. Catches arrays alone that can be summed."""
    x = np.arange(5, dtype=np.float32)
    record = metrics.evaluation(lambda p, e, k: {"loss": e["x"], "heat": 2, "weight": 1.0}, test={"x": x})(PARAMS)
    assert (record["test_loss"], record["test_heat"]) == (2.0, 2.0)


def test_pooled_is_the_weighted_mean_of_clients(clients):
    """McMahan et al. 2017, section 1. Fault: an unweighted mean over clients, or over batches (more than one batch
    here)."""
    many = clients * 60
    together = jax.tree.map(lambda *x: np.concatenate(x), *many)
    record = metrics.evaluation(loss_fn, test=together, held_out=from_clients(many))(PARAMS)
    np.testing.assert_allclose(record["test_loss"], record["held_out_loss"], rtol=1e-6)
    np.testing.assert_allclose(record["test_accuracy"], record["held_out_accuracy"], rtol=1e-6)
    unweighted = np.mean([np.mean((c["x"] @ np.asarray(PARAMS) - c["y"]) ** 2) for c in clients if len(c["y"])])
    assert abs(record["test_loss"] - unweighted) > 1e-2


def test_the_objective_is_that_of_a_loop_over_clients(clients):
    """Fault: clients weighed alike, a last block counted twice, padding that counts, a sum that loses digits; a sample
    with another size than it states, or another one at each look."""
    many = [client for client in clients * 300 if len(client["y"])] + clients
    population = from_clients(many)
    losses = [((c["x"].astype(float) @ np.asarray(PARAMS, float)) - c["y"]) ** 2 for c in many]
    found = metrics.evaluation(loss_fn, train=population)(PARAMS)
    np.testing.assert_allclose(found["train_loss"], np.concatenate(losses).mean(), rtol=3e-7)
    assert set(found) == {"train_loss", "train_accuracy"}
    ids = np.arange(7, 50, 3)
    some = jax.jit(lambda p, ids: metrics.objective(loss_fn, p, population, ids))(PARAMS, ids)
    np.testing.assert_allclose(some["loss"], np.concatenate([losses[i] for i in ids]).mean(), rtol=1e-6)
    sampled = metrics.evaluation(loss_fn, train=population, train_clients=20, seed=3)
    record = sampled(PARAMS)
    assert record == sampled(PARAMS) and record["train_sample_clients"] == 20
    means = np.array([x.sum() for x in losses]), np.array([len(x) for x in losses])
    chosen = sorted(random.Random(3).sample(range(len(many)), 20))
    np.testing.assert_allclose(record["train_loss"], means[0][chosen].sum() / means[1][chosen].sum(), rtol=1e-6)
    with pytest.raises(ValueError, match="train_clients: expected an integer in"):
        metrics.evaluation(loss_fn, train=population, train_clients=len(many) + 1)
    with refused("train_clients", rule="choose"):
        metrics.evaluation(loss_fn, train_clients=2)


@pytest.mark.parametrize("codes, mean", [((7,), np.inf), ((8,), -np.inf), ((7, 8), np.nan), ((9,), np.nan)])
def test_losses_that_are_not_finite(codes, mean):
    """Fault: NaN for the mean of losses of which one is infinite, as no float64 loop has it."""
    codes = np.float32([1.0, 2.0, *codes, 3.0])
    population = from_clients([{"code": codes[:2]}, {"code": codes[2:]}])

    def loss_fn(params, examples, key):
        odd = jnp.array([jnp.inf, -jnp.inf, jnp.nan])[jnp.clip(examples["code"].astype(int) - 7, 0, 2)]
        return {"loss": jnp.where(examples["code"] < 7, examples["code"], odd)}

    np.testing.assert_equal(float(metrics.objective(loss_fn, 1.0, population)["loss"]), mean)


@pytest.mark.full
def test_memory_of_the_objective_is_flat():
    """Fault: a number, or an id, for each of a billion clients."""

    def generate(parameters, id):
        return ClientData({"x": jnp.full((1, 4), parameters), "y": jnp.zeros(1)}, jnp.ones(1, bool))

    def needs(size):
        clients = generated(size, generate, jnp.float32(1))
        measure = jax.jit(lambda params, clients: metrics.objective(loss_fn, params, clients))
        return measure.lower(PARAMS, clients).compile().memory_analysis().temp_size_in_bytes

    assert needs(10**9) <= needs(10**4) + 4096


def test_per_example_weights_pool_over_tokens():
    """Fault: sequences of unequal length counted as equal."""

    def sequences(params, examples, key):
        return {"loss": examples["mean"], "weight": examples["tokens"]}

    examples = {"mean": np.float32([1.0, 5.0]), "tokens": np.float32([3.0, 1.0])}
    assert metrics.evaluation(sequences, test=examples)(())["test_loss"] == 2.0


def test_perplexity_is_that_of_all_tokens():
    """Catches a mean of the sequences' or the clients' perplexities, and padding that counts as a token."""
    rng = np.random.default_rng(0)
    lengths = [[3, 1], [4, 4, 2], [1]]
    clients = []
    for of_client in lengths:
        y = np.full((len(of_client), 4), -1)
        for row, length in zip(y, of_client, strict=True):
            row[:length] = rng.integers(0, 5, length)
        clients.append({"x": rng.normal(size=(len(of_client), 4, 5)).astype(np.float32), "y": y.astype(np.int32)})

    def loss_fn(params, examples, key):
        return next_token_cross_entropy(examples["x"] * params, examples["y"])

    joined = {name: np.concatenate([client[name] for client in clients]) for name in ("x", "y")}
    options = {"test": joined, "held_out": from_clients(clients), "train": from_clients(clients)}
    record = metrics.evaluation(loss_fn, **options, perplexity=True)(jnp.float32(2))

    def nats(client):
        logits = 2 * np.float64(client["x"])
        losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, client["y"].clip(0)[..., None], -1)[..., 0]
        return losses[client["y"] >= 0]

    whole = np.exp(np.concatenate([nats(client) for client in clients]).mean())
    for group in ("test", "held_out", "train"):
        np.testing.assert_allclose(record[f"{group}_perplexity"], whole, rtol=1e-5)
    own = np.quantile([np.exp(nats(client).mean()) for client in clients], [0.05, 0.25, 0.5, 0.75, 0.95])
    np.testing.assert_allclose(record["held_out_perplexity_quantiles"], own, rtol=1e-5)
    assert not any("perplexity" in name for name in metrics.evaluation(loss_fn, **options)(jnp.float32(2)))
    of_its_own = lambda *args: loss_fn(*args) | {"perplexity": jnp.ones(2)}  # noqa: E731
    with refused("perplexity", value=True, rule="metric"):
        metrics.evaluation(of_its_own, test=clients[0], perplexity=True)(jnp.float32(2))


def test_populations_without_rows():
    """Catches a division by the number of rows, and a baseline of no labels."""
    empty = ClientData({"x": jnp.zeros((0, 4)), "y": jnp.zeros(0)}, jnp.ones(0, bool))
    nobody = generated(3, lambda parameters, id: empty)
    assert float(metrics.per_client(loss_fn, PARAMS, nobody)["loss"][1].sum()) == 0
    assert np.isnan(metrics.objective(loss_fn, PARAMS, nobody)["loss"])
    with refused("population", rule="with examples"):
        metrics.drift_bias(loss_fn, PARAMS, nobody, step_size=0.1, num_steps=1)
    assert constant_baseline({"y": np.array([[-1, -1]])}, "next_token") == {}
    assert constant_baseline({"y": np.zeros((0, 1))}, "regression") == {}
    with refused("test", value=0, rule="example"):
        metrics.pooled(loss_fn, PARAMS, {"x": jnp.zeros((0, 4)), "y": jnp.zeros(0)})


def test_results_by_client_are_those_of_the_record(clients):
    """Catches results of another client, of padding, of a client without rows, and of other rows than the record's."""
    groups = {"held_out": from_clients(clients), "local_test": from_clients(clients[::-1])}
    for perplexity in (False, True):
        evaluate = metrics.evaluation(loss_fn, **groups, perplexity=perplexity)
        record, by_client = evaluate.with_clients(PARAMS)
        again = evaluate(PARAMS)
        assert again.keys() == record.keys()
        assert set(by_client) == {*groups, "owner"}
        for group, sizes in (("held_out", SIZES), ("local_test", SIZES[::-1]), ("owner", SIZES[::-1])):
            has_rows = np.array(sizes) > 0
            assert {name.removeprefix(f"{group}_") for name in by_client[group]} == {
                "loss", "accuracy", *(["perplexity"] if perplexity else [])
            }  # fmt: skip
            for name, values in by_client[group].items():
                assert values.dtype == np.float32
                np.testing.assert_array_equal(~np.ma.getmaskarray(values), has_rows)
                quantiles = np.quantile(values.compressed().astype(float), metrics.evaluation.__globals__["QUANTILES"])
                np.testing.assert_allclose(record[f"{name}_quantiles"], quantiles, rtol=1e-6)
                if not name.endswith("perplexity"):
                    mean = np.average(values.compressed().astype(float), weights=np.array(sizes)[has_rows])
                    np.testing.assert_allclose(record[name], mean, rtol=1e-6)
        errors = [c["x"].astype(float) @ np.asarray(PARAMS, float) - c["y"] for c in clients]
        losses = [np.mean(error**2) for error in errors if len(error)]
        np.testing.assert_allclose(by_client["held_out"]["held_out_loss"].compressed(), losses, rtol=1e-5)


def test_no_results_by_client_beyond_a_thousand():
    """Catches a million results that are copied to the host, and 1,000 clients taken for too many."""
    rows = {"x": np.ones((1001, 4), np.float32), "y": np.zeros(1001, np.float32)}
    sizes = {size: stored(jax.tree.map(lambda x, n=size: x[:n], rows), np.arange(size + 1)) for size in (1000, 1001)}
    evaluate = metrics.evaluation(loss_fn, held_out=sizes[1001], local_test=sizes[1000])
    record, by_client = evaluate.with_clients(PARAMS)
    assert list(by_client) == ["local_test", "owner"] and len(by_client["local_test"]["local_test_loss"]) == 1000
    assert len(record["held_out_loss_quantiles"]) == 5


def test_equal_rows_are_measured_once(clients):
    """Faults: the test set evaluated twice, as such and client by client; a client that gets another one's rows."""
    table = jax.tree.map(lambda *x: np.concatenate(x), *clients)
    rows = np.array([15, 3, 3, 0, 8, 9])
    passes = []

    def counted(params, examples, key):
        passes.append(len(examples["y"]))
        return loss_fn(params, examples, key)

    others = jax.tree.map(lambda x: x + 1, table)
    sets = {
        "clients of the test rows": (from_clients(clients), table, 1),
        "rows of the test set": (indexed(table, (rows, np.array([0, 2, 2, 6]))), table, 1),
        "the test set of clients": (indexed(others, (rows, [0, 6])), jax.tree.map(lambda x: x[rows], others), 1),
        "other rows": (from_clients(clients), others, 2),
        "fewer rows": (from_clients(clients), jax.tree.map(lambda x: x[:-1], table), 2),
    }
    for name, (people, test, num_passes) in sets.items():
        passes.clear()
        record, by_client = metrics.evaluation(counted, test=test, held_out=people).with_clients(PARAMS)
        assert len(passes) == num_passes, name
        alone, alone_by_client = metrics.evaluation(loss_fn, held_out=people).with_clients(PARAMS)
        on_test = metrics.evaluation(loss_fn, test=test)(PARAMS)
        assert {key: record[key] for key in on_test} == on_test, name  # bit for bit
        assert record.keys() == alone.keys() | on_test.keys()
        for key, value in alone.items():
            np.testing.assert_allclose(record[key], value, rtol=2e-6, err_msg=f"{name} {key}")
        for key, value in alone_by_client["held_out"].items():
            found = by_client["held_out"][key]
            np.testing.assert_array_equal(found.mask, value.mask)
            np.testing.assert_allclose(found.filled(0), value.filled(0), rtol=2e-6)

"""Metrics of all scores and labels in evaluations: of all test rows in one piece, and of each client's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as oracle

from fedjax_sim import metrics, models, population
from fedjax_sim.metrics.evaluation import BATCH, QUANTILES
from fedjax_sim.types import Scores
from fedjax_sim.validate import InvalidArgument

CHOSEN = [metrics.roc_auc(), metrics.f1_macro(), metrics.average_precision()]
# Clients of unequal sizes: the second has one class, the third has no row.
SIZES = (300, 5, 0, 220, 150)


def make_clients():
    """Returns (rows, clients) of a binary task, with scores in ties."""
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(sum(SIZES), 1)), 1).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=len(x)) > 0.5).astype(np.int32)
    ends = np.cumsum(SIZES)
    y[ends[0] : ends[1]] = 1
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    table = {"x": x, "y": y}
    clients = population.from_clients([{key: v[owners == i] for key, v in table.items()} for i in range(len(SIZES))])
    return table, owners, clients


def loss_fn(params, examples, key):
    logits = examples["x"][:, 0] * params["slope"]
    return {**models.sigmoid_cross_entropy(logits, examples["y"]), "scores": Scores(logits, examples["y"])}


PARAMS = {"slope": jnp.float32(2.0)}


def expected(x, y):
    return {
        "roc_auc": oracle.roc_auc_score(y, x[:, 0]),
        "f1_macro": oracle.f1_score(y, x[:, 0] > 0, average="macro"),
        "average_precision": oracle.average_precision_score(y, x[:, 0]),
    }


@pytest.mark.parametrize("rows_are_shared", [False, True])
def test_metrics_of_all_rows_and_of_each_client(rows_are_shared):
    table, owners, clients = make_clients()
    # 675 rows are three batches, of which the last one has padding.
    assert len(owners) > 2 * BATCH
    test = table if rows_are_shared else {"x": table["x"][::-1], "y": table["y"][::-1]}
    evaluation = metrics.evaluation(loss_fn, test=test, held_out=clients, metrics=CHOSEN)
    record, by_client = evaluation.with_clients(PARAMS)
    for name, value in expected(**table).items():
        assert record[f"test_{name}"] == pytest.approx(value, abs=1e-6)
    own = [expected(table["x"][owners == i], table["y"][owners == i]) for i in (0, 3, 4)]
    for name in ("roc_auc", "average_precision"):
        values = [of_client[name] for of_client in own]
        # A client of one class, and one without rows, have none; NaN is in no mean.
        assert record[f"held_out_{name}_clients"] == 3
        assert record[f"held_out_{name}"] == pytest.approx(np.mean(values), abs=1e-6)
        found = by_client["held_out"][f"held_out_{name}"]
        assert found.mask.tolist() == [False, True, True, False, False]
        np.testing.assert_allclose(found.compressed(), values, rtol=0, atol=1e-6)
        quantiles = np.quantile(values, QUANTILES)
        np.testing.assert_allclose(record[f"held_out_{name}_quantiles"], quantiles, rtol=0, atol=1e-6)
    assert record["held_out_f1_macro_clients"] == 4  # F1 is defined for one class


def test_other_numbers_stay_as_they_are():
    table, _, clients = make_clients()
    for test in (table, {key: value[:100] for key, value in table.items()}):
        options = {"test": test, "held_out": clients, "train": clients}
        plain = metrics.evaluation(loss_fn, **options)(PARAMS)
        record = metrics.evaluation(loss_fn, **options, metrics=CHOSEN)(PARAMS)
        assert {name: np.asarray(record[name]).tolist() for name in plain} == {
            name: np.asarray(value).tolist() for name, value in plain.items()
        }
        assert not any("roc_auc" in name for name in [*plain, *(x for x in record if x.startswith("train_"))])


def test_without_metrics_no_program_changes():
    table, _, clients = make_clients()

    def without_scores(params, examples, key):
        values = loss_fn(params, examples, key)
        del values["scores"]
        return values

    texts = [
        metrics.evaluation(f, test=table, held_out=clients).lower(PARAMS).as_text() for f in (loss_fn, without_scores)
    ]
    assert texts[0] == texts[1] and "sort" not in texts[0]
    with_metrics = metrics.evaluation(loss_fn, test=table, held_out=clients, metrics=CHOSEN).lower(PARAMS).as_text()
    assert "sort" in with_metrics


def test_a_diverged_model_has_no_metric():
    table, _, clients = make_clients()
    evaluation = metrics.evaluation(loss_fn, test=table, held_out=clients, metrics=CHOSEN[:1])
    record = evaluation({"slope": jnp.float32(np.nan)})
    assert np.isnan(record["test_roc_auc"]) and np.isnan(record["held_out_roc_auc"])
    # Clients whose scores are not finite count: their result is not missing, but NaN.
    assert record["held_out_roc_auc_clients"] == 4


def test_own_models_are_judged_by_their_owners_rows():
    table, owners, clients = make_clients()
    signs = jnp.array([1.0, 1.0, 1.0, -1.0, 1.0])
    evaluation = metrics.evaluation(
        loss_fn,
        local_test=clients,
        personal=lambda state, ids: {"slope": state[ids]},
        has_trained=lambda state, ids: ids != 4,
        metrics=CHOSEN[:1],
    )
    record = evaluation(PARAMS, signs)
    of_clients = [oracle.roc_auc_score(table["y"][owners == i], table["x"][owners == i, 0]) for i in (0, 3, 4)]
    of_clients[1] = 1 - of_clients[1]  # its own model has scores of the other sign
    assert record["personal_roc_auc"] == pytest.approx(np.mean(of_clients[:2]), abs=1e-6)
    assert record["newcomer_roc_auc"] == pytest.approx(of_clients[2], abs=1e-6)
    assert record["owner_roc_auc"] == pytest.approx(np.mean(of_clients), abs=1e-6)
    assert record["personal_clients"] == 3 and record["personal_roc_auc_clients"] == 2


def test_supervised_keeps_scores_in_evaluations_alone():
    model = models.linear(input_shape=(2,), num_outputs=3)
    params, _ = model.init(jax.random.key(0))
    examples = {"x": jnp.ones((4, 2)), "y": jnp.zeros(4, int)}
    keeping = models.supervised(model, models.softmax_cross_entropy, keeps_scores=True)
    assert keeping(params, examples, None)["scores"].outputs.shape == (4, 3)
    assert "scores" not in keeping(params, examples, jax.random.key(0))
    plain = models.supervised(model, models.softmax_cross_entropy)
    assert "scores" not in plain(params, examples, None)
    with pytest.raises(InvalidArgument) as refused:
        metrics.evaluation(plain, test=examples, metrics=CHOSEN[:1])(params)
    assert refused.value.argument == "loss_fn"
    for wrong in ([metrics.roc_auc], [metrics.roc_auc(), metrics.roc_auc()]):
        with pytest.raises(InvalidArgument) as refused:
            metrics.evaluation(keeping, test=examples, metrics=wrong)
        assert refused.value.argument == "metrics"

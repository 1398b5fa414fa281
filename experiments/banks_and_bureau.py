"""Four regional banks, then a credit bureau: horizontal learning first, vertical learning on what came out of it.

    python experiments/banks_and_bureau.py [FIGURE.png]

The banks have the same columns of different customers, so they train one network together (FedAvg). The bureau has
other columns of most of the same people, whom it finds by keyed hashes of their ids. In the second stage each bank is
the party with the labels, and the bureau the other one; what the banks bring is either the *score* of the first stage
(its output: one number), or the first layer of its network, a part of its *parameters*, under which each customer has
eight numbers. The bureau sends one number a customer and gets one back. Who defaults depends on both tables, and in the
banks' table on a product of two columns: a score knows that, the bank's raw columns in a linear model do not.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_sim
from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.adversary import auc

BANKS, CUSTOMERS, KNOWN = 4, 300, 0.8  # a bank's customers, and the share of them that the bureau knows
OWN, BUREAU, HIDDEN = 5, 3, 8


def people(rng: np.random.Generator, number: int) -> dict[str, np.ndarray]:
    """What banks and bureau know of so many people, and who defaults."""
    bank, bureau = rng.standard_normal((number, OWN)), rng.standard_normal((number, BUREAU))
    risk = 2 * bank[:, 0] * bank[:, 1] + bank[:, 2] + 1.5 * bureau[:, 0] - bureau[:, 1]
    return {"bank": np.float32(bank), "bureau": np.float32(bureau), "y": np.int32(risk + rng.logistic(size=number) > 0)}


def aligned(rng: np.random.Generator, banks: list[dict]) -> list[dict]:
    """Each bank's customers whom the bureau knows, in one order, found without showing ids to whoever compares."""
    found = []
    for region, bank in enumerate(banks):
        ids = [f"person {region}-{i}" for i in range(CUSTOMERS)]
        there = rng.permutation(CUSTOMERS)[: round(KNOWN * CUSTOMERS)]
        match = population.align_keyed([ids, [ids[i] for i in there]], b"a secret of banks and bureau")
        both = population.joined([bank["bank"], bank["bureau"][there]], bank["y"], match)
        found.append({"bank": both["x"][0], "bureau": both["x"][1], "y": both["y"]})
    return found


def first_stage(banks: list[dict]) -> tuple[models.Model, dict]:
    """(network, parameters) that the banks trained together."""
    network = models.mlp(input_shape=(OWN,), num_outputs=1, hidden=(HIDDEN,))
    data = population.from_clients([{"x": bank["bank"], "y": bank["y"]} for bank in banks])
    loss_fn = models.supervised(network, models.sigmoid_cross_entropy)
    fedavg = algorithms.fedavg(loss_fn, sampling.full(BANKS), optax.sgd(0.2), num_epochs=2, batch_size=20)
    state, _ = fedjax_sim.run(jax.random.key(0), fedavg, network.init(jax.random.key(1))[0], data, 40)
    return network, fedavg.params(state)


def second_stage(bring, known: list[dict], test: dict) -> tuple[float, int]:
    """(AUC, bytes between banks and bureau) of vertical logistic regression; `bring(bank's columns)` is the banks'."""
    width = bring(test["bank"]).shape[1]
    rows = [{"x": np.concatenate([bring(r["bank"]), r["bureau"]], 1), "y": r["y"]} for r in known]
    model = models.vertical_linear(columns=(width, BUREAU), num_outputs=1)
    work = {"num_epochs": 2, "batch_size": 20}
    learn = algorithms.vertical(model, models.sigmoid_cross_entropy, sampling.full(BANKS), optax.sgd(0.1), **work)
    start = model.init(jax.random.key(2))[0]
    state, history = fedjax_sim.run(jax.random.key(3), learn, start, population.from_clients(rows), 30)
    scores, _ = model.apply(
        learn.params(state), (), np.concatenate([bring(test["bank"]), test["bureau"]], 1), None, False
    )
    sent = sum(
        record[way] for record in history.records for way in ("forward_bytes", "backward_bytes") if way in record
    )
    return judged(scores, test["y"]), int(sent)


def judged(scores, y: np.ndarray) -> float:
    """AUC of scores."""
    scores = np.asarray(scores).reshape(-1)
    return auc(scores[y == 1], scores[y == 0])


def main() -> dict[str, float]:
    """AUC on new customers of what banks know alone, and of each way to bring it to the bureau; bytes by the way."""
    rng = np.random.default_rng(0)
    banks, test = [people(rng, CUSTOMERS) for _ in range(BANKS)], people(rng, 4000)
    known = aligned(rng, banks)
    network, params = first_stage(banks)

    def score(x):
        return np.asarray(network.apply(params, (), x, None, False)[0])

    def layer(x):
        hidden = params["hidden_0"]
        return np.asarray(jax.nn.relu(jnp.asarray(x) @ hidden["kernel"] + hidden["bias"][None]))

    found = {"banks alone": judged(score(test["bank"]), test["y"])}
    for name, bring in (("bank columns", lambda x: x), ("score", score), ("first layer", layer)):
        found[f"{name} + bureau"], found[f"{name}: bytes"] = second_stage(bring, known, test)
    for name, value in found.items():
        print(f"{name:24} {value:,.3f}" if "bytes" not in name else f"{name:24} {value:,.0f}")
    return found


def figure(found: dict[str, float]):
    """The AUC of each way, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5, 2.5), layout="constrained")
    names = [name for name in found if "bytes" not in name]
    axes = drawn.subplots()
    axes.barh(names[::-1], [found[name] for name in names[::-1]])
    axes.set(xlim=(0.5, 1), xlabel="AUC on new customers")
    return drawn


if __name__ == "__main__":
    result = main()
    if len(sys.argv) > 1:
        figure(result).savefig(sys.argv[1])

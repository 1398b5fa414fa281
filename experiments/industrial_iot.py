"""Industrial IoT: networks are cut at the machine, averaged at the plant, and averaged again in the cloud.

    python experiments/industrial_iot.py [FIGURE.png]

Each of twelve machines runs the first layer on its own vibration data and its gateway the rest: activations and
gradients cross that link at every step. Three plants average the joint networks of their machines, and the cloud those
of the plants. With one round at the plant for each in the cloud this is FedAvg on the joint network, whatever the cut;
with five the cloud hears a fifth as often for as many steps. The bytes on the three kinds of link are counted beside.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import optax

import fedjax_sim
from fedjax_sim import aggregation, algorithms, client, models, population, sampling, server
from fedjax_sim.algorithms import split_client, split_loss
from fedjax_sim.types import Algorithm

PLANT_OF = np.repeat([0, 1, 2], [3, 4, 5])
ROWS, SENSORS, STATES, STEPS = 40, 16, 3, 30
NETWORK = models.mlp(input_shape=(SENSORS,), num_outputs=STATES, hidden=(12, 8))
WORK = client.work(num_epochs=1, batch_size=20, shuffle=False)  # an order would follow the place in a plant
LOSS, RATE = models.softmax_cross_entropy, 0.1


def machines() -> Any:
    """Twelve machines: three states with a spectrum each, which every machine hears a little differently."""
    rng = np.random.default_rng(0)
    spectra, found = rng.standard_normal((STATES, SENSORS)), []
    for _ in PLANT_OF:
        y, own = rng.integers(0, STATES, ROWS), 0.5 * rng.standard_normal(SENSORS)
        x = spectra[y] + own + rng.standard_normal((ROWS, SENSORS))
        found.append({"x": np.float32(x), "y": np.int32(y)})
    return population.from_clients(found)


def in_plants(rounds: int) -> Algorithm:
    """Cut at the machine, `rounds` rounds in a plant, then one in the cloud."""
    machine = split_client(split_loss(NETWORK, LOSS, "hidden_0"), optax.sgd(RATE), WORK)
    most = int(np.bincount(PLANT_OF).max())
    mean, step = aggregation.mean(), server.optimizer(optax.sgd(1.0))
    plant = algorithms.federated(sampling.full(most), machine, mean, step, mesh=None).parts
    return algorithms.federated(sampling.full(3), algorithms.as_client_update(plant, rounds, name="plant"), mean, step)


def flat() -> Algorithm:
    """FedAvg of the machines on the joint network, without a cut and without plants."""
    machine = client.local_sgd(models.supervised(NETWORK, LOSS), optax.sgd(RATE), WORK)
    return algorithms.federated(
        sampling.full(len(PLANT_OF)), machine, aggregation.mean(), server.optimizer(optax.sgd(1.0))
    )


def trained(algorithm, data, rounds: int) -> tuple[Any, list[dict]]:
    """(model, record of each round)."""
    start = NETWORK.init(jax.random.key(1))[0]
    state, history = fedjax_sim.run(jax.random.key(0), algorithm, start, data, rounds)
    return algorithm.params(state), [record for record in history.records if "local_loss" in record]


def main() -> dict[str, Any]:
    """Losses by round, bytes by kind of link, and the largest difference to FedAvg at one plant round."""
    data = machines()
    plants, found = population.grouped(data, PLANT_OF), {"losses": {}, "bytes": {}}
    for rounds in (1, 5):
        model, records = trained(in_plants(rounds), plants, STEPS // rounds)
        name = f"{rounds} plant round(s)"
        found["losses"][name] = [record["local_loss"] for record in records]
        links = {"machine - gateway": "split", "machine - plant": "plant", "plant - cloud": ""}
        names = {
            "split": ("split_up_bytes", "split_down_bytes"),
            "plant": ("plant_uplink_bytes", "plant_downlink_bytes"),
        }
        ways = {kind: names.get(prefix, ("uplink_bytes", "downlink_bytes")) for kind, prefix in links.items()}
        found["bytes"][name] = {kind: sum(r[x] for r in records for x in way) for kind, way in ways.items()}
        if rounds == 1:
            one = model
    joint, records = trained(flat(), data, STEPS)
    found["losses"]["FedAvg"] = [record["local_loss"] for record in records]
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), one, joint)
    found["difference to FedAvg"] = max(jax.tree.leaves(gaps))
    for name, sums in found["bytes"].items():
        print(name, {kind: f"{value:,}" for kind, value in sums.items()}, f"loss {found['losses'][name][-1]:.3f}")
    print(f"FedAvg: loss {records[-1]['local_loss']:.3f}; largest difference {found['difference to FedAvg']:.1e}")
    return found


def figure(found: dict[str, Any]):
    """Losses by local epochs and bytes by kind of link, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 2.8), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for name, losses in found["losses"].items():
        style = {"lw": 5, "alpha": 0.4} if name == "FedAvg" else {"lw": 1.5}
        left.plot(np.linspace(0, STEPS, len(losses) + 1)[1:], losses, label=name, **style)
    left.set(xlabel="local epochs", ylabel="loss in training")
    left.legend()
    for i, (name, sums) in enumerate(found["bytes"].items()):
        right.barh(np.arange(3) + 0.4 * i, list(sums.values()), 0.4, label=name)
    right.set(xscale="log", xlabel="bytes", yticks=np.arange(3) + 0.2, yticklabels=list(sums))
    return drawn


if __name__ == "__main__":
    result = main()
    if len(sys.argv) > 1:
        figure(result).savefig(sys.argv[1])

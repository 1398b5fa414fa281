"""Four hospitals, two departments in each: what other columns bring, and what other hospitals bring.

    python experiments/hospitals.py FOLDER [FIGURE.png]

FOLDER holds the four processed.*.data files of UCI Heart Disease. Four ways to learn who is ill: the first department
of each hospital by itself; both departments of a hospital (vertical); the first departments of all hospitals
(horizontal); and both departments of all hospitals, as in experiments/vertical_hospitals.toml. Accuracy is that on each
hospital's own test rows, 230 in all, so a standard error is 0.024. Hospitals differ in how many of their patients are
ill, which a model of one's own knows and a model for all does not; other columns make up for most of that.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import optax

import fedjax_sim
from fedjax_sim import algorithms, models, population, sampling

ROUNDS, RATE, WORK = 50, 0.05, {"num_epochs": 1, "batch_size": 16}
LOSS = models.sigmoid_cross_entropy


def rows_of(clients, id: int) -> dict[str, np.ndarray]:
    """A client's examples, without padding."""
    held = clients.client(np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(held.mask)] for name, leaf in held.examples.items()}


def correct(hospitals: list[dict], tests: list[dict], widths: tuple[int, ...], both: bool) -> int:
    """Right answers on all test rows, of one model of these hospitals; of the first department's columns or of both."""
    own, number = widths[0], len(hospitals)
    if both:
        model = models.vertical_linear(columns=widths, num_outputs=1)
        learn = algorithms.vertical(model, LOSS, sampling.full(number), optax.sgd(RATE), **WORK)
    else:
        model = models.linear(input_shape=(own,), num_outputs=1)
        loss_fn = models.supervised(model, LOSS)
        learn = algorithms.fedavg(loss_fn, sampling.full(number), optax.sgd(RATE), **WORK)
    columns = slice(None) if both else slice(own)
    data = population.from_clients([rows | {"x": rows["x"][:, columns]} for rows in hospitals])
    state, _ = fedjax_sim.run(jax.random.key(0), learn, model.init(jax.random.key(1))[0], data, ROUNDS)
    found = 0
    for test in tests:
        outputs, _ = model.apply(learn.params(state), (), test["x"][:, columns], None, False)
        found += int(((np.asarray(outputs)[:, 0] > 0) == test["y"]).sum())
    return found


def main(folder: str) -> dict[str, float]:
    """Accuracy of each way."""
    data = population.with_parties(population.heart_disease(directory=folder), widths=(9, 20), alignment="keyed")
    hospitals = [rows_of(data.train, id) for id in range(data.train.size)]
    tests, found = [rows_of(data.held_out, id) for id in range(data.held_out.size)], {}
    total = sum(len(test["y"]) for test in tests)
    for departments, both in (("one department", False), ("two departments", True)):
        alone = [correct([h], [t], data.columns, both) for h, t in zip(hospitals, tests, strict=True)]
        found[f"{departments}, one hospital"] = sum(alone) / total
        found[f"{departments}, all hospitals"] = correct(hospitals, tests, data.columns, both) / total
    for name, value in found.items():
        print(f"{name:32} {value:.3f}")
    return found


def figure(found: dict[str, float]):
    """Accuracy of each way, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5, 2.5), layout="constrained")
    axes = drawn.subplots()
    axes.barh(list(found)[::-1], list(found.values())[::-1], xerr=0.024)
    axes.set(xlim=(0.5, 1), xlabel="accuracy on own test rows, ± a standard error")
    return drawn


if __name__ == "__main__":
    result = main(sys.argv[1])
    if len(sys.argv) > 2:
        figure(result).savefig(sys.argv[2])

"""A smart city: three departments hold other columns of the same households, each with a privacy level of its own.

    python experiments/smart_city.py [FIGURE.png]

The energy department knows which households heat with electricity and wants to learn it from all; traffic and health
hold other columns of the same households, and send numbers made of these, once: fixed random features, clipped and
noisy. A bottom that is trained would carry one household into the messages of all, and each further visit would cost
as much again (`privacy.embedding_claim`). Each department chooses its noise, and so its epsilon; the energy department
scales what arrives by the noise that it knows of. The table says what privacy costs.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_sim
from fedjax_sim import algorithms, models, population, privacy, sampling, transform
from fedjax_sim.network.link import link

HOUSEHOLDS, COLUMNS, FEATURES, VISITS, DELTA, CLIP = 20_000, (3, 4, 5), 4, 1, 1e-5, 1.0
NAMES = ("energy", "traffic", "health")
LEVELS = {"no noise": (0.0, 0.0), "lenient": (0.5, 1.0), "strict": (2.0, 4.0)}  # of traffic and of health


def city(rng: np.random.Generator, number: int) -> dict[str, np.ndarray]:
    """Columns of all departments side by side, and the label."""
    x = rng.standard_normal((number, sum(COLUMNS)))
    signal = x[:, 0] + 1.5 * x[:, 3] - x[:, 4] + 1.5 * x[:, 7] + x[:, 8]
    return {"x": np.float32(x), "y": np.int32(signal + rng.logistic(size=number) > 0)}


def departments(levels: tuple[float, ...]) -> models.Model:
    """Energy trains weights of its own features and of what arrives, which it scales by the noise that it knows of."""
    rng, bottoms = np.random.default_rng(1), []
    for width in COLUMNS:
        mixing = jnp.asarray(rng.standard_normal((width, FEATURES)) / np.sqrt(width), jnp.float32)
        bottoms.append([models.layer("fixed", None, lambda x, mixing=mixing: x @ mixing / 2)])
    top = models.layer("weights", lambda key: jnp.zeros((FEATURES * len(COLUMNS), 1)), lambda w, h: h @ w)
    scales = [1 / np.sqrt(1 + (2 * z) ** 2) for z in (0.0, *levels)]

    def join(parts):
        return jnp.concatenate([scale * part for scale, part in zip(scales, parts, strict=True)], axis=1)

    return models.by_party(COLUMNS, bottoms, join, [top])


def trained(levels: tuple[float, ...], rows: dict, test: dict, seed: int = 0) -> float:
    """Accuracy on new households; levels are the noise multipliers of traffic and health."""
    model = departments(levels)
    links = {f"party_{p}": link(forward=transform.local_gaussian(CLIP, z)) for p, z in enumerate(levels, 1)}
    work = {"num_epochs": 1, "batch_size": 50}
    loss = models.sigmoid_cross_entropy
    learn = algorithms.vertical(model, loss, sampling.full(1), optax.sgd(0.2), links=links, **work)
    data = population.from_clients([rows])
    state, _ = fedjax_sim.run(jax.random.key(seed), learn, model.init(jax.random.key(1))[0], data, VISITS)
    outputs, _ = model.apply(learn.params(state), (), test["x"], None, False)
    return float(((np.asarray(outputs)[:, 0] > 0) == test["y"]).mean())


def main(seed: int = 0) -> dict[str, dict[str, float]]:
    """Accuracy and each department's epsilon, by level; households, order and noise are of the seed."""
    rng, found = np.random.default_rng(seed), {}
    rows, test = city(rng, HOUSEHOLDS), city(rng, 10_000)
    for level, multipliers in LEVELS.items():
        found[level] = {"accuracy": trained(multipliers, rows, test, seed)}
        for name, z in zip(NAMES[1:], multipliers, strict=True):
            claim = privacy.embedding_claim(z, visits=VISITS, rows=HOUSEHOLDS, trained=False) if z else None
            found[level][name] = claim.epsilon(DELTA) if claim else float("inf")
        print(level, {name: round(value, 3) for name, value in found[level].items()})
    return found


def figure(found: dict[str, dict[str, float]]):
    """Accuracy by level, with each department's epsilon, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5, 2.8), layout="constrained")
    axes = drawn.subplots()
    told = [
        "\n".join([level, *(f"{name} {values[name]:.2g}" for name in NAMES[1:])]) for level, values in found.items()
    ]
    axes.bar(told, [values["accuracy"] for values in found.values()])
    axes.set(ylim=(0.5, 1), ylabel="accuracy", xlabel=f"epsilon of a household at delta {DELTA:g}")
    return drawn


if __name__ == "__main__":
    result = main()
    if len(sys.argv) > 1:
        figure(result).savefig(sys.argv[1])

"""A digital twin: the state of a machine whose sensor failed, from the models of its neighbours along the line.

    python experiments/digital_twin.py [FIGURE.png]

Forty machines stand along a line. Each measures eight signals and, until its sensor fails, a state: the product of the
signals with parameters that change slowly along the line, and noise. Every machine fits a model of its own rows by
Ditto with coefficient 0, whose shared model is FedAvg's. A twin estimates the state of one machine by the mean of the
own models of its 2r nearest neighbours. Near neighbours are alike and few, so their noise stays; far ones are many and
unlike. The mean squared error of the parameters is

    bias^2 + variance / (2 r),    bias = |mean of the neighbours' parameters - the machine's|,
    variance = the mean of noise^2 trace((X_i' X_i)^-1) over the neighbours.

The table lays this formula over the measurement, averaged over machines and seeds. Beside it is FedAvg's model.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_sim
from fedjax_sim import algorithms, population, sampling

MACHINES, SIGNALS, ROWS, NOISE = 40, 8, 24, 1.0
RADII = (1, 2, 3, 4, 6, 8)


def parameters() -> np.ndarray:
    """[machines, signals], a wave along the line for each signal."""
    place = np.linspace(0, 2 * np.pi, MACHINES, endpoint=False)
    phase = np.linspace(0, np.pi, SIGNALS)
    return np.sin(place[:, None] + phase[None])


def measured_rows(seed: int) -> dict[str, np.ndarray]:
    """The rows of all machines: x [machines, rows, signals] and the state y [machines, rows, 1]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(MACHINES, ROWS, SIGNALS))
    y = np.einsum("irs,is->ir", x, parameters()) + NOISE * rng.normal(size=(MACHINES, ROWS))
    return {"x": np.float32(x), "y": np.float32(y)}


def loss_fn(params, examples, key):
    """Half the squared error of the state."""
    return 0.5 * jnp.square(examples["x"] @ params - examples["y"])


def fitted(rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(own models [machines, signals], FedAvg's model [signals]), trained until they stay."""
    machines = population.from_clients([{name: x[i] for name, x in rows.items()} for i in range(MACHINES)])
    algorithm = algorithms.ditto(loss_fn, sampling.full(MACHINES), optax.sgd(0.3), coefficient=0.0, num_steps=20)
    state, _ = fedjax_sim.run(jax.random.key(0), algorithm, jnp.zeros(SIGNALS), machines, 20)
    ids = jnp.arange(MACHINES)
    own = algorithm.evaluated.personal(state, ids)
    return np.asarray(own), np.asarray(algorithm.params(state))


def neighbours(machine: int, radius: int) -> np.ndarray:
    """The 2r nearest others; the line is closed."""
    return (machine + np.r_[-radius:0, 1 : radius + 1]) % MACHINES


def expected_error(rows: dict[str, np.ndarray], radius: int) -> float:
    """The formula's mean squared error of a twin's parameters, averaged over machines."""
    truth = parameters()
    variances = NOISE**2 * np.array([np.trace(np.linalg.inv(x.T @ x)) for x in np.float64(rows["x"])])
    found = []
    for machine in range(MACHINES):
        others = neighbours(machine, radius)
        bias = truth[others].mean(0) - truth[machine]
        found.append(bias @ bias + variances[others].mean() / others.size)
    return float(np.mean(found))


def main(seeds: int = 10) -> dict[str, np.ndarray]:
    """Squared errors of the parameters, [seeds, radii]: measured, by the formula, and of FedAvg's model [seeds]."""
    truth, found = parameters(), {"measured": [], "formula": [], "FedAvg": []}
    for seed in range(seeds):
        rows = measured_rows(seed)
        own, shared = fitted(rows)
        twins = [np.stack([own[neighbours(i, radius)].mean(0) for i in range(MACHINES)]) for radius in RADII]
        found["measured"].append([np.square(twin - truth).sum(1).mean() for twin in twins])
        found["formula"].append([expected_error(rows, radius) for radius in RADII])
        found["FedAvg"].append(np.square(shared[None] - truth).sum(1).mean())
    found = {name: np.array(values) for name, values in found.items()}
    for i, radius in enumerate(RADII):
        measured, formula = (found[name][:, i] for name in ("measured", "formula"))
        error = measured.std(ddof=1) / np.sqrt(seeds)
        print(f"{2 * radius:3} neighbours: {measured.mean():.3f} ± {error:.3f}, formula {formula.mean():.3f}")
    print(f"FedAvg's model: {found['FedAvg'].mean():.3f}")
    return found


def figure(found: dict[str, np.ndarray]):
    """Errors against the number of neighbours, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5, 3), layout="constrained")
    axes = drawn.subplots()
    counts = 2 * np.array(RADII)
    axes.plot(counts, found["formula"].mean(0), label="formula")
    axes.plot(counts, found["measured"].mean(0), "o", label="measured")
    axes.axhline(found["FedAvg"].mean(), color="black", linestyle="--", label="FedAvg's model")
    axes.set(xlabel="neighbours whose models are averaged", ylabel="squared error", yscale="log")
    axes.legend()
    return drawn


if __name__ == "__main__":
    result = main()
    if len(sys.argv) > 1:
        figure(result).savefig(sys.argv[1], dpi=150)

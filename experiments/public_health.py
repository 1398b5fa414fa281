"""Public health: how many people in each region have a disease, and how old they are, without anybody's record.

    python experiments/public_health.py [FIGURE.png]

A hundred thousand phones hold one person's record each: a region, an age and whether the person has the disease. The
health office wants the incidence by region and the quartiles of age. Phones send counts with a share of discrete
Gaussian noise on them, a modular sum adds them, and each question states what it costs in epsilon. The table compares
the answers with those of the pooled records, which nobody holds, at two levels of noise.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_sim
from fedjax_sim import aggregation, algorithms, population, privacy, sampling, transform
from fedjax_sim.population.seeds import generated_client_key, seed_words
from fedjax_sim.prng import stream
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.types import ClientData

PEOPLE, REGIONS, DELTA, BISECTIONS = 100_000, 20, 1e-6, 8
LEVELS = {"weak": 10.0, "strong": 100.0}  # noise multipliers
QUARTILES = (0.25, 0.5, 0.75)


def _person(parameters, id):
    """One record: x = (region, age), y = 1 for the disease. Older people have it more often, and some regions too."""
    key = generated_client_key(parameters, id)
    # Cities have more people than villages.
    region = jnp.floor(REGIONS * jax.random.uniform(stream(key, "region")) ** 1.5)
    age = 100 * jax.random.beta(stream(key, "age"), 2.0, 2.5)
    rate = 0.02 + 0.002 * region + 0.001 * age
    has_disease = jax.random.uniform(stream(key, "disease")) < rate
    x = jnp.stack([region, age])[None]
    return ClientData({"x": x, "y": has_disease.astype(jnp.int32)[None]}, jnp.ones(1, bool))


def people(seed: int, count: int = PEOPLE):
    """The population of phones."""
    return population.generated(count, _person, {"seed": seed_words(seed, 1)})


def private_parts(multiplier: float, clip_norm: float, count: int) -> dict:
    """Noise in shares on each phone's message, and the sum that a server may see."""
    return {
        "transform": transform.discrete_gaussian_mechanism(clip_norm, multiplier, count),
        "aggregator": aggregation.modular_sum(float(count)),
    }


def answered(algorithm, phones, num_rounds: int, dimension: int, seed: int) -> tuple[dict, float]:
    """(the estimate, the epsilon that it costs)."""
    state, _ = fedjax_sim.run(jax.random.key(seed), algorithm, (), phones, num_rounds)
    mechanism = privacy.mechanism_of(algorithm, dimension=dimension)
    epsilon = privacy.account(mechanism, num_rounds, DELTA).epsilon
    return jax.device_get(algorithm.params(state)), epsilon


def incidence(counts: np.ndarray) -> np.ndarray:
    """The share of each region's people who have the disease, from counts [regions, 2]."""
    return counts[:, 1] / np.maximum(counts.sum(1), 1e-12)


def main(seed: int = 0, count: int = PEOPLE) -> dict[str, dict]:
    """By level of noise: the largest error of an incidence, that of a quartile of age in years, and both epsilons."""
    phones, everybody = people(seed, count), sampling.full(count)
    records = jax.jit(jax.vmap(phones.client))(jnp.arange(count, dtype=jnp.int32)).examples
    x, y = np.asarray(records["x"][:, 0]), np.asarray(records["y"][:, 0])
    pooled = np.histogram2d(x[:, 0], y, [np.arange(REGIONS + 1), np.arange(3)])[0]
    quartiles = np.quantile(x[:, 1], QUARTILES, method="inverted_cdf")
    by_region = {"num_categories": 2, "region_column": 0, "num_regions": REGIONS}
    of_age = {"probabilities": QUARTILES, "low": 0.0, "high": 100.0, "column": 1}
    found = {}
    for level, multiplier in LEVELS.items():
        counting = algorithms.histogram(everybody, **by_region, **private_parts(multiplier, 1.0, count))
        cells, epsilon = answered(counting, phones, 1, 2 * REGIONS, seed)
        halving = algorithms.quantiles(everybody, **of_age, **private_parts(multiplier, 1.5, count))
        ages, epsilon_of_ages = answered(halving, phones, BISECTIONS, len(QUARTILES), seed)
        found[level] = {
            "incidence": incidence(cells["counts"]),
            "true_incidence": incidence(pooled),
            "incidence_error": float(np.abs(incidence(cells["counts"]) - incidence(pooled)).max()),
            "age_error": float(np.abs(ages["quantiles"] - quartiles).max()),
            "incidence_epsilon": epsilon,
            "age_epsilon": epsilon_of_ages,
        }
        errors = {name: round(found[level][name], 4) for name in ("incidence_error", "age_error")}
        print(level, errors | {name: shown_up(found[level][name]) for name in ("incidence_epsilon", "age_epsilon")})
    return found


def figure(found: dict[str, dict]):
    """Incidence by region at each level, beside the truth, as a matplotlib figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 3), layout="constrained")
    axes = drawn.subplots()
    regions = np.arange(REGIONS)
    for offset, (level, values) in enumerate(found.items()):
        label = f"{level} noise, epsilon {shown_up(values['incidence_epsilon'], 2)}"
        axes.plot(regions + 0.2 * (offset - 0.5), values["incidence"], "o", label=label)
    axes.step(regions, next(iter(found.values()))["true_incidence"], where="mid", color="black", label="pooled records")
    axes.set(xlabel="region", ylabel="share with the disease")
    axes.legend()
    return drawn


if __name__ == "__main__":
    answers = main()
    if len(sys.argv) > 1:
        figure(answers).savefig(sys.argv[1], dpi=150)

"""This module draws clients whose rows come from a mixture of Gaussians with frequent and rare components."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.population import generated
from fedjax_sim.population.seeds import generated_client_key, seed_words
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, ClientData
from fedjax_sim.validate import NonNegative, NonNegativeInt, PositiveInt

MOST_NUMBERS = 1 << 26  # of the table of centers


def _client(parameters: Any, id: Array) -> ClientData:
    """Generates a client of `mixture`: y is the first component whose cumulative share is above u, uniform in [0, 1).

    Then x = c_y + spread e, with e ~ N(0, I).

    Args:
      parameters: "centers" c [K, d], "cumulative" [K] shares that rise to 1, "spread" [], "mask" [n] bool, and "seed".
      id: [] int32.

    Returns: `ClientData` with x [n, d] and y [n] int32 in [0, K).
    """
    key = generated_client_key(parameters, id)
    centers = jnp.asarray(parameters["centers"])
    num_rows = parameters["mask"].shape[0]
    uniform = jax.random.uniform(stream(key, "components"), (num_rows,))
    # Rounding of the last cumulative share must not lead beyond the last component.
    y = jnp.searchsorted(parameters["cumulative"], uniform, side="right").clip(0, centers.shape[0] - 1)
    noise = jax.random.normal(stream(key, "features"), (num_rows, centers.shape[1]))
    x = centers[y] + parameters["spread"] * noise
    return ClientData({"x": x, "y": y.astype(jnp.int32)}, jnp.asarray(parameters["mask"]))


@validate.named_arguments
def mixture(
    *,
    num_clients: PositiveInt = 1_000_000,
    num_components: PositiveInt = 10,
    dimension: PositiveInt = 2,
    examples_per_client: PositiveInt = 1,
    spread: NonNegative = 0.05,
    exponent: NonNegative = 0.0,
    test_examples: PositiveInt = 1_000,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Draws rows from a mixture of Gaussians: a component y of Zipf's law, and x ~ N(c_y, spread^2 I).

    Component y in 0, ..., K - 1 has the share (y + 1)^-exponent / sum_z (z + 1)^-exponent of the rows, to 2^-24: rarer
    ones than 10^-5 are off by percents. Its center c_y
    is uniform in [0, 1]^d. A client is a pure function of its id, so that any number of clients takes no memory.
    Statistics have answers here: centers for `kmeans`, frequent labels for `heavy_hitters`, shares for `histogram`.

    Args:
      num_clients: N, up to 2^31 - 1.
      num_components: K.
      dimension: d.
      examples_per_client: n.
      spread: standard deviation >= 0 of a coordinate of a row around its center.
      exponent: >= 0; 0 gives all components the same share.
      test_examples: rows of the same mixture.
      seed: of all draws.

    Returns: `FederatedData` of the task "classification". `train.parameters` holds `centers` [K, d] and `cumulative`
      [K], the cumulative shares.

    Guarantees: labels and features follow the stated distribution
    (tests/population/datasets/test_mixture.py::test_rows_follow_the_stated_mixture).

    >>> data = mixture(num_clients=1_000_000_000, num_components=3, examples_per_client=2)
    >>> jax.jit(data.train.client)(np.int32(999_999_999)).examples["x"].shape
    (2, 2)
    """
    hint = "Take fewer components, or a smaller dimension."
    validate.integer("num_components * dimension", num_components * dimension, 1, MOST_NUMBERS, hint=hint)
    rng = np.random.default_rng([seed, 0])
    centers = rng.uniform(size=(num_components, dimension)).astype(np.float32)
    weights = np.arange(1, num_components + 1, dtype=np.float64) ** -exponent
    shares = weights / weights.sum()
    parameters = {
        "centers": centers,
        "cumulative": np.cumsum(shares).astype(np.float32),
        "spread": np.float32(spread),
        "mask": np.ones(examples_per_client, bool),
        "seed": seed_words(seed, 1),
    }
    y = rng.choice(num_components, size=test_examples, p=shares).astype(np.int32)
    x = centers[y] + spread * rng.normal(size=(test_examples, dimension))
    test = {"x": x.astype(np.float32), "y": y}
    train = generated(num_clients, _client, parameters, learned=())
    return FederatedData(
        train=train,
        test=test,
        held_out=None,
        input_shape=(dimension,),
        num_outputs=num_components,
        task="classification",
        name="mixture",
    )

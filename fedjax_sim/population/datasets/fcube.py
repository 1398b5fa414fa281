"""This module draws FCUBE, points in a cube whose four clients see other regions and the same share of labels."""

from __future__ import annotations

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData, from_sites
from fedjax_sim.population.partition import generator
from fedjax_sim.validate import NonNegativeInt, PositiveInt

OCTANTS = np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])  # of the points with label 0, by client


@validate.named_arguments
def fcube(
    *, examples_per_client: PositiveInt = 1_000, test_examples: PositiveInt = 1_000, seed: NonNegativeInt = 0
) -> FederatedData:
    """Draws points x in the cube [-1, 1]^3, whose label says on which side of the plane x_1 = 0 they lie.

    The planes x_1 = 0, x_2 = 0 and x_3 = 0 cut the cube into eight parts. Each of four clients has the points of two
    parts that are symmetric about the origin, half of its points in each. So clients have other features and the same
    labels, which is feature skew.

    Args:
      examples_per_client: n, of each client. Points are uniform in their part; n - n // 2 of them have label 0.
      test_examples: number of test points, uniform in the cube. Held-out client i has those in the parts of client i.
      seed: of the points.

    Returns: `FederatedData` of the task "binary" with x [n, 3] float32 and y = 1 where x_1 < 0.

    Guarantees: clients have their parts and equally many labels, and test points are uniform
    (tests/population/datasets/test_fcube.py::test_clients_have_opposite_parts).

    References: Li, Diao, Chen, He, Federated learning on non-IID data silos: an experimental study, 2022, section 4.2.

    >>> data = fcube()
    >>> data.train.size, data.input_shape, data.task
    (4, (3,), 'binary')
    """
    validate.fits_in_memory("examples_per_client", 4 * examples_per_client * 32, 2**36, hint="Take fewer.")
    validate.fits_in_memory("test_examples", test_examples * 32, 2**36, hint="Take fewer.")
    rng = generator("fcube", seed)
    train = {}
    for i, octant in enumerate(OCTANTS):
        y = np.arange(examples_per_client) % 2
        x = (1 - rng.random((examples_per_client, 3))) * octant * (1 - 2 * y[:, None])  # in (0, 1], so not on a plane
        train[f"f_{i}"] = {"x": x.astype(np.float32), "y": y}
    x = ((1 - rng.random((test_examples, 3))) * rng.choice([-1, 1], (test_examples, 3))).astype(np.float32)
    y = (x[:, 0] < 0).astype(int)
    owner = (x[:, 1:] * (1 - 2 * y[:, None]) < 0) @ [2, 1]
    test = {f"f_{i}": {"x": x[owner == i], "y": y[owner == i]} for i in range(len(OCTANTS))}
    data = from_sites(train, test, task="binary", num_outputs=1, name="fcube", learned=())
    return data._replace(client_names=None, held_out_names=None)  # generated clients are known by their numbers

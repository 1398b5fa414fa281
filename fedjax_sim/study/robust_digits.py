"""This module has what the studies of robust rules share: rules and attacks by name, and clients of the digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import adversary, aggregation, client, engine, metrics, models, population, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import init_key
from fedjax_sim.running import kept_results
from fedjax_sim.study.switched import Attack, attack_of_index, drawn_clients, rule_of_index
from fedjax_sim.types import Aggregator, Array

EXAMPLES = 40  # that each client has
BATCH = 20  # examples in a minibatch
# Each function makes the aggregator for m messages, of which f come from attackers.
RULES: Mapping[str, Callable[[int, int], Aggregator]] = {
    "mean": lambda m, f: aggregation.trimmed_mean(0),
    "median": lambda m, f: aggregation.median(),
    "trimmed mean": lambda m, f: aggregation.trimmed_mean(f),
    "Krum": lambda m, f: aggregation.krum(f),
    "multi-Krum": lambda m, f: aggregation.krum(f, max(m - f - 2, 1)),
    "geometric median": lambda m, f: aggregation.geometric_median(),
    "centred clipping": lambda m, f: aggregation.centered_clipping(0.5),
    "mixing, trimmed mean": lambda m, f: aggregation.nearest_neighbour_mixing(aggregation.trimmed_mean(f), f),
}
# "none" scales the attackers' honest messages by one.
ATTACKS: Mapping[str, Attack] = {
    "none": adversary.scaled(1.0),
    "sign flip": adversary.sign_flip(),
    "noise": adversary.gaussian_noise(1.0),
    "inner product": adversary.inner_product(2.0),
    "ALIE": adversary.alie(1.5),
    "mimic": adversary.mimic(),
    "Fang": adversary.fang(),
    "min-max": adversary.min_max(),
    "min-sum": adversary.min_sum(),
}


class RobustDigits:
    """A few clients of the digits that all take part in every round and train a linear model."""

    def __init__(self, size: int, alpha: float, seed: int):
        """Makes the clients.

        Args:
          size: m.
          alpha: the parameter of the clients' Dirichlet label shares; small values give unlike clients.
          seed: decides who holds which examples.
        """
        self.data = population.digits(
            num_clients=size, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0, seed=seed
        )
        self.model = models.linear(input_shape=self.data.input_shape, num_outputs=self.data.num_outputs)
        self.loss_fn = models.supervised(self.model, models.default_loss(self.data.task))
        self.size = size

    def accuracies(
        self,
        key: Array,
        rules: Sequence[Aggregator],
        attacks: Sequence[Attack],
        points: Sequence[tuple[int, int, int]],
        *,
        num_steps: int,
        learning_rate: float,
        num_rounds: int,
        num_runs: int,
    ) -> np.ndarray:
        """Measures test accuracies after the last round of each point of a grid of rules and attacks.

        All points are one compiled program and run one after the other on each device.

        Args:
          key: the random key of all runs.
          rules: aggregators.
          attacks: what attackers send.
          points: (rule, attack, attackers): an index of `rules`, an index of `attacks`, and how many clients attack.
          num_steps: local steps of each client in a round.
          learning_rate: the learning rate of local steps.
          num_rounds: T.
          num_runs: runs of each point.

        Returns: [points, runs]. Run r has the same first model, minibatches and order in which clients become
          attackers at every point.

        Raises: FloatingPointError if an honest update was not finite.
        """
        work = client.work(num_steps=num_steps, batch_size=BATCH, weighting="uniform")
        local_training = client.local_sgd(self.loss_fn, optax.sgd(learning_rate), work)
        server_step = server.optimizer(optax.sgd(1.0))
        test = jax.tree.map(jnp.asarray, self.data.test)

        def run_point(args):
            key, (rule, attack, attackers) = args
            aggregator = adversary.corrupted(
                rule_of_index(rules, rule), attack_of_index(attacks, attack), drawn_clients(key, self.size, attackers)
            )
            algorithm = federated(sampling.full(self.size), local_training, aggregator, server_step, mesh=None)

            def advance(t, carry):
                state, num_lost = carry
                state, info = algorithm.step(jax.random.fold_in(key, t), state, self.data.train)
                return state, num_lost + info["dropped_clients"]

            state = algorithm.init(init_key(key), self.model.init(init_key(key))[0], self.data.train)
            state, num_lost = jax.lax.fori_loop(0, num_rounds, advance, (state, jnp.int32(0)))
            return metrics.pooled(self.loss_fn, algorithm.params(state), test)["accuracy"], num_lost

        # Keys repeat for every point, so that points differ in nothing but rule, attack and number of attackers.
        keys = jnp.tile(jax.random.split(key, num_runs), len(points))
        values = tuple(jnp.repeat(jnp.asarray(column, jnp.int32), num_runs) for column in zip(*points, strict=True))
        accuracies, num_lost = jax.device_get(_over_devices(run_point, (keys, values)))
        if num_lost.any():
            raise FloatingPointError(f"{int(num_lost.sum())} updates were not finite: lower the learning rate.")
        return np.asarray(accuracies, np.float64).reshape(len(points), num_runs)


def _over_devices(run_row: Callable, rows: Any) -> Any:
    """Calls `run_row` for each row, with an equal share of the rows on each device.

    Rows of one device follow one another. A vmap would compute all branches of the switches inside for every row.

    Args:
      run_row: a row -> its results, traced.
      rows: a pytree of arrays [rows, ...].

    Returns: the results, with leaves [rows, ...] in the order of the rows.
    """
    devices = jax.local_devices()
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    # Rows from the start fill up the last shares; their results are cut off below.
    padded_rows = jnp.arange(-(-num_rows // len(devices)) * len(devices)) % num_rows
    split = jax.sharding.PartitionSpec("points")
    sharded = jax.shard_map(
        lambda rows: jax.lax.map(run_row, rows), mesh=jax.sharding.Mesh(np.array(devices), ("points",)),
        in_specs=(split,), out_specs=split, check_vma=False,
    )  # fmt: skip
    run = jax.jit(sharded, compiler_options=engine.compiler_options())
    results = kept_results.call(run, jax.tree.map(lambda x: x[padded_rows], rows))
    return jax.tree.map(lambda x: x[:num_rows], results)

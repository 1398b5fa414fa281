"""Run as a script: the digest of a small run for 1, 2, 4 and 8 virtual devices, one JSON line each."""

from __future__ import annotations

import json
import sys

import jax
import optax

from fedjax_sim import aggregation, client, engine, server, transform
from tests.laws import problems as p


def main(device_counts, num_slots: int) -> None:
    """Prints {"devices": D, "digest": ...}."""
    jax.config.update("jax_num_cpu_devices", max(device_counts))
    jax.config.update("jax_numpy_rank_promotion", "raise")
    ids = list(range(num_slots))

    def blurred(key, update):
        return jax.tree.map(lambda x: x + 0.01 * jax.random.normal(key, x.shape), update)

    for count in device_counts:
        work = client.local_sgd(p.mlp_loss, optax.sgd(p.RATE), num_epochs=1, batch_size=p.BATCH)
        federation = p.Federation(
            num_slots=num_slots,
            plan=engine.Plan(lanes=4, chunk=8),
            mesh=engine.device_mesh(count),
            client=work,
            transform=transform.stateless(blurred),
            aggregator=aggregation.mean(),
            server=server.optimizer(optax.sgd(1.0, momentum=0.5)),
        )
        outcome = p.outcome(*federation.run(ids, params=p.mlp_params(), num_rounds=3))
        print(json.dumps({"devices": count, "digest": p.digest(outcome)}), flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[2].split(",")], int(sys.argv[1]))

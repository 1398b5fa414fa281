"""Run as a script: the digest of a small run for 1, 2, 4 and 8 virtual devices, one JSON line each; or of its noise."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, engine, server, transform
from fedjax_sim.transform.matrix import square_root_coefficients
from fedjax_sim.types import ClientUpdate, Report
from tests.laws import problems as p


def main(device_counts, num_slots: int) -> None:
    """Prints {"devices": D, "digest": ...}."""
    ids = list(range(num_slots))

    def blurred(key, update):
        return jax.tree.map(lambda x: x + 0.01 * jax.random.normal(key, x.shape), update)

    for count in device_counts:
        work = client.local_sgd(p.mlp_loss, optax.sgd(p.RATE), client.work(num_epochs=1, batch_size=p.BATCH))
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


def side_by_side(members):
    """Each member acts on the leaf of its name."""

    def on_client(key, update, state, memory):
        done = {name: member.on_client(key, update[name], state[name], ()) for name, member in members.items()}
        measured = {f"{name} {what}": mean for name in done for what, mean in done[name][2].items()}
        return {name: done[name][0] for name in done}, memory, measured

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        done = {}
        for i, (name, member) in enumerate(members.items()):
            own = {what.removeprefix(f"{name} "): mean for what, mean in measured.items() if what.startswith(name)}
            here = jax.random.fold_in(key, i)
            done[name] = member.on_server(here, cohort, aggregate[name], state[name], own, sensitivity)
        metrics = {f"{name} {what}": value for name in done for what, value in done[name][2].items()}
        return {name: x[0] for name, x in done.items()}, {name: x[1] for name, x in done.items()}, metrics

    return transform.identity()._replace(
        init=lambda spec: {name: member.init(spec[name]) for name, member in members.items()},
        on_client=on_client,
        on_server=on_server,
    )


def noise(device_counts, width: int) -> None:
    """Prints {"devices": D, "digest": ..., "levels": {mechanism: chi-square at 1, 0.99, 1.01 of its noise}}.

    Four rounds of ten clients who send zeros; the correlated noise is taken back to the independent draws behind it.
    """
    clip_norm, multiplier, size, rounds, bands = 0.5, 3.0, 10, 4, 3
    members = {
        "bfloat16": transform.gaussian_mechanism(clip_norm, multiplier),
        "central": transform.gaussian_mechanism(clip_norm, multiplier),
        "correlated": transform.matrix_mechanism(clip_norm, multiplier, num_rounds=rounds, bands=bands),
        "shares": transform.distributed_gaussian(clip_norm, multiplier, size),
    }
    moved = {name: multiplier * clip_norm / size for name in members}
    moved["correlated"] *= members["correlated"].facts.noise.details["sensitivity"]
    start = {name: jnp.zeros(width) for name in members} | {"bfloat16": jnp.zeros(rounds * width, jnp.bfloat16)}

    def apply(key, broadcast, state, data):
        return Report(jax.tree.map(jnp.zeros_like, broadcast), jnp.float32(1), {}), state

    def run(count):
        federation = p.Federation(
            plan=engine.Plan(lanes=2, chunk=2 if count > 1 else 4),
            mesh=engine.device_mesh(count),
            client=ClientUpdate(lambda params: (), apply),
            transform=side_by_side(members),
            aggregator=aggregation.fixed_mean(float(size)),
            server=server.optimizer(optax.sgd(1.0)),
        )
        algorithm, who, data = federation.algorithm, p.cohort(p.COHORT), p.ragged()

        def one(state, key):
            state, info = algorithm.step(key, state._replace(sampler=who), data)
            return state, (algorithm.params(state), info)

        keys = jax.random.split(jax.random.key(1), rounds)
        return jax.jit(lambda state: jax.lax.scan(one, state, keys))(federation.init(start))  # compiled once

    for count in device_counts:
        state, (models, infos) = jax.device_get(run(count))
        draws = {name: np.diff(np.float64(models[name]), axis=0, prepend=0) for name in members}
        draws["bfloat16"] = draws["bfloat16"][:1]  # a longer sum is rounded more than noise may be off
        factors = square_root_coefficients(bands)
        fresh = [sum(c * draws["correlated"][t - j] for j, c in enumerate(factors[: t + 1])) for t in range(rounds)]
        draws["correlated"] = np.array(fresh)
        levels = {
            name: [((draws[name] / (factor * moved[name])) ** 2).mean() for factor in (1, 0.99, 1.01)]
            for name in members
        }
        record = {"devices": count, "digest": p.digest((models, p.outcome(state, infos))), "levels": levels}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    what, number, counts = sys.argv[1], int(sys.argv[2]), [int(x) for x in sys.argv[3].split(",")]
    jax.config.update("jax_num_cpu_devices", max(counts))
    jax.config.update("jax_numpy_rank_promotion", "raise")
    {"run": main, "noise": noise}[what](counts, number)

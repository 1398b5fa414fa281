"""The main job against a bare hand-written loop.

`fedjax_sim.run` with everything on (sampling, exact sums, dropped-client checks, metrics, log, checkpoints) takes turns
with a jitted JAX loop of the same mathematics, written by hand and given every advantage: cohorts (of the digits also
the minibatches) drawn beforehand, float sums, no masks where clients are equal, no checks, the loss as its only metric,
and its best form over layouts (unrolled single clients, vmapped chunks) and devices. Two jobs: an MLP 60-128-10 with
1,000 of 2,000 clients a round and 2 local steps of 10, and `fedjax-sim run` without a config (digits, 100,000 clients
of 20 to 60 examples, 1,000 a round, 5 steps of 10). Both draw their minibatches without replacement. NumPy trains the
MLP's clients one after the other. Other frameworks train the same MLP in `rivals.json`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import baselines, harness, side_by_side
from experiments.benchmarks.side_by_side import Other
from experiments.benchmarks.workloads import workload


def measure(quick: bool = False) -> dict:
    """Both jobs."""
    work = workload("mlp", **({"cohort_size": 40, "num_clients": 80} if quick else {}))
    rounds, passes, lanes = (2, 2, (1,)) if quick else (20, 11, (1, 2, 4, 8))
    numpy = {"plain NumPy loop over the clients": Other(numpy_round(work), 1, 1)}
    rows, ours, theirs, ends = side_by_side.against_loops(
        work, rounds=rounds, passes=passes, lanes=lanes, extra=numpy, title="MLP"
    )
    mine = ours.median / rounds
    bare = min(seconds for name, seconds in theirs.items() if name.startswith("bare"))
    ratios = [
        harness.ratio("MLP: time against the best bare loop", mine / bare, at_most=1.1),
        harness.ratio("MLP: speed against NumPy", theirs["plain NumPy loop over the clients"] / mine),
        harness.ratio("MLP: speed against one vmap over the cohort", _of(theirs, "one vmap") / mine),
    ]
    digits_rows, digits_ratio = _digits(quick)
    goal = "at most 1.10 times the best bare loop's time (the same job, in turns)."
    notes = [
        f"MLP: {rounds} rounds a turn; the final loss of ours after {rounds * (passes + 2)} rounds is "
        f"{ends['last_loss']:.4f}.",
        "A turn of ours ends with a checkpoint on disk; one of a bare loop does not.",
    ]
    return harness.result("P0", "the main job", goal=goal, rows=rows + digits_rows, ratios=[*ratios, digits_ratio],
                          notes=notes)  # fmt: skip


def _of(seconds: dict[str, float], start: str) -> float:
    return min(value for name, value in seconds.items() if name.startswith(start))


def _digits(quick: bool) -> tuple[list[dict], dict]:
    """Measures `fedjax-sim run` as it comes, beside the same mathematics by hand.

    Args:
      quick: a tenth of the clients and two rounds, to see that everything runs.

    Returns: (rows in clients a second, the ratio of seconds a round to those of the best loop).
    """
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import load

    small = ["data.num_clients=400", "sampler.cohort_size=40"] if quick else []
    config = load(None, small)
    job, options = build(config), config.resolved()
    m, rounds, passes = options["sampler"]["cohort_size"], *((2, 2) if quick else (10, 9))
    rng, data = np.random.default_rng(0), job.data.train
    ids = [rng.choice(data.size, m, replace=False) for _ in range(rounds)]
    ids, client = jnp.asarray(np.stack(ids), jnp.int32), _ragged_client(job, options)
    rows, valid = _batches(data, options, rng)
    table = jax.tree.map(jnp.asarray, (data.table, rows, valid, np.asarray(data.sizes)))
    others = {}
    for lanes in (1,) if quick else (1, 4, 8, 16):
        for devices in sorted({1, len(jax.devices())} if lanes == 1 else {len(jax.devices())}):
            loop = baselines.hand_written(client, lanes=lanes, devices=devices, num_rounds=rounds)
            layout = "one client at a time" if lanes == 1 else f"vmap of {lanes}"
            name = f"bare jitted loop, {layout}, {devices} device{'s' * (devices > 1)}"
            others[name] = Other(lambda f=loop: f(job.key, job.params, table, ids), rounds, devices)
    ours, theirs, _ = side_by_side.take_turns(job.algorithm, job.params, data, others, rounds=rounds, passes=passes)
    cores = len(jax.devices())
    rows = [harness.row("digits: fedjax_sim.run", ours, "clients/s", per=m * rounds, ours=True, cores=cores)]
    for name, other in others.items():
        rows.append(harness.row(f"digits: {name}", theirs[name], "clients/s", per=m * rounds, cores=other.cores))
    bare = side_by_side.best(theirs, others)
    return rows, harness.ratio("digits: time against the best bare loop", ours.median / rounds / bare, at_most=1.1)


def _batches(data, options: dict, rng) -> tuple[np.ndarray, np.ndarray]:
    """Table rows [N, steps, b] of each client's minibatches, and which are real: drawn before the clock starts."""
    batch, steps = options["algorithm"]["batch_size"], options["algorithm"]["num_steps"]
    offsets, indices, counts = (np.asarray(x) for x in (data.offsets, data.indices, data.sizes))
    rows, valid = np.zeros((data.size, steps, batch), np.int32), np.zeros((data.size, steps, batch), bool)
    for id in range(data.size):
        own, per_epoch = indices[offsets[id] : offsets[id + 1]], -(-counts[id] // batch)
        order = own
        for step in range(steps):
            order = rng.permutation(own) if step % per_epoch == 0 else order
            chosen = order[step % per_epoch * batch :][:batch]
            rows[id, step, : len(chosen)], valid[id, step, : len(chosen)] = chosen, True
    return rows, valid


def _ragged_client(job, options: dict):
    """Makes the main job's client by hand: its minibatches are given, partial ones masked; weighed by examples.

    A step is w <- w - rate (mean of the gradients of a minibatch's valid rows).

    Args:
      job: the built experiment, whose loss is used.
      options: the resolved config, with the learning rate and K local steps.

    Returns: (params, data, key, id) -> (update, mean loss of the K steps, number of examples). `data` is (table of all
      examples, rows [N, K, B], masks [N, K, B], counts [N]).
    """
    rate, steps = options["client_optimizer"]["learning_rate"], options["algorithm"]["num_steps"]

    def client(params, data, key, id):
        table, rows, masks, counts = data
        local, total = params, 0.0
        for step in range(steps):
            valid, chosen = masks[id, step], rows[id, step]
            x, y = table["x"][chosen], table["y"][chosen]

            def mean_loss(p, x=x, y=y, valid=valid):
                return jnp.where(valid, job.loss_fn(p, {"x": x, "y": y}, None)["loss"], 0).sum() / valid.sum()

            loss, gradient = jax.value_and_grad(mean_loss)(local)
            local = jax.tree.map(lambda p, g: p - rate * g, local, gradient)
            total += loss / steps
        return jax.tree.map(jnp.subtract, local, params), total, counts[id].astype(jnp.float32)

    return client


def numpy_round(work):
    """One round of the MLP in NumPy, client after client; returns the new parameters."""
    x, y = (np.asarray(a).reshape(work.data.size, -1, *a.shape[1:]) for a in work.arrays)
    start = jax.device_get(work.params)
    before_round = [start[layer][part] for layer in ("hidden_0", "output") for part in ("kernel", "bias")]
    rng, rate, b = np.random.default_rng(0), np.float32(work.learning_rate), work.batch_size
    one_hot = np.eye(before_round[3].size, dtype=np.float32)

    def run():
        change = [np.zeros_like(old) for old in before_round]
        for id in rng.choice(work.data.size, work.cohort_size, replace=False):
            w, c, v, d = (old.copy() for old in before_round)
            order = rng.permutation(x.shape[1])
            for step in range(work.num_steps):
                rows = order[step * b : (step + 1) * b]
                xb, target = x[id, rows], one_hot[y[id, rows]]
                before = xb @ w + c
                h = np.maximum(before, 0)
                z = h @ v + d
                p = np.exp(z - z.max(1, keepdims=True))
                dz = (p / p.sum(1, keepdims=True) - target) / np.float32(b)
                dh = (dz @ v.T) * (before > 0)
                v -= rate * (h.T @ dz)
                d -= rate * dz.sum(0)
                w -= rate * (xb.T @ dh)
                c -= rate * dh.sum(0)
            for total, new, old in zip(change, (w, c, v, d), before_round, strict=True):
                total += new - old
        return [old + total / work.cohort_size for old, total in zip(before_round, change, strict=True)]

    return run


def plot(axes, result: dict) -> None:
    """Client updates a second."""
    from experiments.benchmarks.report import bars

    bars(axes, result["rows"])

"""The same bits for any device count, order, padding and chunk; 1e-6 for other lanes; symmetry of the weights."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import client, engine
from tests.laws import laws, problems as p

ROOT = pathlib.Path(__file__).resolve().parents[2]


def on_devices(what: str, number: int, counts: str) -> dict[int, dict]:
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.devices", what, str(number), counts],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["devices"]: record for record in records}


@pytest.mark.full
@pytest.mark.parametrize("counts", ["1,8", pytest.param("1,2,4,8", marks=pytest.mark.full)])
def test_same_bits_on_1_2_4_8_devices(counts):
    """Catches a sum that depends on the mesh, a gradient summed over devices, and lanes that shrink with it.

    13 slots on 8 devices leave some devices nothing but padding; an MLP, server momentum, noise by client.
    """
    found = on_devices("run", 13, counts)
    assert sorted(found) == [int(count) for count in counts.split(",")]
    assert len({record["digest"] for record in found.values()}) == 1, found


@pytest.mark.full
@pytest.mark.parametrize("counts", ["1,2", "1,2,8"])
def test_noise_on_1_2_8_devices(counts):
    """The same bits of central, distributed and correlated noise, in chunks of 4 and 2, and its level at each count.

    2^19 draws each: 1 is accepted, 0.99 and 1.01 of it rejected, by 5 standard deviations; a bfloat16 model too.
    Catches noise by device or chunk, and state of correlated noise that is shared over devices.
    """
    number = 1 << 19
    found = on_devices("noise", number // 4, counts)
    assert sorted(found) == [int(count) for count in counts.split(",")]
    assert len({record["digest"] for record in found.values()}) == 1, found
    for record in found.values():
        assert sorted(record["levels"]) == ["bfloat16", "central", "correlated", "shares"]
        for name, levels in record["levels"].items():
            true, smaller, larger = ((level - 1) / np.sqrt(2 / number) for level in levels)
            assert abs(true) < 5 and smaller > 5 and larger < -5, (record["devices"], name, levels)


def test_order_of_the_cohort(federation):
    """Catches keys by slot and float sums."""
    laws.order_is_irrelevant(federation)


def test_two_devices(federation):
    """The cohort is backwards on them, with padding behind. Catches a sum, keys or memory that follow the device or the
    slot, and padding that is summed or counted."""
    halved = p.Federation(num_slots=13, mesh=engine.device_mesh(2))
    one, two = (made.run(ids) for made, ids in ((federation, p.COHORT), (halved, p.COHORT[::-1])))
    laws._compare(*((engine.gathered(state), infos) for state, infos in (one, two)), "two devices")


@pytest.mark.full
def test_padding_of_the_cohort(federation):
    """Catches padding that is summed, counted or keyed."""
    laws.padding_is_irrelevant(federation)


@pytest.mark.full
def test_chunk():
    """Catches sums that depend on the chunk."""
    laws.chunk_is_irrelevant()


@pytest.mark.full
def test_gathered_rows_stand_by_id():
    """Catches a buffer filled in order of arrival, and rows by slot."""
    laws.gathered_rows_stand_by_id()


@pytest.mark.full
def test_gathered_sums_ignore_the_order():
    """Catches rows by slot: the bits of a float sum change with every permutation of the cohort."""
    laws.gathered_sums_ignore_the_order()


@pytest.mark.full
def test_lanes_agree_to_one_millionth(federation):
    """Other lanes are another vectorisation of the same arithmetic, and the same draws."""
    single = p.Federation(plan=engine.Plan(1, 4)).params(p.COHORT)
    np.testing.assert_allclose(single, federation.params(p.COHORT), rtol=1e-6, atol=1e-6)


def test_duplicated_clients_keep_the_mean(federation):
    """Catches a divisor that does not count messages."""
    few = p.COHORT[:5]
    once, twice = federation.run(few), federation.run(np.tile(few, 2))
    laws.check_equal_bits(once[0].server, twice[0].server, "model")
    assert [2 * i["total_weight"] for i in once[1]] == [i["total_weight"] for i in twice[1]]


@pytest.mark.full
def test_weights_may_be_doubled(federation):
    """Catches a divisor that does not follow the weights."""
    work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=p.STEPS, batch_size=p.BATCH))

    def apply(*args):
        report, state = work.apply(*args)
        return report._replace(weight=2 * report.weight), state

    doubled = p.Federation(client=p.counting(work._replace(apply=apply)))
    laws.check_equal_bits(
        federation.run(p.COHORT)[0].server, doubled.run(p.COHORT)[0].server, "model under doubled weights"
    )


def test_padding_rows_of_a_client_are_irrelevant(federation):
    """Catches a mask that is multiplied instead of selected: rows past a client's own hold NaN here, 1e30 there."""
    clean = federation.run(p.COHORT)
    data = p.ragged()
    mask = np.asarray(data.parameters["mask"])
    loud = jnp.where(mask[..., None], data.parameters["x"], 1e30)
    other = type(data)(data.size, data.generate, data.parameters | {"x": loud})
    laws._compare(clean, federation.run(p.COHORT, other), "contents of padding rows")


def test_keys(federation):
    """Catches keys that ignore the seed or the round."""
    laws.keys_decide_everything(federation)


@pytest.mark.optimised(False)  # draws, and no bits of sums
def test_clients_share_no_stream():
    """Catches one key for all clients, and a transform's key that ignores the round."""
    laws.clients_share_no_stream()


@pytest.mark.parametrize("seed", [1])
def test_two_seeds_share_no_stream(seed):
    """Catches seeds that are shifts of one another: no client key of one seed is one of the other's."""
    from fedjax_sim.prng import client_key, stream

    @jax.jit
    def data(seed):
        rounds = jax.vmap(lambda r: stream(jax.random.fold_in(jax.random.key(seed), r), "client"))(jnp.arange(32))
        return jax.random.key_data(jax.vmap(lambda k: jax.vmap(lambda i: client_key(k, i))(jnp.arange(128)))(rounds))

    def keys(seed):
        return {tuple(row) for row in np.asarray(data(seed)).reshape(-1, 2).tolist()}

    first, second = keys(seed), keys(seed + 1)
    assert len(first) == len(second) == 32 * 128
    assert not first & second

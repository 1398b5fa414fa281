"""Fingerprints of private runs: what decides a release, or its rounding, counts."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, engine, privacy, sampling, transform
from fedjax_sim.population import quadratic_loss, quadratics
from fedjax_sim.population.host import host_store
from fedjax_sim.population.store import write_store
from fedjax_sim.running.fingerprint import bound, fingerprint, is_opaque

KEY, START = jax.random.key(3), {"w": jnp.zeros(3)}


def people(seed=0):
    """Eight clients with quadratic risks."""
    return quadratics(num_clients=8, dimension=3, seed=seed).train


def private(rate=0.1, multiplier=100.0, loss_fn=quadratic_loss, mesh="all"):
    """FedAvg with central noise."""
    return algorithms.fedavg(
        loss_fn, sampling.uniform(8, 4), optax.sgd(rate), num_steps=1, weighting="uniform", mesh=mesh,
        aggregator=aggregation.fixed_mean(4.0),
        transform=None if multiplier is None else transform.gaussian_mechanism(1.0, multiplier),
    )  # fmt: skip


def remembering(mesh):
    """SCAFFOLD, of which clients keep something, passed off as private."""
    work = {"num_steps": 1, "weighting": "uniform", "mesh": mesh}
    made = algorithms.scaffold(quadratic_loss, sampling.uniform(8, 4), optax.sgd(0.1), **work)
    return made._replace(parts=private().parts)


def test_what_counts():
    """Catches a learning rate, data, a start or a key that leave the noise as it was, and an address that counts."""
    found = [
        fingerprint(KEY, private(), START, people()),
        fingerprint(KEY, private(0.2), START, people()),
        fingerprint(KEY, private(multiplier=50.0), START, people()),
        fingerprint(KEY, private(), START, people(1)),
        fingerprint(KEY, private(), {"w": jnp.ones(3)}, people()),
        fingerprint(jax.random.key(4), private(), START, people()),
    ]
    assert len(set(found)) == len(found) and all(len(x) == 32 for x in found)
    assert fingerprint(KEY, private(), {"w": np.zeros(3)}, people()) == found[0]
    assert fingerprint(KEY, private(multiplier=None), START, people()) == ""  # nothing to hide
    words = [jax.random.key_data(bound(KEY, x)).tolist() for x in (*found, "")]
    assert len(set(map(tuple, words))) == len(words) and words[-1] == jax.random.key_data(KEY).tolist()


@pytest.mark.devices
def test_devices_leave_no_trace(tmp_path):
    """Catches noise that changes with the number of devices or the place of the clients' memory."""
    for make in (private, remembering):
        made = [make(mesh=mesh) for mesh in ("all", None, engine.device_mesh(2))]
        found = {fingerprint(KEY, algorithm, START, people()) for algorithm in made}
        with engine.client_memory("disk", tmp_path):
            found.add(fingerprint(KEY, made[0], START, people()))
        assert len(found) == 1 and found != {""}


def asks(params, examples, key):
    """A loss with a host callback."""
    told = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
    return {"loss": quadratic_loss(params, examples)["loss"] * told}


def prints(params, examples, key):
    """A loss that prints."""
    jax.debug.print("{}", params["w"].sum())
    return quadratic_loss(params, examples)


@pytest.mark.full  # by default what counts
def test_other_numerics_are_another_run():
    """Catches noise that two runs share though they draw or round differently, so that it cancels in their difference.
    Five clients at once are summed in another order than eight."""
    found = [fingerprint(KEY, private(), START, people())]
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        found.append(fingerprint(KEY, private(), START, people()))
    with jax.default_matmul_precision("tensorfloat32"):
        found.append(fingerprint(KEY, private(), START, people()))
    with engine.fast_arithmetic():
        found.append(fingerprint(KEY, private(), START, people()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "5")
        found.append(fingerprint(KEY, private(), START, people()))
    for impl in ("rbg", "unsafe_rbg"):
        found.append(fingerprint(jax.random.key(3, impl=impl), private(), START, people()))
    assert len(set(found)) == len(found)
    with jax.default_matmul_precision("highest"):  # as `run` has it where nobody asked
        assert fingerprint(KEY, private(), START, people()) == found[0]


@pytest.mark.full
def test_opaque_programs(tmp_path):
    """Catches programs with host callbacks that share a key: they are distinguished by what can be read, and the
    fingerprint says that there is more. Printing changes no number, and the library's own reading of a store is
    identified by the store's manifest."""
    opaque = {fingerprint(KEY, private(rate, loss_fn=asks), START, people()) for rate in (0.1, 0.1, 0.2)}
    assert len(opaque) == 2 and all(is_opaque(x) and len(x) == 33 for x in opaque)
    looked_at = {fingerprint(KEY, private(rate, loss_fn=prints), START, people()) for rate in (0.1, 0.1, 0.2)}
    assert len(looked_at) == 2 and not any(map(is_opaque, looked_at))
    table, offsets, found = people().table, np.arange(9), set()
    for i in range(2):
        for copy in range(2):
            folder = tmp_path / f"{i}{copy}"
            write_store(folder, {name: np.asarray(x) + i for name, x in table.items()}, offsets)
            found.add(fingerprint(KEY, private(), START, host_store(folder)))
    assert len(found) == 2 and not any(map(is_opaque, found))


PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 1)
from tests.running import test_fingerprint as t
print(t.fingerprint(t.KEY, t.private(), t.START, t.people()))
"""


@pytest.mark.full
def test_processes_agree():
    """Catches a fingerprint of addresses, or of orders that hashing decides: every resume would draw other noise."""
    env = os.environ | {"PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=env).stdout
    assert said.strip() == fingerprint(KEY, private(), START, people())


def test_shared_cohorts_do_not_add():
    """Why cohorts, too, are drawn anew: two runs on the same cohorts are one Gaussian of multiplier z / sqrt(2) on a
    sample, and spend 1.99 where two runs on cohorts of their own spend 0.72."""

    def spent(multiplier, rounds):
        sizes = {"population_size": 1000, "cohort_size": 10, "noise_multiplier": multiplier}
        return privacy.account(privacy.written_down(**sizes), rounds, 1e-5).epsilon

    apart, shared = spent(1.0, 2 * 50), spent(0.5**0.5, 50)
    assert apart < 0.72 and shared > 1.99

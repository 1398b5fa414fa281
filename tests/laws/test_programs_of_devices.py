"""The program of a round for devices that are not here is theirs, so that every algorithm can go on elsewhere."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim import engine
from fedjax_sim.running.fingerprint import round_program, round_program_on
from tests.laws import cases, device_rows, problems as p

KEY = jax.random.key(0)


@pytest.mark.full
@pytest.mark.parametrize("name", device_rows.names("algorithms"))
def test_every_algorithm(name, monkeypatch):
    """Fault: a run that is refused on another number of devices, as if its program had changed; FedEM's was, for weak
    types in what its clients keep."""
    monkeypatch.setattr(p, "ROWS", 50)
    monkeypatch.setattr(p, "linear_loss", device_rows.softmax_loss)
    data, params = device_rows.rows(), jnp.zeros(device_rows.FEATURES * device_rows.CLASSES)
    made, programs = {}, {}
    for devices in (1, 2):
        monkeypatch.setitem(cases.RUN, "mesh", engine.device_mesh(devices))
        made[devices] = algorithm = device_rows.algorithm("algorithms", name, lambda sampler: sampler)
        state = algorithm.init(KEY, params, data)
        step = jax.jit(lambda *args, algorithm=algorithm: algorithm.step(*args))
        programs[devices] = round_program(step.trace(KEY, state, data).jaxpr)
    for here, other in ((1, 2), (2, 1)):
        assert round_program_on(programs[other].devices, made[here], KEY, params, data) == programs[other]
    assert not any(program.sha256.endswith("?") for program in programs.values())

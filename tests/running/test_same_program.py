"""A run goes on with the program that it began with, on any devices, and a refusal says which code changed."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_sim import aggregation, engine, metrics, sampling
from fedjax_sim.algorithms import fedavg, scaffold
from fedjax_sim.population import quadratic_loss, quadratics
from fedjax_sim.running import checkpoint, loop
from fedjax_sim.running.checkpoint import CheckpointError
from fedjax_sim.running.fingerprint import round_program, round_program_on
from fedjax_sim.running.log import _same_run
from fedjax_sim.running.loop import run

pytestmark = pytest.mark.devices

KEY, START = jax.random.key(3), {"w": jnp.zeros(2)}
PEOPLE = quadratics(num_clients=9, dimension=2).train


def made(rate=0.1, loss_fn=quadratic_loss, mesh="all", recipe=fedavg, **options):
    work = {"num_steps": 1, "mesh": mesh, "weighting": "uniform"}
    return recipe(loss_fn, sampling.uniform(9, 3), optax.sgd(rate), **work, **options)


def program_of(algorithm):
    """The program as a run traces it."""
    state = algorithm.init(KEY, START, PEOPLE)
    return round_program(jax.jit(lambda *args: algorithm.step(*args)).trace(KEY, state, PEOPLE).jaxpr)


def other_loss(params, examples, key=None):
    return {"loss": 2 * quadratic_loss(params, examples)["loss"]}


def same_loss(params, examples, key=None):
    return quadratic_loss(params, examples)


def test_what_counts():
    """Fault: a rate, a loss or a part whose change is not seen; a name, or a second trace, that counts as a change."""
    programs = [program_of(made()), program_of(made(0.2)), program_of(made(loss_fn=other_loss))]
    assert len(set(programs)) == 3 and {program.devices for program in programs} == {jax.device_count()}
    assert program_of(made(loss_fn=same_loss)) == program_of(made()) == programs[0]
    assert not any(program.sha256.endswith("?") for program in programs)


@pytest.mark.parametrize(
    "options",
    [{"recipe": scaffold}, pytest.param({"aggregator": aggregation.trimmed_mean(1)}, marks=pytest.mark.full)],
    ids=["client memory", "all messages"],
)
def test_the_program_of_other_devices(options):
    """Fault: a program for devices that are not here that is none of theirs, so that no run could go on elsewhere."""
    assert jax.device_count() > 1
    programs = [program_of(made(mesh=mesh, **options)) for mesh in (None, "all")]
    assert [program.devices for program in programs] == [1, jax.device_count()]
    for mesh, program in zip(("all", None), programs, strict=True):  # the program of one, where there are several
        assert round_program_on(program.devices, made(mesh=mesh, **options), KEY, START, PEOPLE) == program
    assert round_program_on(7, made(**options), KEY, START, PEOPLE).devices == 7


def test_another_program_is_refused(tmp_path, monkeypatch):
    """Fault: one log of two programs, which a resume with another loss or another JAX made without a word."""
    run(KEY, made(), START, PEOPLE, 1, directory=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    for mesh in ("all", None):  # on other devices, too
        with pytest.raises(CheckpointError, match="program: another one, though no option"):
            run(KEY, made(loss_fn=other_loss, mesh=mesh), START, PEOPLE, 2, directory=tmp_path, resume=True)
    with pytest.raises(CheckpointError) as refusal:  # what an option changes follows from the option
        run(KEY, made(0.2), START, PEOPLE, 2, directory=tmp_path, resume=True, identity={"rate": 0.2})
    assert "rate: 'absent' in the checkpoint, 0.2 now" in str(refusal.value) and "program:" not in str(refusal.value)
    with monkeypatch.context() as patch:
        patch.setattr(loop.jaxlib.version, "__version__", "9.9.9")
        with pytest.raises(CheckpointError, match=r"jaxlib: .* checkpoint, 9\.9\.9 now"):
            run(KEY, made(), START, PEOPLE, 2, directory=tmp_path, resume=True)
    assert files == {path: path.read_bytes() for path in files}
    run(KEY, made(loss_fn=same_loss), START, PEOPLE, 2, directory=tmp_path, resume=True)


def test_another_evaluation_is_refused(tmp_path):
    """Fault: one column of a log from two evaluations, such as of a loss that reads another file; evaluations that may
    not be left out, or measured over more clients, which is another option and no other loss."""
    factor = 0.5

    def read_loss(params, examples, key=None):
        losses = quadratic_loss(params, examples)["loss"]
        return {"loss": losses if key is not None else factor * losses}

    def go(num_rounds, evaluation, resume=True):
        algorithm = made(loss_fn=read_loss, mesh=None)
        run(KEY, algorithm, START, PEOPLE, num_rounds, evaluation=evaluation, directory=tmp_path, resume=resume)

    go(1, metrics.evaluation(read_loss, train=PEOPLE), resume=False)
    go(2, metrics.evaluation(read_loss, train=PEOPLE, train_clients=4))
    factor = 0.75
    with pytest.raises(CheckpointError, match="evaluation: another one, though no"):
        go(3, metrics.evaluation(read_loss, train=PEOPLE))
    go(3, None)
    # A session without an evaluation forgets none.
    with pytest.raises(CheckpointError, match="evaluation: another one, though no"):
        go(4, metrics.evaluation(read_loss, train=PEOPLE))


@pytest.mark.full  # by default tests/running/test_loop.py goes on with two devices
def test_other_devices_continue(tmp_path):
    """Fault: a run that cannot move, since its program is another one on other devices."""
    run(KEY, made(), START, PEOPLE, 1, directory=tmp_path)
    for rounds, mesh in ((2, None), (3, "all")):
        run(KEY, made(mesh=mesh), START, PEOPLE, rounds, directory=tmp_path, resume=True)
        _, meta = checkpoint.newest_meta(tmp_path / "checkpoints")
        devices = jax.device_count() if mesh == "all" else 1
        assert meta["round"] == rounds and meta["identity"]["program"]["devices"] == devices


def test_what_changed_is_said():
    """Fault: two digests in place of the module's name; a checkpoint of an earlier version that passes, or is refused
    in words about JAX."""
    now = {"program": {"sha256": "b", "devices": 1}, "versions": {"jax": "1"}, "modules": {"mine": "1", "new": "1"}}
    then = {"program": {"sha256": "a", "devices": 1}, "versions": {"jax": "1"}, "modules": {"mine": "0", "old.x": "1"}}
    with pytest.raises(CheckpointError) as refusal:
        _same_run(then, now, "here")
    lines = [line.strip() for line in str(refusal.value).splitlines()[1:-1]]
    assert lines == [f"module {name}: {change} after the checkpoint" for name, change in
                     (("mine", "changed"), ("new", "added"), ("old.x", "taken out"))]  # fmt: skip
    with pytest.raises(CheckpointError, match="though no module of --with was changed"):
        _same_run(then | {"modules": now["modules"]}, now, "here")
    with pytest.raises(CheckpointError) as refusal:
        _same_run({}, now, "here")
    assert "kept no digest of the program" in str(refusal.value) and "version None" not in str(refusal.value)
    _same_run(json.loads(json.dumps(now)), now, "here")
    _same_run({}, {}, "here")


def test_an_earlier_version_is_told(tmp_path):
    """Fault: a checkpoint of an earlier version, which kept no versions either, refused for "version None" of JAX."""
    state, _ = run(KEY, made(), START, PEOPLE, 1, directory=tmp_path)
    _, meta = checkpoint.newest_meta(tmp_path / "checkpoints")
    old = {name: value for name, value in meta["identity"].items() if name not in ("program", "versions")}
    checkpoint.save(tmp_path / "checkpoints", 1, state, {**meta, "identity": old})
    with pytest.raises(CheckpointError, match="no digest of the program: finish it") as refusal:
        run(KEY, made(), START, PEOPLE, 2, directory=tmp_path, resume=True)
    assert "None" not in str(refusal.value)


def test_devices_that_are_not_here_stay_inside():
    """Fault: a mesh of devices that are not here in a program that is run; a run on one device that cannot read the
    program of others."""
    with engine.one_device(), engine.assumed_devices(3):
        assert engine.device_mesh().size == 3
        with engine.one_device():
            assert engine.device_mesh() is None
    assert engine.device_mesh().size == jax.device_count()

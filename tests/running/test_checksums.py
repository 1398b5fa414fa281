"""A run's folder holds what the run wrote, or the changed file is named in an error."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from fedjax_sim import aggregation, engine, sampling, server, transform
from fedjax_sim.report.page import write_report
from fedjax_sim.running import checkpoint, checksums
from fedjax_sim.running.blocks import traced_round
from fedjax_sim.running.checkpoint import CheckpointError
from fedjax_sim.running.environment import numerics
from fedjax_sim.running.fingerprint import fingerprint, round_program
from fedjax_sim.running.log import Log, check_logs, verified
from fedjax_sim.running.loop import run
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.types import Algorithm, ClientData, ClientUpdate, Report, Star

FLIP = bytes(255 - i for i in range(256))
NUM_CLIENTS = 5
WHOLE, LOGS = ("config.toml", "env.json", "population.json", "summary.json"), ("metrics.jsonl", "timing.jsonl")
LEDGER = "privacy.json"


def told(params):
    return {"test_loss": np.float32(params)}


PRIVATE = Star(  # what an accountant reads; that nobody adds the noise does not matter here
    sampling.full(NUM_CLIENTS),
    ClientUpdate(lambda model: (), lambda key, model, *_: (Report(model, jnp.ones(()), {}), ())),
    aggregation.fixed_mean(5.0),
    server.replacement(),
    transform.gaussian_mechanism(1.0, 1.0),
)


def adding(on_disk):
    """An algorithm of a few additions: it compiles in no time. On disk it remembers its clients, and has a ledger."""

    def init(key, params, population):
        return params, engine.store(jnp.zeros(2), NUM_CLIENTS) if on_disk else ()

    def step(key, state, population):
        params, memory = state
        if on_disk:
            ids = (jnp.arange(2) + params.astype(jnp.int32)) % NUM_CLIENTS
            rows, memory = engine.take(memory, ids)
            memory = engine.put(memory, ids, rows + 1, jnp.ones(2, bool))
        return (params + 1, memory), {"local_loss": params, "clients_reported": jnp.int32(2)}

    return Algorithm(init, step, lambda state: state[0], PRIVATE if on_disk else None)


@jax.tree_util.register_static
class Nobody:
    """A population whose data are never read."""

    size = NUM_CLIENTS

    def client(self, id):
        return ClientData(jnp.zeros(1), jnp.ones(1, bool))


PARTS = jnp.zeros(()), Nobody()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that died in round 7 after its commit of round 4, with the files that the command line puts beside it."""
    folder = tmp_path_factory.mktemp("sums")

    def dies(round, state, record):
        if round == 6:
            raise InterruptedError

    options = {"evaluation": told, "evaluate_every": 2, "checkpoint_every": 4, "client_memory": "disk"}
    with pytest.raises(InterruptedError):
        run(jax.random.key(0), adding(True), *PARTS, 9, directory=folder, callbacks=[dies], **options)
    for name in WHOLE:
        checksums.write(folder / name, b'{"seed": 3}\n')
    return folder


@functools.cache
def source():
    return fingerprint(jax.random.key(0), adding(True), *PARTS)


PROGRAM = {}  # of a round, once it was traced: part of the run's identity


def resumed(folder, **options):
    """What a resume continues from: round, model, rows, log."""
    identity = {"key": np.asarray(jax.random.key_data(jax.random.key(0))).tolist()} | numerics()
    identity |= {"versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__}}
    with engine.client_memory("disk", folder):
        state = adding(True).init(None, *PARTS)
    if not PROGRAM:
        step = traced_round(adding(True), jax.random.key(0), state, PARTS[1])
        PROGRAM.update(round_program(step.traced.jaxpr)._asdict())
    identity["program"] = PROGRAM
    log = Log(folder)
    log.spending = Spending(adding(True), *PARTS, source(), delta=None, directory=folder)
    state, round = log.resume(state, identity, options.get("allow_previous", False))
    ((file, version),) = engine.memory_files(state)
    rows = [np.zeros((NUM_CLIENTS, 2), np.float32)]
    file.read(int(version), np.arange(NUM_CLIENTS), rows)
    return round, float(state[0]), rows[0].tolist(), log.records, log.spending.state()


def test_every_changed_byte_is_found(stopped, tmp_path):
    """Every file of a private run's folder flipped, cut and deleted: it goes on from the same place, with the same
    privacy spent, or an error names the file. A file that only a page shows may be missing, as the page then says.

    Catches a file that is checked by its length only, or not at all: a wrong number that looks right.
    """
    shutil.copytree(stopped, tmp_path / "good")
    expected, refused = resumed(tmp_path / "good"), {}
    assert expected[0] == 4 and [record["round"] for record in expected[3]] == [0, 1, 2, 3, 4]
    names = sorted(str(path.relative_to(stopped)) for path in stopped.rglob("*") if path.is_file())
    assert {*LOGS, *WHOLE, LEDGER, "SHA256SUMS", "clients.mem", "checkpoints/round_00000004.ckpt"} < {*names}
    committed = checkpoint.newest_meta(stopped / "checkpoints")[1]["log"]
    for name in names:
        good = (stopped / name).read_bytes()
        seen = good[: committed.get(name, {"bytes": None})["bytes"]]
        places = sorted({*range(0, len(seen), 1 + len(seen) // 25), max(0, len(seen) - 1)})
        flips = [good[:i] + good[i : i + 1].translate(FLIP) + good[i + 1 :] for i in places if good]
        cuts = [good[:size] for size in {0, len(seen) // 2, max(0, len(seen) - 1)}]
        gone = [None] * (name in (*LOGS, LEDGER, "SHA256SUMS", "clients.mem"))
        for changed in [*flips, *cuts, *gone]:
            copy = shutil.copytree(stopped, tmp_path / "copy")
            (copy / name).unlink()
            if changed is not None:
                (copy / name).write_bytes(changed)
            try:
                checksums.check_files(copy, WHOLE)
                if name in LOGS:
                    check_logs(copy)
                assert resumed(copy) == expected, name
            except (CheckpointError, engine.MemoryFileError) as error:
                refused[name] = refused.get(name, 0) + 1
                assert str(copy) in str(error), (name, error)
            else:
                assert name not in (*LOGS, *WHOLE, LEDGER, "SHA256SUMS") or changed == good.rstrip(b"\n"), name
            shutil.rmtree(copy)
    assert refused["checkpoints/round_00000004.ckpt"] > 20 and not refused.get(".lock")


def test_a_page_of_changed_records_is_refused(stopped, tmp_path):
    """Catches an error that leaves the user to look for the damage, and a page drawn from changed numbers."""
    copy = shutil.copytree(stopped, tmp_path / "copy")
    log, timing = copy / "metrics.jsonl", copy / "timing.jsonl"
    good = log.read_text().splitlines(keepends=True)
    assert json.loads(good[2])["round"] == 2
    log.write_text("".join([*good[:2], good[2].replace('"local_loss": ', '"local_loss": 1'), *good[3:]]))
    for use in (lambda: write_report(copy), lambda: resumed(copy)):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: record 3 \(line 3\) was"):
            use()
    log.write_text("".join(good))
    timing.write_text(timing.read_text().replace('"seconds": ', '"seconds": 1', 1))
    with pytest.raises(CheckpointError, match=r"timing\.jsonl: .* records was changed"):
        write_report(copy)
    shutil.copy(stopped / "timing.jsonl", timing)
    (copy / "summary.json").write_text('{"seed": 8}\n')
    with pytest.raises(CheckpointError, match=r"summary\.json: expected the file that"):
        write_report(copy)


def test_a_changed_tail_is_not_shown(stopped, tmp_path):
    """Catches a page that shows 0.6 where the run wrote 6.0 after its last commit, which no checkpoint covers."""
    copy = shutil.copytree(stopped, tmp_path / "copy")
    (copy / "summary.json").unlink()  # of nothing, in this fixture
    log = copy / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    assert verified(copy) == len(lines) == 7 and "as the run wrote it" not in write_report(copy).read_text()
    log.write_text("".join([*lines[:-1], lines[-1].replace('"test_loss": 6.0', '"test_loss": 0.6')]))
    page = write_report(copy).read_text()
    assert verified(copy) == 6 and "<b>0.6</b>" not in page
    assert "Line 7 of metrics.jsonl is not as the run wrote it" in page
    log.write_text("".join([*lines, lines[-1]]))
    assert verified(copy) == 7 and "Line 8 of metrics.jsonl" in write_report(copy).read_text()


def test_an_earlier_checkpoint_may_go_on(stopped, tmp_path):
    """Catches a damaged last record that ends a run whose earlier checkpoint has an intact log, and a silent return."""
    copy = shutil.copytree(stopped, tmp_path / "copy")
    log = copy / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"round": 4', b'"round": 5'))
    with pytest.raises(CheckpointError, match=r"record 5 .* allow_previous=True"):
        resumed(copy)
    with pytest.warns(RuntimeWarning, match=r"record 5 .* from round_00000000"):
        assert resumed(copy, allow_previous=True)[:2] == (0, 0.0)


def test_a_file_that_vanished_is_not_begun_anew(tmp_path, monkeypatch):
    """A run's folder deleted while it runs. Catches exit code 0 with a log that begins in the middle."""
    for name in ("run", "checkpoints"):
        with monkeypatch.context() as patch:
            real = checkpoint.save

            def save(directory, round, *args, real=real, name=name, **options):
                if round == 4 and name == "checkpoints":  # between the log's last look and the checkpoint
                    shutil.rmtree(directory.parent)
                return real(directory, round, *args, **options)

            def deletes(round, state, record, name=name):
                if round == 4 and name == "run":
                    shutil.rmtree(tmp_path / name)

            patch.setattr(checkpoint, "save", save)
            parts = jax.random.key(0), adding(on_disk=False), *PARTS, 9
            with pytest.raises(CheckpointError, match="folder deleted or moved"):
                run(*parts, evaluate_every=2, directory=tmp_path / name, callbacks=[deletes])
        assert not (tmp_path / name / "metrics.jsonl").exists()
    log = Log(tmp_path)
    log.start()
    log.append([{"round": 1}], 0.1, 0.1)
    (tmp_path / "metrics.jsonl").write_text("somebody else's\n")
    with pytest.raises(CheckpointError, match="Something else writes to it"):
        log.append([{"round": 2}], 0.1, 0.1)


def dying(real, left):
    """A system call that passes while some are `left`."""

    def call(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    return call


def test_killed_while_writing(tmp_path, monkeypatch):
    """Catches a list of sums that a kill leaves at odds with its files: every reader would call them damaged."""
    checksums.write(tmp_path / "a", b"old")
    checksums.write(tmp_path / "b", b"other")
    for step in range(2, 30):
        left = [step]
        with monkeypatch.context() as patch:
            for name in ("write", "fsync", "replace"):
                patch.setattr(os, name, dying(getattr(os, name), left))
            try:
                checksums.write(tmp_path / "a", b"new %d" % step)
            except KeyboardInterrupt:
                continue
            finally:
                checksums.check_files(tmp_path, ["a", "b"])
        break
    assert step > 7 and (tmp_path / "a").read_bytes() == b"new %d" % step
    checksums.write(tmp_path / "a", b"newest")
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert len(lines) == 2 and all(re.fullmatch("[0-9a-f]{64}  [ab]", line) for line in lines)


def test_the_version_before_is_another_file(tmp_path):
    """Catches a list that keeps the checksum of a replaced file, so that its earlier version passes for the newest."""
    for content in (b"first", b"second"):
        checksums.write(tmp_path / "a", content)
    checksums.check_files(tmp_path, ["a"], needed=True)
    (tmp_path / "a").write_bytes(b"first")
    with pytest.raises(CheckpointError, match="another SHA-256"):
        checksums.check_files(tmp_path, ["a"])
    # Written anew, the file is right again, and the version from outside never was.
    checksums.write(tmp_path / "a", b"third")
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'third').hexdigest()}  a\n"

"""The privacy ledger of a run: epsilon by the accountant, crashes counted, and no number where none holds."""

import collections
import copy
import dataclasses
import hashlib
import json

import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings, strategies as st

from fedjax_sim import aggregation, algorithms, privacy, run, sampling, transform, tree
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.population import quadratic_loss
from fedjax_sim.running import checksums
from fedjax_sim.running.checkpoint import CheckpointError
from fedjax_sim.running.privacy_ledger import Spending, default_delta, message_dimension
from fedjax_sim.sweeps.sweep import sweep
from fedjax_sim.types import ServerUpdate
from tests.refusals import refused
from tests.running import test_fingerprint as tiny

SMALL = ["data.name=mean_estimation", "data.num_clients=60", "model.name=linear", "algorithm.num_steps=1"]
SMALL += ["sampler.name=poisson", "sampler.rate=0.1", "algorithm.weighting=uniform"]
SMALL += ["aggregator.name=fixed_mean", "aggregator.denominator=6", "transform.gaussian_mechanism.clip_norm=1.0"]
SMALL += ["transform.gaussian_mechanism.noise_multiplier=1.0", "run.devices=1"]


@pytest.fixture(scope="module")
def job():
    return build(load(None, SMALL))


@pytest.fixture(scope="module")
def plain():
    """The same without noise."""
    return build(load(None, [text for text in SMALL if "gaussian" not in text]))


def train(job, rounds, seed=0, **options):
    return run(jax.random.key(seed), job.algorithm, job.params, job.data.train, rounds, **options)[1]


def test_epsilon_is_the_accountants(job, tmp_path):
    """Catches an epsilon of another number of rounds, of another delta, or of rounds that were not evaluated."""
    history = train(job, 6, evaluate_every=3, directory=tmp_path, delta=1e-4)
    mechanism = privacy.mechanism_of(job.algorithm)
    expected = [privacy.account(mechanism, rounds, 1e-4).epsilon for rounds in (3, 6)]
    rounds, found = history.column("epsilon")
    assert rounds.tolist() == [3, 6] and found.tolist() == expected
    said = history.summary["privacy"]
    assert said["epsilon"] == expected[1] and said["rounds"] == 6 and said["statement"] in said["explanation"]
    ledger = privacy.Ledger.from_state(json.loads((tmp_path / "privacy.json").read_text())["ledger"])
    assert ledger.rounds == 6


def test_nobody_has_no_delta():
    """Catches 0 ** -1.1 and a complex delta, as a user of --population 0 or -5 met them."""
    assert default_delta(1) == 0.1
    for number in (0, -5):
        with pytest.raises(ValueError, match="clients: expected at least one"):
            default_delta(number)


def test_a_crash_is_counted(job, tmp_path):
    """Killed in rounds 4 to 6, resumed from round 3 and stopped there: six rounds used the clients' data."""
    train(job, 3, evaluate_every=3, directory=tmp_path)
    ledger = tmp_path / "privacy.json"
    before = json.loads(ledger.read_text())
    before["ledger"]["segments"][0]["stop"] = 6  # entered before they ran
    checksums.write(ledger, json.dumps(before).encode())
    went_on = train(job, 4, evaluate_every=1, directory=tmp_path, resume=True)
    assert went_on.summary["privacy"]["rounds"] == 6
    assert went_on.summary["privacy"]["delta"] == default_delta(60) < 1 / 60
    assert went_on.records[-1]["epsilon"] < went_on.summary["privacy"]["epsilon"]
    whole, listed = ledger.read_bytes(), (tmp_path / "SHA256SUMS").read_bytes()
    for gone in ("privacy.json", "SHA256SUMS", "both"):  # what was entered after the last checkpoint stands there alone
        for name in {"privacy.json", "SHA256SUMS"} & ({gone} if gone != "both" else {"privacy.json", "SHA256SUMS"}):
            (tmp_path / name).unlink()
        with pytest.raises(CheckpointError, match=r"privacy\.json: .* got no.* from a copy"):
            train(job, 5, directory=tmp_path, resume=True)
        ledger.write_bytes(whole)
        (tmp_path / "SHA256SUMS").write_bytes(listed)
    fresh = Spending(job.algorithm, job.params, job.data.train, "", delta=None, directory=tmp_path)
    for damaged in ("{", '{"ledger": {}}', '{"ledger": null}', '{"ledger": []}'):
        checksums.write(ledger, damaged.encode())
        with pytest.raises(CheckpointError, match="privacy ledger"):
            fresh.resume(None, 5)
    with pytest.raises(CheckpointError, match="privacy ledger"):
        train(job, 6, directory=tmp_path, resume=True)
    ledger.write_text(json.dumps(before))  # whole, and not what was written
    with pytest.raises(CheckpointError, match="another SHA-256"):
        fresh.resume(None, 5)


def test_the_ledger_before_is_refused(job, tmp_path):
    """Rounds 4 to 6 are entered, the run is killed in them, and the file before that is put back.

    Catches rounds that nothing counts: the newest ledger alone has them.
    """

    def spending():
        return Spending(job.algorithm, job.params, job.data.train, "program", delta=None, directory=tmp_path)

    first, ledger = spending(), tmp_path / "privacy.json"
    first.enter(0, 3)
    saved, before = first.state(), ledger.read_bytes()
    first.enter(3, 6)
    whole = spending()
    whole.resume(saved, 3)
    assert whole.ledger.rounds == 6
    ledger.write_bytes(before)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        spending().resume(saved, 3)


@pytest.mark.full  # by default test_what_no_ledger_saw_has_no_epsilon
def test_no_number_where_none_holds():
    """Catches an epsilon for a sampler that no accountant covers; the run itself continues, with the reason."""
    unknown = [text for text in SMALL if not text.startswith("sampler")]
    made = build(load(None, [*unknown, "sampler.name=with_replacement", "sampler.cohort_size=6"]))
    history = train(made, 2)
    assert "without replacement" in history.summary["privacy"]["refused"]
    assert not any("epsilon" in record for record in history.records)


@pytest.mark.full
def test_runs_without_noise_say_nothing(plain, tmp_path):
    """Catches a ledger, or an infinite epsilon, for everybody."""
    history = train(plain, 2, directory=tmp_path)
    assert "privacy" not in history.summary and not (tmp_path / "privacy.json").exists()
    assert all(np.isfinite(record["update_norm"]) for record in history.records)


def test_a_pair_is_twice_as_long(job):
    """Catches integer noise accounted for the model's numbers where a message has more: rounding depends on them."""
    few = [text for text in SMALL if not text.startswith(("transform", "aggregator", "sampler"))]
    few += ["sampler.cohort_size=6", "client_optimizer.learning_rate=0.1"]
    pair = build(load(None, [*few, "algorithm.name=scaffold"]))
    sizes = [message_dimension(made.algorithm, made.params, made.data.train) for made in (job, pair)]
    assert 2 * sizes[0] == sizes[1] == 2 * tree.num_values(job.params)


def tiny_run(rounds, multiplier, **options):
    """A run of the tests of fingerprints; None for one without noise, whose state has the same shapes."""
    return run(tiny.KEY, tiny.private(multiplier=multiplier), tiny.START, tiny.people(), rounds, **options)[1]


@pytest.fixture
def any_program(monkeypatch):
    """A run goes on with another program, as it could before checkpoints held the program's digest."""
    monkeypatch.setattr("fedjax_sim.running.log._changed_code", lambda *_: [])


@pytest.mark.full
@pytest.mark.usefixtures("any_program")
def test_rounds_without_a_ledger_have_no_epsilon(tmp_path):
    """Catches a history that a resume makes up: rounds of a run without noise, counted as if they had had it."""
    tiny_run(2, None, directory=tmp_path)
    history = tiny_run(3, 100.0, directory=tmp_path, resume=True)
    assert "ran without a ledger" in history.summary["privacy"]["refused"] and "epsilon" not in history.records[-1]


@pytest.mark.full
@pytest.mark.usefixtures("any_program")
def test_rounds_whose_noise_is_gone_are_told(tmp_path):
    """Catches a private run that goes on without noise, and whose summary then says nothing of privacy."""
    tiny_run(2, 100.0, directory=tmp_path)
    history = tiny_run(3, None, directory=tmp_path, resume=True)
    assert "these have none" in history.summary["privacy"]["refused"]


class Killed(BaseException):
    """kill -9, as far as a process can tell."""


def seen(directory, rounds, dies=None, resume=True, algorithm=None, people=None, **options):
    """(what every round released, the summary) of a tiny run of its own noise; it may be killed after a round."""
    released = {}

    def look(round, state, record):
        released[round] = np.asarray(state.server.params["w"])
        if round == dies:
            raise Killed

    options = {"evaluate_every": 1, "checkpoint_every": 2, "directory": directory, "resume": resume} | options
    algorithm, people = tiny.private() if algorithm is None else algorithm, tiny.people() if people is None else people
    try:
        _, history = run(tiny.KEY, algorithm, tiny.START, people, rounds, callbacks=[look], **options)
    except Killed:
        return released, None
    return released, history.summary["privacy"]


@pytest.mark.usefixtures("any_program")
def test_changed_runs_share_nothing(tmp_path):
    """Catches noise of std 25 that cancels in the difference of a round and its repetition with another learning rate
    or other data, which one message can move by 2 clip norms / 4; and wrong counts of such rounds."""
    first, _ = seen(tmp_path, 9, dies=3, resume=False)
    same, _ = seen(tmp_path, 9, dies=5, algorithm=tiny.private(mesh=None))
    rate, _ = seen(tmp_path, 9, dies=5, algorithm=tiny.private(0.2))
    data, spent = seen(tmp_path, 5, people=tiny.people(1))
    assert (same[3] == first[3]).all()  # another number of devices: the same release
    for a, b in ((same, rate), (same, data), (rate, data)):
        assert np.abs(a[5] - b[5]).max() > 4
    assert spent["rounds"] == 5 + 2
    assert spent["epsilon"] == privacy.account(privacy.mechanism_of(tiny.private()), 7, spent["delta"]).epsilon
    assert {"clients_reported", "local_loss", "update_norm"} <= set(spent["uncovered"])
    for said in ("secret seed", "other points of a sweep", "label mixes", "update_norm"):
        assert said in spent["explanation"]


@pytest.mark.full
def test_programs_that_call_the_host_share_nothing(tmp_path):
    """Catches two runs with one key whose noise cancels in their difference, each with its full epsilon, because a host
    callback cannot be read; and an epsilon without that warning."""
    found = [seen(None, 1, resume=False, algorithm=tiny.private(rate, loss_fn=tiny.asks)) for rate in (0.1, 0.2)]
    (first, spent), (second, _) = found
    assert np.abs(first[1] - second[1]).max() > 4
    assert "a seed for this run alone" in spent["statement"] and "calls the host" in spent["explanation"]
    assert "calls the host" not in seen(None, 1, resume=False)[1]["explanation"]


def test_noise_in_any_part_is_seen():
    """Catches noise that only parts of the library look for: an AttributeError, or a private run without a warning."""
    sound = tiny.private()
    noisy = sound.parts.transform
    server = collections.namedtuple("Server", [*ServerUpdate._fields, "noise"])(*sound.parts.server, noisy.facts.noise)
    elsewhere = tiny.private(multiplier=None).parts._replace(server=server)
    for delta in (None, 1e-4):
        spending = Spending(
            sound._replace(parts=elsewhere), tiny.START, tiny.people(), "a", delta=delta, directory=None
        )
        assert "noise: expected in the part client or transform" in spending.summary()["privacy"]["refused"]
    for parts in (sound.parts._replace(server=server), {**sound.parts._asdict(), "mine": noisy}):
        with pytest.raises(ValueError, match="one part with noise"):
            privacy.mechanism_of(parts)


def test_unknown_parts_are_said():
    """Catches a summary without a word on privacy for an algorithm that does not state its parts."""
    unknown = tiny.private()._replace(parts=None)
    spending = Spending(unknown, tiny.START, tiny.people(), "", delta=None, directory=None)
    assert "nothing is known of its privacy" in spending.summary()["privacy"]["refused"]


def test_no_private_run_keeps_who_took_part(job):
    """Catches a list of all who took part in every checkpoint, which no epsilon covers."""
    plain = build(load(None, [text for text in SMALL if "gaussian" not in text]))
    shown = [made.algorithm.parts.sampler.sample for made in (job, plain)]
    names = [jax.eval_shape(s, jax.random.key(0), made.algorithm.parts.sampler.init())[0].metrics.keys()
             for s, made in zip(shown, (job, plain), strict=True)]  # fmt: skip
    assert "distinct_clients" not in names[0] and "distinct_clients" in names[1]


@pytest.fixture(scope="module")
def programs():
    """Three runs' ledgers before their first round: two programs with one mechanism, and one with another."""
    made = [(tiny.private(), "a"), (tiny.private(), "b"), (tiny.private(multiplier=50.0), "c")]
    return {
        source: Spending(made, tiny.START, tiny.people(), source, delta=1e-4, directory=None) for made, source in made
    }


def stored(spending):
    """What a file or a checkpoint gives back of it."""
    return json.loads(json.dumps(spending.state()))


LIVES = st.lists(
    st.tuples(
        st.sampled_from("abc"),  # what runs
        st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3),  # rounds entered, and whether they commit
        st.integers(0, 2),  # rounds of the last block that ran before it died
        st.integers(0, 1),  # checkpoints that were damaged
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@example(  # there and back: the first program's noise met another model then
    lives=[("a", [(1, True), (3, False)], 2, 0), ("b", [(1, True), (1, False)], 0, 0), ("a", [(1, False)], 1, 0)]
)
@given(lives=LIVES)
def test_no_history_tells_less_than_the_truth(programs, lives):
    """Against all releases, counted by hand: catches a change that keeps the noise (source or stream of the first
    program), one that goes back to an earlier program and its noise, and rounds that a kill or a merge forgets."""
    commits, disk, released, spent = [], None, {}, {}
    for source, blocks, ran, damaged in lives:
        now = copy.copy(programs[source])
        now.ledger, now._read = privacy.Ledger(1e-4), lambda held=disk: held
        fresh, commits = not commits, commits[: max(1, len(commits) - damaged)]
        commits = commits or [(0, f"start of {source}", stored(now))]
        at, model, saved = commits[-1]
        if not fresh:
            now.resume(saved, at)
        for i, (count, commit) in enumerate(blocks):
            now.enter(at, at + count)
            disk, last = stored(now), i == len(blocks) - 1
            for _ in range(min(ran, count) if last else count):
                model = hashlib.sha256(f"{source} from {model}".encode()).hexdigest()
                assert released.setdefault((now.stream, at), model) == model  # noise hides one release, once
                spent[now.stream, at] = now.mechanism
                at += 1
            if commit and not last:
                commits.append((at, model, disk))
        assert not now.void and now.ledger.rounds >= len(released)
        if released:
            truth = privacy.compose([(mechanism, 1) for mechanism in spent.values()], 1e-4)
            assert now.ledger.spent().epsilon >= truth.epsilon


def test_what_no_ledger_saw_has_no_epsilon(tmp_path):
    """Catches an epsilon that returns after rounds whose releases were not counted: without noise, with noise that no
    accountant covers, before there was a ledger, or repeated by a program that cannot be distinguished from another."""
    people, unknown = tiny.people(), tiny.private()
    parts = unknown.parts._replace(aggregator=aggregation.mean())
    made = {"sound": tiny.private(), "plain": tiny.private(multiplier=None), "unknown": unknown._replace(parts=parts)}

    proto = {
        kind: Spending(algorithm, tiny.START, people, "", delta=1e-4, directory=None)
        for kind, algorithm in made.items()
    }

    def life(folder, kind, first, stop, saved=None, source="a", resumes=True):
        now = copy.copy(proto[kind])
        now.source = now.stream = source
        now.ledger, now.path = privacy.Ledger(1e-4), folder and folder / "privacy.json"
        now.resume(saved, first) if resumes else now.start()
        now.enter(first, stop)
        return now, now.state() and stored(now)

    for i, (middle, source) in enumerate((("plain", ""), ("unknown", "b"), ("sound", ""))):
        folder = tmp_path / str(i)
        folder.mkdir()
        now, saved = life(folder, "sound", 0, 10, resumes=False)
        assert now.record(10) and not now.void
        now, lost = life(folder, middle, 5, 8, saved, source)  # it died, and goes on otherwise
        assert not now.record(8) and "refused" in now.summary()["privacy"]
        for held in (saved, lost):  # it dies too: before a checkpoint, or after one
            now, _ = life(folder, "sound", 5, 10, held)
            assert not now.record(10) and now.summary()["privacy"]["refused"]
    for kind in ("plain", "unknown"):  # from the first round on
        (tmp_path / kind).mkdir()
        _, saved = life(tmp_path / kind, kind, 0, 5, resumes=False)
        now, _ = life(tmp_path / kind, "sound", 0, 5, saved)
        assert not now.record(5) and now.void
    now, saved = life(None, "sound", 0, 5, source="", resumes=False)
    assert life(None, "sound", 5, 8, saved, source="")[0].record(8)  # nothing ran twice


def test_stopping_is_no_secret():
    """Catches a private run that stops, and names a client, because of that client's data alone."""
    options = {"num_steps": 1, "weighting": "uniform", "nonfinite": "error", "aggregator": aggregation.fixed_mean(4.0)}
    sampler, noise = sampling.uniform(8, 4), transform.gaussian_mechanism(1.0, 1.0)
    of_records = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_steps": 1, "batch_size": 1, "num_examples": 1}
    for make in (
        lambda: algorithms.fedavg(quadratic_loss, sampler, optax.sgd(0.1), transform=noise, **options),
        lambda: algorithms.record_private_fedavg(
            quadratic_loss, sampler, optax.sgd(0.1), **of_records, nonfinite="error"
        ),
    ):
        with refused("nonfinite", value="error", rule="'drop'"):
            make()


@pytest.mark.full
def test_missing_messages_void_it(tmp_path):
    """Catches an epsilon after rounds that were skipped, which reveals that a client had nothing to send: in a run, in
    its resume, and in a sweep; and after noise that was missing where each client adds its own."""

    def make(noise):
        options = {"num_steps": 1, "weighting": "uniform", "aggregator": aggregation.fixed_mean(8.0)}
        noise = {"shares": transform.distributed_gaussian(1.0, 10.0, 8), "own": transform.local_gaussian(1.0, 10.0)}[
            noise
        ]
        return algorithms.fedavg(quadratic_loss, sampling.full(8), optax.sgd(0.1), transform=noise, **options)

    people = tiny.people()
    center = people.table["center"]
    broken = dataclasses.replace(people, table=people.table | {"center": center.at[0].set(np.nan)})
    look = {"evaluate_every": 1, "directory": tmp_path}
    _, history = run(tiny.KEY, make("shares"), tiny.START, broken, 2, **look)
    assert "a message that should have had noise was missing" in history.summary["privacy"]["refused"]
    assert not any("epsilon" in record for record in history.records)
    _, history = run(tiny.KEY, make("shares"), tiny.START, people, 3, resume=True, **look)
    assert history.records[-1]["skipped_rounds"] == 0 and "in round 1 " in history.summary["privacy"]["refused"]
    spending = Spending(make("shares"), tiny.START, people, "", delta=None, directory=None)
    spending.observe([{"round": 7, "skipped_rounds": 1, "aborted_rounds": 1}])
    assert spending.void.startswith("in round 7 a secure sum was aborted: that too few clients were left")
    rows = sweep(make, tiny.START, broken, 1, grid={"noise": ["shares", "own"]}).rows
    assert [row["skipped_rounds"] for row in rows] == [1, 0] and all("epsilon" not in row for row in rows)
    for row, sound in zip(rows, (make("shares"), make("own")), strict=True):
        spending = Spending(sound, tiny.START, people, "", delta=None, directory=None)
        assert spending.misses(row) and spending.misses({}) and not spending.misses(dict.fromkeys(row, 0))


@pytest.mark.full
def test_points_share_no_noise():
    """Catches a sweep whose points differ by 2 clip norms / 4, so little that shared noise, of norm about 43, cancels.
    With independent noise the norms of a round are within 1 by chance with probability 0.03, and
    those of five of nine rounds 2 times in a million. That each point is its run:
    tests/sweeps/test_sweep.py::test_a_sweep_is_single_runs."""
    found = sweep(tiny.private, tiny.START, tiny.people(), 9, grid={"rate": [0.1, 0.2]}, evaluate_every=1)
    first, second = found.column("update_norm").reshape(2, 9)
    assert np.median(np.abs(first - second)) > 1 and {"epsilon"} <= set(found.rows[0])

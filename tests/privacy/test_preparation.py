"""What is learnt from all clients' rows before training: nobody moves a released sum further than is stated."""

import itertools
import json
import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import aggregation, algorithms, population, privacy, sampling, transform
from fedjax_sim.command import app
from fedjax_sim.config import registry
from fedjax_sim.config.document import load
from fedjax_sim.population import partitioners
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.types import learned_from
from tests.config.test_document import algorithm_of

CLIP = 0.2
RNG = np.random.default_rng(0)
TEXT = "the cat sat on the mat. "


def rows_of(data):
    """The examples of each client, without padding."""
    offsets = np.asarray(data.train.offsets)
    examples = {"x": data.train.table["x"], "y": data.train.table["y"]} if hasattr(data.train, "table") else None
    examples = {name: np.asarray(leaf) for name, leaf in (examples or data.train.examples).items()}
    order = np.asarray(data.train.indices) if hasattr(data.train, "indices") else np.arange(len(examples["y"]))
    for start, stop in itertools.pairwise(offsets):
        yield {name: leaf[order[start:stop]] for name, leaf in examples.items()}


def learnt_from_all(data):
    """The records of what one client changes at all others, without those of what a row changes at its own client."""
    return tuple(record for record in data.learned if record.unit == "client")


def message(rows, data):
    """What a client sends, without noise: means of its inputs by class, or counts of its tokens, clipped."""
    if data.task == "next_token":
        size = data.num_outputs
        sent = np.stack([np.bincount(rows[leaf][rows[leaf] >= 0], minlength=size) for leaf in ("x", "y")]).astype(float)
    else:
        x = rows["x"].reshape(len(rows["x"]), -1).astype(float)
        classes = np.eye(max(data.num_outputs, 2))[rows["y"].reshape(-1).astype(int)]
        sent = x.T @ classes / max(len(x), 1)
    return sent * min(1.0, CLIP / max(np.linalg.norm(sent), 1e-30))


def distance(a, b):
    """How far two releases are apart, in clip norms; models of other shapes are infinitely far apart."""
    first, second = (sum(message(rows, data) for rows in rows_of(data)) for data in (a, b))
    return math.inf if first.shape != second.shape else np.linalg.norm(first - second) / CLIP


def in_table(folder, more, **constants):
    """60 clients of 8 rows, and one whose rows are unlike all others."""
    lines = ["who,age,pulse,smokes,state"]
    rng = np.random.default_rng(1)
    for id in range(60):
        for row in range(8):
            age, pulse = rng.normal(50, 10), rng.normal(70, 9)
            lines.append(f"c{id:02},{age:.3f},{pulse:.3f},{'yes' if row % 3 else 'no'},{'well' if row % 2 else 'ill'}")
    if more:
        lines += [f"z,{1e6 + row},?,perhaps,better" for row in range(8)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    given = {"standardise": True, "missing": ["?"], "categories": ["smokes"]} | constants
    return population.table(file=str(folder / "rows.csv"), client="who", label="state", **given)


def in_sites(folder, more, **constants):
    rng = np.random.default_rng(2)
    sites = {f"s{i}": [[*rng.normal(5, 2, 2).round(3), k % 2] for k in range(8)] for i in range(10)}
    if more:
        sites["z"] = [[1e6, "?", 2], [-1e6, "?", 0], [3e5, "?", 1]] * 3
    for name, rows in sites.items():
        (folder / f"{name}.csv").write_text("\n".join(["a,b,y", *(",".join(map(str, row)) for row in rows)]) + "\n")
    return population.csv_sites(directory=str(folder), label="y", missing=["?"], **constants)


def in_leaf(folder, more, **constants):
    users = {f"u{i}": [[f"ab{'ab'[i % 2]}", "a"]] * 4 for i in range(9)} | ({"z": [["xyz", "b"]] * 4} if more else {})
    for split in ("train", "test"):
        part = {user: {"x": [x for x, _ in rows], "y": [y for _, y in rows]} for user, rows in users.items()}
        content = {"users": list(users), "num_samples": [4] * len(users), "user_data": part}
        (folder / split).mkdir(exist_ok=True)
        (folder / split / "all.json").write_text(json.dumps(content))
    return population.leaf(directory=str(folder), **constants)


def in_numbers(folder, more, **constants):
    labels = {f"u{i}": [0, 1, 1] for i in range(9)} | ({"z": [0, 1, 2]} if more else {})
    for split in ("train", "test"):
        part = {user: {"x": [[1.0, 2.0]] * 3, "y": y} for user, y in labels.items()}
        content = {"users": list(labels), "num_samples": [3] * len(labels), "user_data": part}
        (folder / split).mkdir(exist_ok=True)
        (folder / split / "all.json").write_text(json.dumps(content))
    return population.leaf(directory=str(folder), **constants)


def in_tweets(folder, more, **constants):
    texts = {f"u{i}": ["good day", "bad day"] for i in range(9)} | (
        {"z": ["zig zag " * 50 + "day"] * 2} if more else {}
    )
    for split in ("train", "test"):
        part = {
            user: {"x": [["1", "d", "q", user, text] for text in said], "y": [0, 1]} for user, said in texts.items()
        }
        content = {"users": list(texts), "num_samples": [2] * len(texts), "user_data": part}
        (folder / split).mkdir(exist_ok=True)
        (folder / split / "all.json").write_text(json.dumps(content))
    return population.sent140(directory=str(folder), num_words=3, **constants)


def in_plays(folder, more, **constants):
    roles = {f"R{i}": TEXT * 3 for i in range(9)} | ({"Z": "Quiz? Zounds! " * 3} if more else {})
    (folder / "input.txt").write_text("\n".join(f"{role}:\n{said}\n" for role, said in roles.items()))
    return population.shakespeare(directory=str(folder), **constants)


def in_texts(folder, more, **constants):
    h5py = pytest.importorskip("h5py")
    said = {f"u{i}": [TEXT.strip()] * 5 for i in range(9)} | ({"z": ["zig zag " * 40] * 5} if more else {})
    path = folder / ("more.h5" if more else "less.h5")
    with h5py.File(path, "w") as file:
        for user, texts in said.items():
            file[f"examples/{user}/tokens"] = np.array(texts, object)
    options = {"features": "tokens", "unit": "word", "vocabulary_size": 4, "sequence_length": 8}
    return population.tff_text(path=str(path), **options, **constants)


def in_libsvm(folder, more, **constants):
    """The rows of client 0 have another feature and another label, if `more`."""
    lines = [f"{1 if row % 2 else -1} 1:{1 + row % 5} 2:1" for row in range(60)]
    path = folder / "rows.txt"

    def read(text, **options):
        path.write_text("\n".join(text) + "\n")
        shared = {"num_clients": 6, "partition": "iid", "held_out_clients": 0, "task": "classification"}
        return population.libsvm(path=str(path), test_path=str(folder / "test.txt"), **shared, **options)

    (folder / "test.txt").write_text("1 1:1\n-1 2:1\n")
    if more:
        train = read(lines).train
        for row in np.asarray(train.indices)[: int(train.offsets[1])]:
            lines[row] = "5 1:1 2:7 9:1"
    return read(lines, **constants)


def in_images(folder, more, **constants):
    """The images of client 0 are black, if `more`, and those of others bright."""
    images = np.random.default_rng(3).integers(200, 256, (40, 3, 3)).astype(np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)

    def read(**options):
        for split in ("train", "t10k"):
            for name, array in (("images-idx3", images), ("labels-idx1", labels)):
                header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                (folder / f"{split}-{name}-ubyte").write_bytes(header + array.tobytes())
        return population.mnist(partition=partitioners.iid(num_clients=4), directory=str(folder), **options)

    if more:
        train = read().train
        images[np.asarray(train.indices)[: int(train.offsets[1])]] = 0
    return read(**constants)


SCALE = {"mean": [50, 70], "deviation": [10, 9]}
ROWS = {  # how the data are read, the constants that a user states, and the clip norms that one client may move
    "table": (
        in_table,
        {
            "standardise": SCALE,
            "fill": {"age": 50, "pulse": 70},
            "categories": {"smokes": ["no", "yes"]},
            "classes": ["ill", "well", "better"],
            "split": "by_client",
        },
        1,
    ),
    "csv_sites": (
        in_sites,
        {
            "standardise": {"mean": [5, 5], "deviation": [2, 2]},
            "fill": {"b": 5},
            "num_classes": 3,
            "split": "by_client",
        },
        1,
    ),
    "leaf": (in_leaf, {"vocabulary": list(string.ascii_lowercase)}, 1),
    "leaf_numbers": (in_numbers, {"num_classes": 3}, 1),
    "sent140": (in_tweets, {"vocabulary": ["good", "day", "bad"]}, 1),
    "shakespeare": (in_plays, {"vocabulary": [*string.printable]}, 1),
    "tff_text": (in_texts, {"vocabulary": ["the", "cat", "sat"], "split": "by_client"}, 1),
    "libsvm": (in_libsvm, {"num_features": 9, "classes": [-1, 1, 5]}, 2),
    "mnist": (in_images, {"standardise": {"mean": [0.9], "deviation": [0.1]}}, 2),
}


@pytest.mark.parametrize("name", ROWS)
def test_one_client_more(tmp_path, name):
    """Catches whatever one client changes in the inputs of others, with constants; without them it is on record."""
    make, constants, moves = ROWS[name]
    folders = [tmp_path / word for word in ("less", "more", "less_learnt", "more_learnt")]
    for folder in folders:
        folder.mkdir()
    stated = [make(folder, more, **constants) for folder, more in zip(folders[:2], (False, True), strict=True)]
    assert learnt_from_all(stated[0]) == learnt_from_all(stated[1]) == ()
    assert 0.5 < distance(*stated) <= moves * (1 + 1e-6)
    learnt = [make(folder, more) for folder, more in zip(folders[2:], (False, True), strict=True)]
    assert distance(*learnt) > 1.05 * moves
    options = {record.instead.split(" ")[0] for data in learnt for record in learnt_from_all(data)}
    assert options == set(constants)
    with pytest.raises(ValueError, match=next(iter(options))):
        privacy.mechanism_of(noisy(learnt[0].train.size), population=learnt[0].train)


@pytest.mark.parametrize("name", ["table", "csv_sites"])
def test_each_constant_is_needed(tmp_path, name):
    """Catches a record without a harm, or a harm without a record: one constant is left out, the others are stated."""
    make, constants, moves = ROWS[name]
    found = {}
    for left_out in constants:
        pair = []
        for more in (False, True):
            folder = tmp_path / f"{left_out} {more}"
            folder.mkdir()
            pair.append(make(folder, more, **{key: value for key, value in constants.items() if key != left_out}))
        assert {record.instead.split(" ")[0] for data in pair for record in learnt_from_all(data)} == {left_out}
        found[left_out] = distance(*pair)
    assert min(found.values()) > 1.05 * moves
    # Values of 10^6 bring all others near one point: their messages lose what tells them apart.
    assert name != "table" or found["standardise"] > 10


def loss_fn(params, examples, key):
    return {"loss": jnp.log1p(jnp.exp(-(2 * examples["y"] - 1) * (examples["x"] @ params["w"])))}


def noisy(size, noise_multiplier=1.0):
    """FedAvg of all clients with a clip of the messages, and noise in their sum."""
    noise = transform.gaussian_mechanism(clip_norm=CLIP, noise_multiplier=noise_multiplier)
    work = {"num_steps": 1, "batch_size": None, "weighting": "uniform"}
    return algorithms.fedavg(
        loss_fn, sampling.full(size), optax.sgd(1.0), aggregator=aggregation.fixed_mean(1.0), transform=noise, **work
    )


@pytest.mark.full
def test_one_client_more_in_a_round(tmp_path):
    """Catches a round whose sum one client moves by 58 clip norms, where one is stated: the whole product."""
    constants = {"standardise": SCALE, "features": ["age", "pulse"], "classes": ["ill", "well"], "task": "binary"}
    found = []
    for more in (False, True):
        in_table(tmp_path, more, missing=["?"])
        lines = (tmp_path / "rows.csv").read_text().replace("?", "1e6").replace("better", "well")
        (tmp_path / "rows.csv").write_text(lines)
        file = str(tmp_path / "rows.csv")
        data = population.table(file=file, client="who", label="state", split="by_client", **constants).train
        algorithm = noisy(data.size, 0.0)
        mechanism = privacy.mechanism_of(noisy(data.size), population=data)
        state = algorithm.init(jax.random.key(0), {"w": jnp.zeros(2)}, data)
        state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, data)
        found.append(np.asarray(algorithm.params(state)["w"]))
    assert 0.9 < np.linalg.norm(found[1] - found[0]) / CLIP <= mechanism.moves * (1 + 1e-5)


DRAWN = {  # data that no file holds, or that are published with this package; their smallest sizes
    "breast_cancer": {"standardise": False},
    "controller_tuning": {},
    "digits": {"num_clients": 3},
    "digits_partition": {"num_clients": 3},
    "fcube": {"examples_per_client": 2},
    "karate_club": {"num_clients": 1},
    "linear_teacher": {"num_clients": 3},
    "logistic_teacher": {"num_clients": 3},
    "mean_estimation": {"num_clients": 3},
    "mixture": {"num_clients": 3},
    "molecules": {"num_clients": 1, "graphs_per_client": 2, "num_test": 2},
    "quadratics": {"num_clients": 3},
    "sensor_calibration": {},
    "stochastic_blocks": {"num_clients": 1},
    "synthetic": {"num_clients": 3},
    "synthetic_images": {"num_clients": 3},
}
# Files whose parts share the reader of a row of `ROWS`, or learn nothing (celeba, native: what its folder says).
ALIKE = {"celeba", "cifar10", "cifar100", "cora", "emnist", "heart_disease", "native", "pfllib", "svhn", "tff_hdf5"}


def test_every_data_set_keeps_a_record():
    """Catches a data set of this package that leaves open what it learnt from its rows."""
    assert DRAWN.keys() | ROWS.keys() | ALIKE == set(registry.parts_of_table("data")) | {"leaf_numbers"}
    for name, options in DRAWN.items():
        assert getattr(population, name)(**options).learned == (), name
    graph = population.karate_club(num_clients=2)
    with pytest.raises(ValueError, match="division of one graph"):
        privacy.mechanism_of(noisy(2), population=graph.train)


NOISE = ["sampler.name=full", "aggregator.name=fixed_mean", "aggregator.denominator=4.0", "model.name=logistic"]
NOISE += ["data.name=breast_cancer", "data.num_clients=4", "data.partition=iid", "data.held_out_clients=0"]
NOISE += ["transform.gaussian_mechanism.clip_norm=1.0", "transform.gaussian_mechanism.noise_multiplier=2.0"]
NOISE += ["run.rounds=2", "algorithm.batch_size=8", "algorithm.num_steps=1", "run.progress=false"]


def call(*words, settings=()):
    return CliRunner().invoke(app.app, [*words, *(word for text in settings for word in ("--set", text))])


@pytest.mark.parametrize("odd", ["4,x,a", "4,1,x", "x,1,a"])
def test_how_one_client_writes_changes_no_other(tmp_path, odd):
    """Catches 1.0 that is the stated 1 until another client's word makes texts of the whole column."""
    constants = {"categories": {"kind": [1, "2.0", "x"]}, "classes": ["a", "3", "x"], "split": "by_client"}
    found = []
    for more in ([], [odd] * 4):
        lines = [f"{id}.0,{row % 2 + 1}.0,{'a' if row % 3 else '3.0'}" for id in range(4) for row in range(9)]
        (tmp_path / "rows.csv").write_text("\n".join(["who,kind,state", *lines, *more]) + "\n")
        data = population.table(file=str(tmp_path / "rows.csv"), client="who", label="state", **constants)
        assert learnt_from_all(data) == () and data.feature_names == ("kind = 1", "kind = 2", "kind = x")
        found.append([rows for _, rows in zip(range(4), rows_of(data), strict=False)])
    assert all(rows["x"].sum() == len(rows["x"]) > 0 for rows in found[0])
    for rows, again in zip(*found, strict=True):
        assert all(np.array_equal(rows[leaf], again[leaf]) for leaf in ("x", "y"))


@pytest.mark.default_rows("size", "order")
@pytest.mark.parametrize("by", ["labels", "size", "order"])
def test_groups_by_rows_are_on_record(tmp_path, by):
    """Catches groups that one client's rows change, and an epsilon of them."""
    sizes = [8, 1, 4, 6]
    found = []
    for labels, more in (([0, 1, 0, 1], 0), ([0, 1, 1, 1], 8)):
        counts = [size + more * (i == 1) for i, size in enumerate(sizes)]
        rows = [{"x": np.ones((n, 2)), "y": np.full(n, label)} for n, label in zip(counts, labels, strict=True)]
        clients = dict(zip("abcd", rows, strict=True))
        data = population.from_sites(clients, clients, task="binary", num_outputs=1, name="rows", learned=())
        found.append(population.with_groups(data, num_groups=2, by=by))
    changes = any(not np.array_equal(*(np.asarray(data.train.members) for data in found)) for _ in found)
    assert changes == (by != "order") == bool(found[0].learned)
    if changes:
        with pytest.raises(ValueError, match="with_groups: expected constants"):
            privacy.mechanism_of(noisy(2), population=found[0].train)
        public = population.with_public_preparation(found[0]).train
        assert "move every other client" in privacy.explain(privacy.mechanism_of(noisy(2), population=public))


def test_public_covers_every_wrapper():
    """Catches a remedy that is refused: a wrapper that learns goes around the one that calls it public."""
    rows = ["data={name='mixture',num_clients=8}", "data.with_public_preparation={}", "model.name=logistic"]
    rows += ["data.with_groups={num_groups=2,by='size'}", "sampler={name='full'}", "algorithm.name=hierarchical_fedavg"]
    rows += [
        row for row in NOISE if row.startswith(("transform", "aggregator", "algorithm.weighting", "algorithm.num"))
    ]
    algorithm, _, people = algorithm_of(load(None, [*rows, "algorithm.batch_size=2"]))
    told = privacy.explain(privacy.mechanism_of(algorithm, population=people))
    assert "One client can move every other client to another group" in told


@pytest.mark.parametrize("way", ["by_client", "local", "file"])
def test_a_row_changes_no_other_row_of_its_client(tmp_path, way):
    """Catches DP-SGD over rows of which one less makes others of its client training rows: 5 changed for one."""
    lines = [f"{row // 20},{row},{row % 2}" for row in range(80)]
    found = []
    for less in (0, 1):
        for name, rows in (("rows", lines[:41] + lines[41 + less :]), ("tests", lines)):
            (tmp_path / f"{name}.csv").write_text("\n".join(["who,age,y", *rows]) + "\n")
        other = {"split": "by_client"} if way == "by_client" else {"test_file": str(tmp_path / "tests.csv")}
        options = {"client": "who", "label": "y", "num_classes": 2, "standardise": False} | other
        data = population.table(file=str(tmp_path / "rows.csv"), **options)
        data = population.with_local_test(data) if way == "local" else data
        people = [data.train.client(i) for i in range(4)]
        found.append({float(x) for rows in people for x in np.asarray(rows.examples["x"])[np.asarray(rows.mask), 0]})
    changed = len(found[0] ^ found[1])
    work = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_steps": 1, "batch_size": 4, "num_examples": 16}
    records = algorithms.record_private_fedavg(loss_fn, sampling.full(4), optax.sgd(1.0), **work)
    if way == "file":
        assert changed == 1 and privacy.mechanism_of(records, population=data.train).unit == "record"
        return
    assert changed > 1
    with pytest.raises(ValueError, match="change which other rows of its client"):
        privacy.mechanism_of(records, population=data.train)
    assert privacy.mechanism_of(noisy(4), population=data.train).unit == "client"  # whose messages hide it
    public = population.with_public_preparation(data).train
    for algorithm, says in ((records, True), (noisy(4), False)):
        told = privacy.explain(privacy.mechanism_of(algorithm, population=public))
        assert ("One record can change" in told) == says and ("Taken as public" in told) == says


def test_the_servers_rows_are_whose_they_are(tmp_path):
    """Catches test rows of the clients on which the server trains, although an epsilon is stated for these clients."""
    split = in_table(tmp_path, False, **ROWS["table"][1])
    own = population.with_server_rows(split, examples=5)
    assert [record.what for record in learnt_from_all(own)] == ["the server's rows, which are the clients' test rows"]
    grouped = population.with_server_rows(population.with_groups(split, num_groups=3), examples=5)
    assert len(learnt_from_all(grouped)) == 1
    with pytest.raises(ValueError, match="server's rows, which are the clients'"):
        privacy.mechanism_of(noisy(60), population=own.train)
    strangers = population.with_server_rows(split._replace(held_out_names=("nobody", "else")), examples=5)
    assert learnt_from_all(strangers) == population.with_server_rows(population.digits(num_clients=5)).learned == ()


@pytest.mark.parametrize("command", ["account", "calibrate", "audit", "plan", "run"])
def test_every_command_refuses(tmp_path, command):
    """Catches a command that states an epsilon of standardised data, or trains with it, without a word."""
    out = ["--out", str(tmp_path / "run")] if command == "run" else []
    found = call(command, *out, settings=NOISE)
    assert found.exit_code == 2 and "data.standardise: expected constants beside noise" in found.output
    assert "with_public_preparation" in found.output and not list(tmp_path.iterdir())


def test_a_sweep_refuses_its_points(tmp_path):
    """Catches a point of a sweep that is private over data which the sweep's first point may standardise."""
    (tmp_path / "sweep.toml").write_text(
        "[sweep]\nseeds = [0]\n[sweep.grid]\n'transform.gaussian_mechanism.noise_multiplier' = [1.0, 2.0]\n"
    )
    found = call("sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out"), settings=NOISE)
    assert found.exit_code == 2 and "constants beside noise" in found.output, found.output


@pytest.mark.parametrize("stated", [["data.standardise=false"], []])
def test_what_is_taken_as_public_is_said(stated):
    """Catches a statement that keeps silent about what it takes as public; and one that tells it of other data."""
    public = [] if stated else ["data.with_public_preparation={}"]
    found = json.loads(call("account", "--json", settings=[*NOISE, *stated, *public]).output)["spent"]
    told = [sentence for sentence in found["assumptions"] if "mean and standard deviation" in sentence]
    assert len(told) == len(public)
    assert all("NOT covered" in sentence and "shift and rescale" in sentence for sentence in told)


def test_a_population_without_a_record_is_said():
    """Catches arrays of a user's own that a statement vouches for."""
    arrays = {"x": np.ones((4, 2), np.float32), "y": np.zeros(4, np.int32)}
    unknown = population.stored(arrays, [0, 2, 4])
    known = population.stored(arrays, [0, 2, 4], learned=())
    for people, says in ((None, True), (unknown, True), (known, False)):
        mechanism = privacy.mechanism_of(noisy(2), population=people)
        assert ("assumed to depend on its own rows" in privacy.explain(mechanism)) == says
    with pytest.raises(ValueError, match="a record"):
        population.with_public_preparation(population.digits(num_clients=3))


class Own:
    """A wrapper of a user's own, which says nothing of what it learnt itself."""

    def __init__(self, inner):
        self.inner, self.size, self.client = inner, inner.size, inner.client


jax.tree_util.register_pytree_node(Own, lambda own: ((own.inner,), None), lambda _, inner: Own(*inner))


def test_records_go_with_the_clients(tmp_path):
    """Catches a wrapper that loses the record of the data inside of it."""
    data = population.breast_cancer(num_clients=4, partition="iid")
    assert [record.columns[0] for record in data.learned] == ["mean radius"]
    alone = population.with_parties(population.breast_cancer(num_clients=1, partition="iid"), num_parties=2)
    population.write_native(tmp_path / "kept", population.with_public_preparation(data))
    kept = [population.native(directory=str(tmp_path / "kept"), host=host) for host in (False, True)]
    assert all(found.learned == (data.learned[0]._replace(is_public=True),) for found in kept)
    found = [
        alone,
        population.with_local_test(data),
        population.with_groups(data, num_groups=2),
        population.with_groups(population.with_local_test(data), num_groups=2),
        population.with_server_rows(data, examples=10),
        population.with_private_labels(data, epsilon=1.0),
        population.label_flip(data, share=0.5),
        data._replace(train=population.without_clients(data.train, [1])),
        data._replace(train=jax.tree.map(jnp.asarray, data.train)),
        data._replace(train=data.train.capped(64)),
    ]
    assert all(learnt_from_all(wrapped) == data.learned for wrapped in found)
    public = [population.with_public_preparation(wrapped).learned for wrapped in found]
    assert all(record.is_public for records in public for record in records)
    # What says nothing is not known after it either.
    unknown = population.stored({"x": np.ones((2, 1)), "y": np.zeros(2, int)}, [0, 2])
    both = population.with_public_preparation(data._replace(train=(data.train, unknown))).train
    assert both[0].learned[0].is_public and both[1].learned is None
    # Of a wrapper that states nothing, what is inside counts; nothing inside says nothing of the wrapper.
    *inside, own = learned_from(Own(data.train))
    assert tuple(inside) == data.learned and "without a record" in own.what and not own.is_public
    of_public = population.label_flip(
        data._replace(train=Own(population.with_public_preparation(data).train)), share=0.5
    )
    told = privacy.explain(privacy.mechanism_of(noisy(4), population=of_public.train))
    assert "without a record" in told and "mean radius" in told
    assert learned_from(Own(population.digits(num_clients=3).train)) is None


def test_a_run_from_python_has_no_epsilon():
    """Catches an epsilon that `run` states of standardised data, although `mechanism_of` refuses them."""
    data = population.breast_cancer(num_clients=4, partition="iid", held_out_clients=0)
    params = {"w": jnp.zeros(30)}
    for made, refused in ((data, True), (population.with_public_preparation(data), False)):
        spending = Spending(noisy(4), params, made.train, "", delta=1e-3, directory=None)
        assert ("standardise: expected constants beside noise" in spending.refused) == refused
        spending.enter(0, 1)
        assert ("epsilon" in spending.record(1)) != refused
        told = spending.summary()["privacy"]
        assert ("refused" in told) if refused else "NOT covered" in told["explanation"]

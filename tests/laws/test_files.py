"""Every file that a config names is in a run's identity by what is in it, and by nothing else.

The parts are found by the annotations of their options, `types.FilePath` and `types.FolderPath`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save
from scipy.io import savemat

from fedjax_sim.config import registry
from fedjax_sim.config.build import Builder
from fedjax_sim.config.document import Config, ConfigError, load
from fedjax_sim.config.files import named_paths, rebased
from fedjax_sim.population.datasets.native import write_native
from fedjax_sim.population.describe import digest
from fedjax_sim.population.federated_data import from_sites
from tests.laws.test_wrappers import OPTIONS, settings

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FEW = ["data.num_clients=4", "sampler.cohort_size=2", "model.name=logistic"]
GOSSIP = [*FEW[::2], "algorithm.name=dpsgd"]
PHONES = [*FEW, "sampler.with_clock.overhead_seconds=1.0", "devices.name=measured", "devices.path=FOLDER/phones.csv"]
STORE = ["data.name=native", "data.directory=FOLDER", "model.name=logistic", "sampler.name=full"]


class Row(NamedTuple):
    """A config that names files, how to write them, and how to change each of them."""

    settings: list[str]  # FOLDER stands for where the files are
    write: Callable[[Path], None]
    changes: dict[str, Callable[[Path], None]]  # by file


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def text_row(settings: list[str], files: dict[str, str], old: str, new: str) -> Row:
    """That of text files, each of which has `old` in it."""

    def write(folder: Path) -> None:
        for name, text in files.items():
            put(folder, name, text)

    def change(name: str) -> Callable[[Path], None]:
        assert old in files[name]
        return lambda folder: put(folder, name, files[name].replace(old, new, 1))

    return Row(settings, write, {name: change(name) for name in files if old in files[name]})


def leaf_json(label: int) -> str:
    data = {"u": {"x": [[0.0, 1.0], [2.0, 3.0]], "y": [0, label]}}
    return json.dumps({"users": ["u"], "num_samples": [2], "user_data": data})


def tweets(label: int) -> str:
    tweet = ["1", "Mon Apr 06", "NO_QUERY", "u", "so good"]
    return json.dumps({"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [tweet] * 2, "y": [0, label]}}})


def write_start(folder: Path, bias: float = 0.0) -> None:
    """Parameters of softmax regression on the digits."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"kernel": np.zeros((64, 10), np.float32), "bias": np.full(10, bias, np.float32)}
    (folder / "model.safetensors").write_bytes(save(arrays))


def write_faces(folder: Path, red: int = 0, label: int = 0) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    image.fromarray(np.full((4, 4, 3), red, np.uint8)).save(folder / "images" / "a.png")
    data = {"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": ["a.png"], "y": [label]}}}
    for split in ("train", "test"):
        put(folder, f"{split}/data.json", json.dumps(data))


def write_snippets(folder: Path, **first: str) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    folder.mkdir(exist_ok=True)
    for name in ("train", "test"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["examples/f0/snippets"] = [first.get(name, "Hello"), "you"]


def hospital(thirty: int) -> str:
    rows = [[30 + i, i % 2, 1, 120 + i, 200, 0, 0, 150, 0, 1.5, 1, 0, 3, i % 2] for i in range(thirty)]
    return "\n".join(",".join(map(str, row)) for row in rows) + "\n"


def clients(shift: float) -> dict:
    return {id: {"x": np.arange(6.0).reshape(3, 2) + shift, "y": np.arange(3) % 2} for id in ("a", "b")}


def write_toy(folder: Path, train: float = 0.0, test: float = 0.0) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    data = from_sites(clients(train), clients(test), task="classification", num_outputs=2, name="toy")
    write_native(folder, data)


def flip_last_byte(folder: Path) -> None:
    path = folder / "train" / "x.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def write_cora(folder: Path, label: int = 0) -> None:
    arrays = {"feature_indptr": [0, 1, 2, 3, 4], "feature_indices": [0, 1, 2, 3], "edges": [[0, 1], [1, 2], [2, 3]]}
    arrays |= {"labels": [0, 1, label, 1], "train": [0, 1, 2], "validation": [2], "test": [3]}
    folder.mkdir(exist_ok=True)
    np.savez(folder / "cora.npz", **{name: np.array(values) for name, values in arrays.items()})


def write_hdf5(folder: Path, **first: float) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    folder.mkdir(exist_ok=True)
    for name in ("train", "test"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            group = file.create_group("examples/f0")
            group["pixels"] = np.full((4, 2, 2), first.get(name, 0.0), np.float32)
            group["label"] = np.arange(4, dtype=np.int32)


IMAGES = ["data.directory=FOLDER", "data.partition={name='iid', num_clients=2}", *STORE[2:]]


def write_records(folder: Path, names: tuple[str, ...], num_labels: int, label: int = 0) -> None:
    """Files of CIFAR with two images each; the last label of the first image of the first file is given."""
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        records = np.zeros((2, num_labels + 3072), np.uint8)
        records[0, num_labels - 1] = label if i == 0 else 0
        records.tofile(folder / name)


def write_digits(folder: Path, label: int = 0, splits: tuple[str, str] = ("train", "t10k")) -> None:
    folder.mkdir(exist_ok=True)
    for split in splits:
        (folder / f"{split}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, *[0, 0, 0, 2] * 3]) + bytes(8))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, label, 1]))


def write_house_numbers(folder: Path, label: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        savemat(folder / f"{split}_32x32.mat", {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[label], [2]]})


def write_archives(folder: Path, label: int = 0) -> None:
    """A folder of PFLlib with one client."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        rows = {"x": np.ones((2, 3)), "y": np.array([label if split == "train" else 0, 1])}
        np.savez(folder / split / "0.npz", data=np.array(rows, object))
    put(folder, "config.json", '{"num_clients": 1, "num_classes": 2}')


EMNIST = ("emnist-digits-train", "emnist-digits-test")
CIFAR10 = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR100 = ("train.bin", "test.bin")

ROWS = {
    "cifar10": Row(
        ["data.name=cifar10", *IMAGES],
        lambda folder: write_records(folder, CIFAR10, 1),
        {CIFAR10[0]: lambda folder: write_records(folder, CIFAR10, 1, label=3)},
    ),
    "cifar100": Row(
        ["data.name=cifar100", *IMAGES],
        lambda folder: write_records(folder, CIFAR100, 2),
        {CIFAR100[0]: lambda folder: write_records(folder, CIFAR100, 2, label=3)},
    ),
    "mnist": Row(
        ["data.name=mnist", *IMAGES],
        write_digits,
        {"train-labels-idx1-ubyte": lambda folder: write_digits(folder, label=3)},
    ),
    "emnist": Row(
        ["data.name=emnist", "data.split=digits", *IMAGES],
        lambda folder: write_digits(folder, splits=EMNIST),
        {f"{EMNIST[0]}-labels-idx1-ubyte": lambda folder: write_digits(folder, label=3, splits=EMNIST)},
    ),
    "pfllib": Row(
        ["data.name=pfllib", "data.directory=FOLDER", "data.num_classes=2", *STORE[2:]],
        write_archives,
        {
            "train/0.npz": lambda folder: write_archives(folder, label=1),
        },
    ),
    "svhn": Row(
        ["data.name=svhn", *IMAGES],
        write_house_numbers,
        {"train_32x32.mat": lambda folder: write_house_numbers(folder, label=3)},
    ),
    "celeba": Row(
        ["data.name=celeba", "data.directory=FOLDER", "data.images=FOLDER/images", "data.image_size=4", *STORE[2:]],
        write_faces,
        {"images": lambda folder: write_faces(folder, 9), "train": lambda folder: write_faces(folder, label=1)},
    ),
    "cora": Row(
        ["data.name=cora", "data.directory=FOLDER", "data.num_clients=1", "model.name=gcn", "sampler.name=full"],
        write_cora,
        {"cora.npz": lambda folder: write_cora(folder, 1)},
    ),
    "csv_sites": text_row(
        ["data.name=csv_sites", "data.directory=FOLDER", "data.label=y", "model.name=logistic", "sampler.name=full"],
        {f"{site}.csv": "a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(9)) for site in ("north", "south")},
        "\n8,",
        "\n9,",
    ),
    "from_csv": text_row(
        [*GOSSIP, "algorithm.mixing={name='metropolis', graph={name='from_csv', file='FOLDER/edges.csv'}}"],
        {"edges.csv": "0,1\n1,2\n2,3\n"},
        "2,3",
        "1,3",
    ),
    "heart_disease": text_row(
        ["data.name=heart_disease", "data.directory=FOLDER", "model.name=logistic", "sampler.name=full"],
        {f"processed.{name}.data": hospital(12) for name in HOSPITALS},
        "\n35,",
        "\n75,",
    ),
    "leaf": text_row(
        ["data.name=leaf", "data.directory=FOLDER", "data.num_classes=3", "model.name=logistic", "sampler.name=full"],
        {f"{split}/data.json": leaf_json(1) for split in ("train", "test")},
        '"y": [0, 1]',
        '"y": [0, 2]',
    ),
    "libsvm": text_row(
        ["data.name=libsvm", "data.path=FOLDER/a.txt", "data.test_path=FOLDER/a.t", *FEW],
        {"a.txt": "1 1:2\n-1 2:3\n" * 4, "a.t": "1 1:2\n-1 2:3\n" * 10},
        "1:2",
        "1:4",
    ),
    "measured": text_row(PHONES, {"phones.csv": "speed,bandwidth_down,bandwidth_up\n1e9,1e6,1e5\n"}, "1e9", "2e9"),
    "native": Row(
        STORE,
        write_toy,
        {"train": lambda folder: write_toy(folder, train=1.0), "test": lambda folder: write_toy(folder, test=1.0)},
    ),
    "native on the disk": Row(
        [*STORE, "data.host=true"],
        write_toy,
        {"train": lambda folder: write_toy(folder, train=1.0), "train/x.npy": flip_last_byte},
    ),
    "sent140": text_row(
        ["data.name=sent140", "data.directory=FOLDER", *STORE[2:]],
        {f"{split}/data.json": tweets(1) for split in ("train", "test")},
        '"y": [0, 1]',
        '"y": [0, 0]',
    ),
    "shakespeare": text_row(
        ["data.name=shakespeare", "data.directory=FOLDER", "model.name=lstm", "sampler.name=full"],
        {"input.txt": "A:\nHello, you there.\n\nB:\nYes, me here.\n"},
        "Hello",
        "Hallo",
    ),
    "started_from": Row(
        [*FEW, "model.started_from={path='FOLDER/model.safetensors'}"],
        write_start,
        {"model.safetensors": lambda folder: write_start(folder, bias=1.0)},
    ),
    "table": text_row(
        [
            "data.name=table",
            "data.file=FOLDER/a.csv",
            "data.test_file=FOLDER/b.csv",
            "data.client=u",
            "data.label=y",
            *STORE[2:],
        ],
        {f"{name}.csv": "u,x,y\n" + "".join(f"{i % 3},{i},{i % 2}\n" for i in range(9)) for name in "ab"},
        ",8,",
        ",9,",
    ),
    "tff_hdf5": Row(
        ["data.name=tff_hdf5", "data.path=FOLDER/train.h5", "data.test_path=FOLDER/test.h5", *STORE[2:]],
        write_hdf5,
        {f"{name}.h5": lambda folder, name=name: write_hdf5(folder, **{name: 1.0}) for name in ("train", "test")},
    ),
    "tff_text": Row(
        ["data.name=tff_text", "data.path=FOLDER/train.h5", "data.test_path=FOLDER/test.h5", *STORE[2:]],
        write_snippets,
        {f"{name}.h5": lambda folder, name=name: write_snippets(folder, **{name: "Hi"}) for name in ("train", "test")},
    ),
    "trace": text_row(
        [*PHONES, "devices.availability={name='trace', path='FOLDER/times.csv'}"],
        {"phones.csv": "speed,bandwidth_down,bandwidth_up\n1e9,1e6,1e5\n", "times.csv": "client,start,end\na,0,50\n"},
        "0,50",
        "5,50",
    ),
}


def parts_with_paths() -> dict[str, list[str]]:
    """The options that name files or folders, by part."""
    parts = {name: part for subpackage in registry.SUBPACKAGES for name, part in registry.parts(subpackage).items()}
    found = {name: [key for key, x in part.options.items() if registry.is_path(x)] for name, part in parts.items()}
    return {name: options for name, options in found.items() if options}


def config_of(row: Row, folder: Path) -> Config:
    return load(None, [text.replace("FOLDER", str(folder)) for text in row.settings])


def identity(row: Row, folder: Path) -> dict:
    """What the command line writes into a checkpoint."""
    config = config_of(row, folder)
    builder = Builder(config)
    data = builder.data()
    builder.stop()
    return json.loads(json.dumps(config.identity() | {"data_sha256": digest(data)}))


@pytest.mark.parametrize("name", ROWS)
def test_identity_is_content(tmp_path, name):
    """Catches a path in the identity, so that what was moved is another run, and a file that may change unseen."""
    row, folder = ROWS[name], tmp_path / "here"
    row.write(folder)
    first = identity(row, folder)
    assert str(tmp_path) not in json.dumps(first)
    shutil.move(folder, tmp_path / "there")
    assert identity(row, tmp_path / "there") == first
    for file, change in row.changes.items():
        row.write(folder)
        assert identity(row, folder) == first
        change(folder)
        try:
            assert identity(row, folder) != first, f"{file} may change unseen"
        except ValueError as refused:
            assert "SHA-256" in str(refused), refused  # of a manifest
        shutil.rmtree(folder)


@pytest.mark.default_rows("label_flip", "with_groups", "with_links", "with_local_test")
@pytest.mark.parametrize("wrapper", OPTIONS["data"])
def test_a_store_on_the_disk_under_every_wrapper(tmp_path, wrapper):
    """Catches a wrapper that hides the store: rows that no digest counts."""
    row, digests = ROWS["native on the disk"], []
    row = row._replace(settings=[*row.settings, *settings("data", wrapper)])
    for shift in (0.0, 1.0):
        rows = {id: {"x": np.arange(60.0).reshape(30, 2), "y": np.arange(30) % 3} for id in "abcd"}
        shifted = {id: client | {"x": client["x"] + shift} for id, client in rows.items()}
        data = from_sites(shifted, rows, task="classification", num_outputs=3, name="toy")
        write_native(tmp_path / str(shift), data)
        try:
            digests.append(identity(row, tmp_path / str(shift))["data_sha256"])
        except ConfigError:
            others = ("constrained", "label_offset", "with_links", "with_parties", "with_rotated_images")
            assert wrapper in (*others, "with_public_preparation")  # they ask for other data
            return
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", ROWS)
def test_every_path_is_found(tmp_path, name):
    """Catches a part that names files without a row here, and a path that no table of a config shows."""
    options = parts_with_paths()
    assert options.keys() == {row.partition(" ")[0] for row in ROWS}
    paths = named_paths(config_of(ROWS[name], tmp_path).tables)
    assert {place.rpartition(".")[2] for place in paths} >= set(options[name.partition(" ")[0]])
    assert all(path.startswith(str(tmp_path)) for path in paths.values()), paths


def test_every_path_is_declared():
    """Catches an option that is a path by its name, and annotated as any text; a folder whose content has no digest."""
    for subpackage in registry.SUBPACKAGES:
        for part in registry.parts(subpackage).values():
            for name, option in part.options.items():
                is_named = name.rpartition("_")[2] in ("path", "file", "directory", "folder")
                assert not is_named or registry.is_path(option), f"{part.name}: {name}"
                is_folder = registry.is_path(option) and "folder" in str(option.kind)
                assert not is_folder or part.returns == "FederatedData", f"{part.name}: {name} has no digest"


@pytest.mark.parametrize("name", ROWS)
def test_paths_go_to_another_folder_and_back(tmp_path, monkeypatch, name):
    """Catches a relative path that leads elsewhere after a run has written it."""
    monkeypatch.chdir(tmp_path)
    config = config_of(ROWS[name], Path("here"))
    there = rebased(config.tables, ".", tmp_path / "runs" / "one")
    assert all(path.startswith("../../here") for path in named_paths(there).values())
    assert rebased(there, tmp_path / "runs" / "one") == config.tables


@pytest.mark.parametrize("name", ["measured", "from_csv"])
def test_a_file_that_cannot_be_read_twice(tmp_path, name):
    """Catches a pipe, which is empty, or waits forever, when it is read for the identity."""
    for file in ROWS[name].changes:
        os.mkfifo(tmp_path / file)
    with pytest.raises(ConfigError, match="expected a regular file"):
        config_of(ROWS[name], tmp_path).identity()

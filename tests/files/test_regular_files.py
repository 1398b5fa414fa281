"""Files from outside: what is no regular file, too large, or nested without end is refused by every reader, at once."""

import ast
import contextlib
import json
import os
import resource
import signal
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedjax_sim import models, population
from fedjax_sim.config import registry
from fedjax_sim.config.files import contents
from fedjax_sim.config.read import override, read_document
from fedjax_sim.config.value_kinds import ConfigError
from fedjax_sim.files.regular_files import content_of, json_of, opened
from fedjax_sim.files.text_files import table_rows, text_of
from fedjax_sim.population.datasets.leaf_tff import leaf_split
from fedjax_sim.population.graph.graphs import read_cora
from fedjax_sim.population.store import open_store
from fedjax_sim.report.by_client import BY_CLIENT, read_by_client
from fedjax_sim.report.files import read_json, read_lines
from fedjax_sim.report.page import write_report
from fedjax_sim.running import checkpoint_format, checksums, log
from fedjax_sim.running.files import CheckpointError
from fedjax_sim.sweeps.finished import Finished
from tests.test_architecture import FILES, label, parsed

HALVES = population.partitioners.iid(num_clients=2)
DEEP = "[" * 200_000
TYPED = (ConfigError, CheckpointError, OSError, ValueError, MemoryError)


@contextlib.contextmanager
def bounded():
    """Ends a reader that waits, or that takes memory without end."""

    def late(number, frame):
        raise AssertionError("a reader waits")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with limited_memory():
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def limited_memory():
    """Lets the process take 4 GiB more; macOS says nothing of its pages, and knows no such limit."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(pages.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 32), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def zeros(path):
    path.symlink_to("/dev/zero")


def pipe(path):
    os.mkfifo(path)


def linked_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def folder(path):
    path.mkdir()


def model():
    return models.linear(input_shape=(3,), num_outputs=2)


def images(directory):
    (directory / "images").mkdir()
    for split in ("train", "test"):
        (directory / split).mkdir()
        content = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": ["file"], "y": [1]}}}
        (directory / split / "a.json").write_text(json.dumps(content))
    (directory / "file").rename(directory / "images" / "file")
    return population.celeba(directory=str(directory), images=str(directory / "images"))


def in_place(name, read):
    """A reader of a folder with a file of this name."""

    def reader(path):
        path.rename(path.with_name(name))
        return read(path.parent)

    return reader


def lines_of(path):
    """Reads a log, of which the page says what it left out."""
    notes = []
    assert read_lines(path, notes) == []


# Readers that raise, by name. Each takes a path whose file is named "file".
READERS = {
    "opened": opened,
    "content": content_of,
    "config": read_document,
    "text": lambda path: text_of("path", path),
    "rows": lambda path: list(table_rows("path", path)),
    "table": lambda path: population.table(file=str(path), label="y", client="c"),
    "sites": in_place("a.csv", lambda parent: population.csv_sites(directory=str(parent), label="y")),
    "libsvm": lambda path: population.libsvm(path=str(path)),
    "shakespeare": in_place("input.txt", lambda parent: population.shakespeare(directory=str(parent))),
    "leaf": in_place("a.json", leaf_split),
    "celeba": lambda path: images(path.parent),
    "tff": lambda path: population.tff_hdf5(path=str(path)),
    "mnist": in_place(
        "train-images-idx3-ubyte", lambda parent: population.mnist(directory=str(parent), partition=HALVES)
    ),
    "packed mnist": in_place(
        "train-images-idx3-ubyte.gz", lambda parent: population.mnist(directory=str(parent), partition=HALVES)
    ),
    "batches": in_place("data_batch_1", lambda parent: population.cifar10(directory=str(parent), partition=HALVES)),
    "svhn": in_place("train_32x32.mat", lambda parent: population.svhn(directory=str(parent), partition=HALVES)),
    "cora": in_place("cora.npz", lambda parent: read_cora(str(parent))),
    "native": in_place("info.json", lambda parent: population.native(directory=str(parent))),
    "store": in_place("manifest.json", lambda parent: open_store(parent, verify=True)),
    "start": lambda path: models.started_from(model(), path=str(path)),
    "checkpoint": checkpoint_format.read_file,
    "points": in_place("points.jsonl", lambda parent: Finished(parent, {}, True)),
    "sums": in_place("SHA256SUMS", lambda parent: checksums.check_files(parent, ["summary.json"])),
}
# Readers that go on without the file, and say so where there is something to say.
LENIENT = {
    "meta": checkpoint_format.meta_of,
    "summary": lambda path: read_json(path, []),
    "log": lines_of,
    "timing": in_place("timing.jsonl", log.verified),
    "clients": in_place(BY_CLIENT, read_by_client),
}


@pytest.mark.parametrize("make", [zeros, pipe, linked_pipe, folder])
@bounded()
def test_every_reader(tmp_path, make):
    """Faults: a reader that reads from a device until memory ends, that waits for a pipe, or that names no file."""
    for name, read in {**READERS, **LENIENT}.items():
        directory = tmp_path / name
        directory.mkdir()
        make(directory / "file")
        if name in LENIENT:
            assert not read(directory / "file"), name
            continue
        with pytest.raises(TYPED) as refused:
            read(directory / "file")
        assert str(refused.value), name


@bounded()
def test_what_a_config_names(tmp_path):
    """Fault: the digest of a file that never ends."""
    pipe(tmp_path / "phones.csv")
    tables = {"devices": {"name": "measured", "path": str(tmp_path / "phones.csv")}}
    digests, problems = contents(tables)
    assert not digests and "named pipe" in problems[0]


@bounded()
def test_nested_without_end(tmp_path):
    """Fault: a RecursionError for lists or tables inside one another, in a reader or in what walks its result."""
    with pytest.raises(ValueError, match="nested"):
        json_of(DEEP)
    deep = 90 * "[" + 90 * "]"
    assert json_of(deep) is not None
    for levels in (101, 900):
        with pytest.raises(ValueError, match="nested"):
            json_of('{"a": ' * levels + "1" + "}" * levels)
    path = tmp_path / "a.toml"
    for text in (f"a = {DEEP}", "a" + ".a" * 100_000 + " = 1", "[" + "a." * 5000 + "a]", "a = " + "{b = " * 400):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_document(path)
    for setting in (f"a={DEEP}", "a" + ".a" * 50_000 + "=1", "a=" + "[" * 200 + "]" * 200):
        assert list(override({}, [setting])), setting[:20]
    (tmp_path / "points.jsonl").write_text(DEEP + "\n")
    with pytest.raises(CheckpointError, match="nested"):
        Finished(tmp_path, {}, True)
    for name in ("metrics.jsonl", "timing.jsonl", "summary.json", "env.json", "population.json", "timeline.json"):
        (tmp_path / name).write_text('{"a": ' * 900 + "1" + "}" * 900)
    assert "could not be read" in write_report(tmp_path).read_text()
    (tmp_path / "zz_deep.py").write_text("x = " + "-" * 100_000 + "1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match="zz_deep"):
            registry.admit(["zz_deep"])


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@bounded()
def test_declared_sizes(tmp_path):
    """Fault: memory that is taken, or a crash, because a small file declares large contents."""
    path = tmp_path / "a.safetensors"
    huge = 10**23
    entry = {"dtype": "F32", "shape": [huge], "data_offsets": [0, 4]}
    for content in (
        safetensors({"kernel": entry}, b"1234"),
        safetensors({"kernel": {**entry, "shape": [2**40]}}, b"1234"),
        safetensors({"kernel": {**entry, "shape": [1], "data_offsets": [0, huge]}}, b"1234"),
        safetensors(DEEP.encode()),
        struct.pack("<Q", 2**63) + b"{}",
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"path: expected a \.safetensors file"):
            models.started_from(model(), path=str(path))
    rows = [f"{i % 2} {index}:1" for i, index in enumerate([1] * 99 + [16_000_000])]
    (tmp_path / "a.svm").write_text("\n".join(rows))
    with pytest.raises(ValueError, match="num_features = 16000000"):
        population.libsvm(path=str(tmp_path / "a.svm"))
    data = population.libsvm(path=str(tmp_path / "a.svm"), num_features=4, num_clients=2, held_out_clients=2)
    assert data.input_shape == (4,)
    # Small files may be sparse.
    (tmp_path / "a.svm").write_text("\n".join(f"{i % 2} {i + 1}:1 9000:1" for i in range(99)))
    assert population.libsvm(path=str(tmp_path / "a.svm"), num_clients=2, held_out_clients=2).input_shape == (9000,)
    # An archive whose member declares more than it has, and one that is a bomb.
    for array, declared in ((np.zeros(4, np.int64), 1 << 40), (np.zeros(1 << 26, np.int64), None)):
        with zipfile.ZipFile(tmp_path / "cora.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("feature_indptr", "feature_indices", "edges", "labels", "train", "validation", "test"):
                with archive.open(f"{name}.npy", "w") as file:
                    header = {"descr": "<i8", "fortran_order": False, "shape": (declared or array.size,)}
                    np.lib.format.write_array_header_1_0(file, header)
                    file.write(array)
                if declared is None:
                    break
        with pytest.raises(ValueError, match=r"cora\.npz: .*(declares|unpacked)"):
            read_cora(str(tmp_path))


def test_pictures_features_and_categories(tmp_path):
    """Fault: memory for what a picture, an HDF5 file or a column of words would become."""
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("1", (8000, 8000)).save(tmp_path / "file", "PNG")
    assert (tmp_path / "file").stat().st_size < 1 << 16
    with bounded(), pytest.raises(MemoryError, match="192,000,000 bytes"):
        images(tmp_path)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("pixels", "label"):
            file.create_dataset(f"examples/a/{name}", (10**9,), "u1", chunks=(1000,))
    with bounded(), pytest.raises(ValueError, match="2,000,000,000 bytes declared"):
        population.tff_hdf5(path=str(tmp_path / "a.h5"))
    columns = {"word": [str(i) for i in range(60_000)], "y": [0, 1] * 30_000}
    with bounded(), pytest.raises(MemoryError, match=r"word has .* values"):
        population.from_table(columns, label="y", partition=HALVES, categories=["word"])


@bounded()
def test_large_files_are_not_read(tmp_path):
    """Fault: a sparse file of a terabyte, read as far as memory goes."""
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 42)
    for read in (content_of, read_document, lambda path: text_of("path", path), checkpoint_format.read_file):
        with pytest.raises(TYPED, match="4,398,046,511,104 bytes"):
            read(tmp_path / "file")
    with pytest.raises(OSError, match="4,398,046,511,104 bytes"):
        models.started_from(model(), path=str(tmp_path / "file"))


def reads_itself(node: ast.Call) -> bool:
    """Returns whether a call reads a file, or parses JSON, past `regular_files`."""
    function = node.func
    modes = [x.value for x in (*node.args[:2], *(k.value for k in node.keywords)) if isinstance(x, ast.Constant)]
    modes = [mode for mode in modes if isinstance(mode, str)]
    writes = any(set(mode) <= set("wxarb+") and set(mode) & set("wxa+") for mode in modes)
    if isinstance(function, ast.Name):
        return function.id == "open" and not writes
    owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if function.attr in ("read_text", "read_bytes", "fromfile", "genfromtxt"):
        return True
    if owner in ("np", "json"):
        return function.attr in ("load", "loads", "loadtxt", "memmap")
    return function.attr == "open" and owner in ("path", "file", "Path") and not writes


# Files that read for themselves: of the system or the package, or texts that this process has written.
OWN = {
    "command/export.py": 1,  # an example of the package
    "command/sweep.py": 1,  # the line of the command, a text
    "engine/plan.py": 1,  # the kernel's limit of memory
    "files/regular_files.py": 1,
    "population/datasets/leaf_tff.py": 1,  # keys that are there twice are refused while the text is parsed
    "population/datasets/sklearn.py": 2,  # tables of scikit-learn
    "running/processes.py": 1,  # from process 0
    "running/origin.py": 1,  # of the system
    "running/seconds.py": 1,  # of the system
    "running/loop.py": 1,  # of a text made in the same line
    "sweeps/finished.py": 1,
}


def test_one_reader_for_all():
    """Fault: a new reader that opens files by itself."""
    found = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)) and reads_itself(node):
                found.setdefault(label(path).removeprefix("fedjax_sim/"), []).append(node.lineno)
    more = {name: lines for name, lines in found.items() if len(lines) > OWN.get(name, 0)}
    assert not more

"""Images in the published files of CIFAR and MNIST, against their layouts."""

import gzip

import numpy as np
import pytest
from scipy.io import savemat

from fedjax_sim import population
from fedjax_sim.population import partitioners
from tests.files.test_pickled_arrays import HOSTILE, python_2
from tests.refusals import refused

PARTS = partitioners.iid(num_clients=3)
RNG = np.random.default_rng(0)


def write_cifar(folder, images, labels, names):
    """CIFAR's layout, written pixel by pixel: labels, then the red, green and blue planes, each row after row."""
    records = []
    for image, own_labels in zip(images, np.reshape(labels, (len(images), -1)), strict=True):
        pixels = [image[row, column, colour] for colour in range(3) for row in range(32) for column in range(32)]
        records.append(bytes([*own_labels, *pixels]))
    for name, part in zip(names, np.array_split(np.array(records), len(names)), strict=True):
        (folder / name).write_bytes(b"".join(part.tolist()))


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(int(size).to_bytes(4, "big") for size in values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(folder, train, test):
    for split, (images, labels) in (("train", train), ("t10k", test)):
        write_idx(folder / f"{split}-images-idx3-ubyte", images[..., 0])
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)


BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]


def written(name, folder):
    """Writes a small data set; returns (training images, test images, training labels, test labels)."""
    side, colours = (28, 1) if name == "mnist" else (32, 3)
    train, test = (RNG.integers(0, 256, (n, side, side, colours), dtype=np.uint8) for n in (11, 4))
    high = 20 if name == "cifar100" else 10
    labels, test_labels = (RNG.integers(0, high, n) for n in (11, 4))
    if name == "mnist":
        write_mnist(folder, (train, labels), (test, test_labels))
    elif name == "cifar10":
        write_cifar(folder, train, labels, BATCHES)
        write_cifar(folder, test, test_labels, ["test_batch.bin"])
    else:
        write_cifar(folder, train, np.stack([labels, 5 * labels + 4], 1), ["train.bin"])
        write_cifar(folder, test, np.stack([test_labels, 5 * test_labels + 4], 1), ["test.bin"])
    return train, test, labels, test_labels


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_images_are_as_published(name, tmp_path):
    """Catches colours or axes in another order, the wrong one of two labels, and statistics that saw test images."""
    train, test, labels, test_labels = written(name, tmp_path)
    read = getattr(population, name)
    data = read(directory=str(tmp_path), partition=PARTS)
    scaled = train.astype(np.float64) / 255
    mean, deviation = scaled.mean((0, 1, 2)), scaled.std((0, 1, 2))
    np.testing.assert_allclose(data.train.table["x"], (scaled - mean) / deviation, atol=1e-5)
    np.testing.assert_allclose(data.test["x"], (test / 255 - mean) / deviation, atol=1e-5)
    expected = (5 * labels + 4, 5 * test_labels + 4) if name == "cifar100" else (labels, test_labels)
    np.testing.assert_array_equal(data.train.table["y"], expected[0])
    np.testing.assert_array_equal(data.test["y"], expected[1])
    assert data.num_outputs == (100 if name == "cifar100" else 10) and data.train.size == 3
    assert "11 of" in data.notes[2] and "standardised" in data.notes[1] and "4 of 10,000 test images" in data.notes[2]
    plain = read(directory=str(tmp_path), partition=PARTS, standardise=False)
    np.testing.assert_array_equal(plain.test["x"], test / np.float32(255))
    if name == "cifar100":
        coarse = read(directory=str(tmp_path), partition=PARTS, labels="coarse")
        np.testing.assert_array_equal(coarse.train.table["y"], labels)
        assert coarse.num_outputs == 20


def test_refusals_say_what_to_download(tmp_path):
    with refused("directory", value="none", rule="cifar-10-binary.tar.gz", hint="https"):
        population.cifar10(partition=PARTS)
    with refused("directory", rule="data_batch_1.bin"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    written("cifar10", tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(100))
    with refused("data_batch_3.bin", value="100 bytes", rule="3,073"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    (tmp_path / "test_batch.bin").write_bytes(bytes([11] + [0] * 3072))
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3073))
    with refused("test_batch image 0", value=11, rule="below 10"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    written("mnist", tmp_path)
    content = (tmp_path / "t10k-labels-idx1-ubyte").read_bytes()
    for wrong, words in ((content + b"x", "bytes behind the header"), (b"ab" + content[2:], "an IDX file of bytes"),
                         (content[:7] + b"\x03" + content[8:-1], "4 labels, one an image")):  # fmt: skip
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(wrong)
        with pytest.raises(ValueError, match=words):
            population.mnist(directory=str(tmp_path), partition=PARTS)


def same_data(found, expected):
    """Whether two data sets have the same rows, clients and labels."""
    for leaf in ("x", "y"):
        np.testing.assert_array_equal(found.train.table[leaf], expected.train.table[leaf])
        np.testing.assert_array_equal(found.test[leaf], expected.test[leaf])
    np.testing.assert_array_equal(found.train.indices, expected.train.indices)
    assert (found.num_outputs, found.notes, found.learned) == (expected.num_outputs, expected.notes, expected.learned)


def write_batches(folder, name):
    """Writes CIFAR's Python version of the binary files in `folder`, as Python 2 did, and takes these away."""
    inner = folder / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")
    inner.mkdir()
    keys = ["labels"] if name == "cifar10" else ["coarse_labels", "fine_labels"]
    for path in folder.glob("*.bin"):
        records = np.fromfile(path, np.uint8).reshape(-1, len(keys) + 3072)
        labels = {key: records[:, i].tolist() for i, key in enumerate(keys)}
        names = [f"{i}.png" for i in range(len(records))]
        batch = {"batch_label": "a batch", **labels, "data": records[:, len(keys) :], "filenames": names}
        (inner / path.stem).write_bytes(python_2(batch))
        path.unlink()
    return inner


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_python_batches(name, tmp_path):
    """Catches the wrong one of two labels, batches in another order, and torchvision's root that is not looked into."""
    written(name, tmp_path)
    read = getattr(population, name)
    expected = read(directory=str(tmp_path), partition=PARTS)
    inner = write_batches(tmp_path, name)
    for directory in (tmp_path, inner):
        same_data(read(directory=str(directory), partition=PARTS), expected)


def test_hostile_batches(tmp_path):
    """Catches a batch that is run, believed, or read in part."""
    written("cifar10", tmp_path)
    inner = write_batches(tmp_path, "cifar10")
    path = inner / "data_batch_2"
    good = path.read_bytes()
    two = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
    wrong = {
        "a call": (HOSTILE["a call of the system"][0], "data_batch_2"),
        "cut": (good[:-100], "data_batch_2"),
        "a list": (b"].", "data_batch_2"),
        "the other CIFAR": (python_2({"data": two["data"], "fine_labels": [1, 2]}), "data_batch_2"),
        "fewer labels": (python_2({**two, "labels": [1]}), "data_batch_2 labels"),
        "a label of text": (python_2({**two, "labels": [1, "2"]}), "data_batch_2 labels image 1"),
        "a label of two bytes": (python_2({**two, "labels": [1, 256]}), "data_batch_2 labels image 1"),
        "smaller images": (python_2({**two, "data": np.zeros((2, 3071), np.uint8)}), "data_batch_2 data"),
        "no images": (python_2({"data": np.zeros((0, 3072), np.uint8), "labels": []}), "data_batch_2 data"),
        "images of text": (python_2({**two, "data": "x"}), "data_batch_2 data"),
    }
    for content, argument in wrong.values():
        path.write_bytes(content)
        with refused(argument):
            population.cifar10(directory=str(tmp_path), partition=PARTS)
    path.write_bytes(python_2({**two, "labels": [1, 10]}))
    with refused("data_batch image 4", value=10):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    path.unlink()
    with refused("directory", rule="data_batch_2"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)


def packed(folder, inner):
    """Moves files into an inner folder, packed."""
    (folder / inner).mkdir(parents=True)
    for path in folder.glob("*-ubyte"):
        (folder / inner / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def test_packed_files_in_torchvision_folders(tmp_path):
    """Catches packed files that are cut, swollen or believed, and one of two data sets that is taken silently."""
    written("mnist", tmp_path)
    expected = population.mnist(directory=str(tmp_path), partition=PARTS)
    packed(tmp_path, "FashionMNIST/raw")
    for directory in (tmp_path, tmp_path / "FashionMNIST", tmp_path / "FashionMNIST" / "raw"):
        same_data(population.mnist(directory=str(directory), partition=PARTS), expected)
    path = tmp_path / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    good = path.read_bytes()
    header = bytes([0, 0, 8, 3])
    for content in (
        b"",
        b"\x1f\x8b",
        good[:-9],
        good[:40] + bytes(20) + good[60:],
        gzip.compress(gzip.decompress(good) + b"x"),
        gzip.compress(gzip.decompress(good)[:-1]),
        gzip.compress(header + b"\xff" * 12),  # an image of 2^96 bytes
        gzip.compress(header + bytes([0, 0, 0, 1] * 3) + bytes(10_000_000)),
    ):
        path.write_bytes(content)
        with refused(path.name):
            population.mnist(directory=str(tmp_path), partition=PARTS)
    path.write_bytes(good)
    written("mnist", tmp_path)
    packed(tmp_path, "MNIST/raw")
    with refused("directory", rule="one data set", hint="Name one"):
        population.mnist(directory=str(tmp_path), partition=PARTS)


@pytest.mark.parametrize(("split", "first"), [("balanced", 0), ("letters", 1)])
def test_emnist(split, first, tmp_path):
    """Catches images on their side, and letters whose labels are one too high."""
    train, test = (RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (5, 3))
    labels, test_labels = (RNG.integers(first, 26 + first, n) for n in (5, 3))
    for part, images, own in (("train", train, labels), ("test", test, test_labels)):
        write_idx(tmp_path / f"emnist-{split}-{part}-images-idx3-ubyte", images.transpose(0, 2, 1))
        write_idx(tmp_path / f"emnist-{split}-{part}-labels-idx1-ubyte", own)
    options = {"directory": str(tmp_path), "partition": PARTS, "standardise": False}
    unpacked = population.emnist(split=split, **options)
    packed(tmp_path, "EMNIST/raw")
    data = population.emnist(split=split, **options)
    same_data(data, unpacked)
    np.testing.assert_array_equal(data.train.table["x"][..., 0], train / np.float32(255))
    np.testing.assert_array_equal(data.test["y"], test_labels - first)
    assert data.num_outputs == (47 if split == "balanced" else 26) and "5 of 1" in data.notes[1]
    with refused("directory", rule="emnist-digits"):
        population.emnist(split="digits", **options)
    name = f"emnist-{split}-test-labels-idx1-ubyte"
    write_idx(tmp_path / "EMNIST" / "raw" / name, np.array([1, 2, 48]))
    with refused(f"{name} image 2", value=48 - first):
        population.emnist(split=split, **options)
    if first:
        write_idx(tmp_path / "EMNIST" / "raw" / name, np.array([1, 0, 2]))
        with refused(f"{name} image 1", value=0):
            population.emnist(split=split, **options)


def write_svhn(folder, train, labels, compressed=True, **more):
    for split in ("train", "test"):
        arrays = {"X": train.transpose(1, 2, 3, 0), "y": np.reshape(labels, (-1, 1)).astype(np.uint8)} | more
        savemat(folder / f"{split}_32x32.mat", arrays, do_compression=compressed)


def test_svhn(tmp_path):
    """Catches the digit 0 that stays 10, and axes in another order."""
    images = RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.array([1, 10, 9, 2, 10, 5])
    (tmp_path / "svhn").mkdir()
    write_svhn(tmp_path / "svhn", images, labels)
    data = population.svhn(directory=str(tmp_path), partition=PARTS, standardise=False)
    np.testing.assert_array_equal(data.train.table["x"], images / np.float32(255))
    np.testing.assert_array_equal(data.test["y"], [1, 0, 9, 2, 0, 5])
    assert "6 of 73,257 training images" in data.notes[1]


def test_broken_svhn(tmp_path):
    images, labels = np.zeros((6, 32, 32, 3), np.uint8), np.arange(1, 7)

    def refuses(argument):
        with refused(argument):
            population.svhn(directory=str(tmp_path), partition=PARTS)

    refuses("directory")
    write_svhn(tmp_path, images, labels)
    good = (tmp_path / "train_32x32.mat").read_bytes()
    for content in (
        b"",
        b"x" * 500,
        good[:200],
        good[:-20],
        b"MATLAB 7.3 MAT-file" + good[19:124] + b"\x00\x02IM" + bytes(99),
    ):
        (tmp_path / "train_32x32.mat").write_bytes(content)
        refuses("train_32x32.mat")
    for change, argument in (
        ({"X": images}, " X"),
        ({"X": images.transpose(1, 2, 3, 0).astype(float)}, " X"),
        ({"y": labels[:5, None]}, " y"),
        ({"y": labels[:, None] - 1}, " y"),
        ({"y": labels[:, None] + 0.5}, " y"),
        ({"y": np.array([["a"]] * 6, object)}, " y"),
    ):
        write_svhn(tmp_path, images, labels, **change)
        refuses(f"train_32x32.mat{argument}")
    write_svhn(tmp_path, images, labels, compressed=False)
    # The first array says that it has 2^30 images.
    content = (tmp_path / "train_32x32.mat").read_bytes()
    sizes = np.array([32, 32, 3, 6], "<i4").tobytes()
    assert content.count(sizes) == 1
    (tmp_path / "train_32x32.mat").write_bytes(content.replace(sizes, np.array([32, 32, 3, 1 << 30], "<i4").tobytes()))
    refuses("train_32x32.mat X")

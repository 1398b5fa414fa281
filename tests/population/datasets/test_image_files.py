"""Images in the published files of CIFAR and MNIST, against their layouts."""

import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population import partitioners
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
    (tmp_path / "data_batch_1").write_bytes(b"\x80")
    with refused("directory", rule="data_batch_1.bin", hint="binary version"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Unpack train-images-idx3-ubyte.gz"):
        population.mnist(directory=str(tmp_path), partition=PARTS)
    written("cifar10", tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(100))
    with refused("data_batch_3.bin", value="100 bytes", rule="3,073"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    (tmp_path / "test_batch.bin").write_bytes(bytes([11] + [0] * 3072))
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3073))
    with refused("test_batch.bin image 0", value=11, rule="below 10"):
        population.cifar10(directory=str(tmp_path), partition=PARTS)
    written("mnist", tmp_path)
    content = (tmp_path / "t10k-labels-idx1-ubyte").read_bytes()
    for wrong, words in ((content + b"x", "bytes behind the header"), (b"ab" + content[2:], "an IDX file of bytes"),
                         (content[:7] + b"\x03" + content[8:-1], "4 labels, one an image")):  # fmt: skip
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(wrong)
        with pytest.raises(ValueError, match=words):
            population.mnist(directory=str(tmp_path), partition=PARTS)

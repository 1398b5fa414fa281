"""This module reads the files in which CIFAR-10, CIFAR-100, and MNIST and its relatives are published."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.population.datasets.quantities import scale_of, units_of
from fedjax_sim.population.federated_data import SCALED_BYTES, FederatedData, cast_examples, existing_path
from fedjax_sim.population.partitioners import Partitioner
from fedjax_sim.population.population import indexed
from fedjax_sim.types import FolderPath, Scale

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32  # of an image of CIFAR, a byte each: all red ones by row, then all green, then all blue ones
IDX_BYTES = 8  # the code in the third byte of an IDX file that stands for numbers of one byte
PICKLED = "The files of CIFAR's Python version can run code when they are read; take the binary version."


@validate.named_arguments
def cifar10(
    *, partition: Partitioner, directory: FolderPath | None = None, standardise: bool | Scale | None = None
) -> FederatedData:
    """Reads CIFAR-10, colour images of ten kinds of things, whose training images a partitioner gives to clients.

    Args:
      partition: such as `population.partitioners.dirichlet(num_clients=100, alpha=0.3)`.
      directory: a folder with the files data_batch_1.bin, ..., data_batch_5.bin and test_batch.bin: CIFAR-10's "binary
        version", cifar-10-binary.tar.gz, unpacked. For None the error says where to get them.
      standardise: whether each colour is brought to mean 0 and standard deviation 1 of the training images, after bytes
        are divided by 255. Beside noise, state constants that are known without the images, in units of x / 255:
        {mean = [0.5, 0.5, 0.5], deviation = [0.25, 0.25, 0.25]}, one number for each colour, or false.

    Returns: `FederatedData` with x [n, 32, 32, 3] float32, ten labels, and no held-out clients. `notes` tells if there
    are other than 50,000 training and 10,000 test images.

    Raises: ValueError that names the file, for a missing file, a size that is no whole number of images, and a label
    out of range.

    Guarantees: pixels, colours and labels are those of the published layout, and statistics those of training images
    (tests/population/datasets/test_image_files.py::test_images_are_as_published).

    References: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    what = "the files of cifar-10-binary.tar.gz"
    train, test = (_cifar(directory, files, what, num_labels=1) for files in (names, ["test_batch.bin"]))
    _check_labels({"data_batch": train[1], "test_batch.bin": test[1]}, 10)
    return _divided(
        "cifar10",
        train,
        test,
        num_outputs=10,
        partition=partition,
        standardise=standardise,
        published=(50_000, 10_000),
    )


@validate.named_arguments
def cifar100(
    *,
    partition: Partitioner,
    directory: FolderPath | None = None,
    labels: Literal["fine", "coarse"] = "fine",
    standardise: bool | Scale | None = None,
) -> FederatedData:
    """Reads CIFAR-100, colour images of a hundred kinds of things in twenty groups.

    A partition by "coarse" labels is one by groups.

    Args:
      partition, standardise: as in `cifar10`. The partitioner sees the labels that are chosen.
      directory: a folder with train.bin and test.bin: CIFAR-100's "binary version", cifar-100-binary.tar.gz, unpacked.
        For None the error says where to get them.
      labels: "fine" for the hundred kinds, "coarse" for the twenty groups.

    Returns: `FederatedData` as `cifar10` does.

    Raises: as `cifar10` does.

    Guarantees: those of `cifar10` (tests/population/datasets/test_image_files.py::test_images_are_as_published).

    References: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    # A record has its coarse label in the first byte, and its fine one in the second.
    column, num_outputs = (1, 100) if labels == "fine" else (0, 20)
    what = "the files of cifar-100-binary.tar.gz"
    train, test = (_cifar(directory, [name], what, num_labels=2) for name in ("train.bin", "test.bin"))
    train, test = ((images, both[:, column]) for images, both in (train, test))
    _check_labels({"train.bin": train[1], "test.bin": test[1]}, num_outputs)
    return _divided(
        "cifar100",
        train,
        test,
        num_outputs=num_outputs,
        partition=partition,
        standardise=standardise,
        published=(50_000, 10_000),
    )


@validate.named_arguments
def mnist(
    *, partition: Partitioner, directory: FolderPath | None = None, standardise: bool | Scale | None = None
) -> FederatedData:
    """Reads MNIST, or a data set in its format such as Fashion-MNIST or KMNIST.

    Args:
      partition, standardise: as in `cifar10`.
      directory: a folder with the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
        t10k-labels-idx1-ubyte, unpacked. For None the error says where to get them.

    Returns: `FederatedData` with x [n, 28, 28, 1] float32, ten labels, and no held-out clients. `notes` tells if there
    are other than 60,000 training and 10,000 test images.

    Raises: ValueError that names the file, for a missing file, a file that is no IDX file of bytes, another size than
    its header says, another number of labels than of images, test images of another shape than training images, and a
    label out of range.

    Guarantees: pixels and labels are those of the published layout, and statistics those of training images
    (tests/population/datasets/test_image_files.py::test_images_are_as_published).

    References: LeCun, Cortes, Burges, The MNIST database; Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    where = "https://github.com/zalandoresearch/fashion-mnist, or one of MNIST's mirrors"
    folder = _folder(directory, "the four files of MNIST, or of Fashion-MNIST", where)
    parts = []
    for split in ("train", "t10k"):
        images = _idx(folder / f"{split}-images-idx3-ubyte", 3)
        labels = _idx(folder / f"{split}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            validate.fail(f"{split}-labels-idx1-ubyte", f"{len(images):,} labels, one an image", len(labels))
        parts.append((images[..., None], labels))
    train, test = parts
    if train[0].shape[1:] != test[0].shape[1:]:
        validate.fail("t10k-images-idx3-ubyte", f"images of shape {train[0].shape[1:]}", test[0].shape[1:])
    _check_labels({"train-labels-idx1-ubyte": train[1], "t10k-labels-idx1-ubyte": test[1]}, 10)
    return _divided(
        "mnist",
        train,
        test,
        num_outputs=10,
        partition=partition,
        standardise=standardise,
        published=(60_000, 10_000),
    )


def _folder(directory: FolderPath | None, what: str, where: str) -> pathlib.Path:
    """Returns the folder; if none is given the error says what to download, and from where."""
    if directory is None:
        hint = f"Download them from {where}, unpack them, and give their folder."
        validate.fail("directory", f"a folder with {what}", "none", hint)
    return existing_path("directory", directory)


def _bytes_of(path: pathlib.Path, hint: str = "") -> np.ndarray:
    """Returns the bytes of a file of the data set."""
    if not path.is_file():
        packed = [other.name for other in path.parent.glob(f"{path.name}.*")]
        hint = f"Unpack {packed[0]}." if packed else hint
        validate.fail("directory", f"a folder with the file {path.name}", str(path.parent), hint)
    return np.frombuffer(content_of(path), np.uint8)


def _cifar(
    directory: FolderPath | None, names: Sequence[str], what: str, num_labels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reads files of CIFAR, whose records are `num_labels` bytes of labels and 3,072 bytes of an image.

    Args:
      directory: the user's folder. None is refused, and the error says what to download.
      names: of the files, in the order of the rows.
      what: the files in words, for that error.
      num_labels: 1 in CIFAR-10; 2 in CIFAR-100, first the coarse and then the fine label.

    Returns: images [n, 32, 32, 3] uint8, the last axis red, green, blue; and labels uint8, [n] if a record has one
      label, [n, 2] if it has two.
    """
    folder = _folder(directory, what, CIFAR)
    parts = []
    for name in names:
        # The Python version has a file of the same name without the suffix.
        content = _bytes_of(folder / name, PICKLED if (folder / pathlib.Path(name).stem).is_file() else "")
        if not len(content) or len(content) % (num_labels + PIXELS):
            validate.fail(name, f"a number of records of {num_labels + PIXELS:,} bytes", f"{len(content):,} bytes")
        parts.append(content.reshape(-1, num_labels + PIXELS))
    records = np.concatenate(parts)
    images = records[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = records[:, :num_labels]
    return images, labels[:, 0] if num_labels == 1 else labels


def _idx(path: pathlib.Path, dimensions: int) -> np.ndarray:
    """Reads an IDX file of bytes with so many dimensions."""
    content = _bytes_of(path)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4].tolist() != [0, 0, IDX_BYTES, dimensions]:
        rule = f"an IDX file of bytes in {dimensions} dimensions, beginning with 0, 0, {IDX_BYTES}, {dimensions}"
        validate.fail(path.name, rule, content[:4].tolist())
    shape = tuple(content[4:header].view(">u4").tolist())
    if len(content) - header != math.prod(shape):
        validate.fail(path.name, f"{math.prod(shape):,} bytes behind the header", f"{len(content) - header:,}")
    return content[header:].reshape(shape)


def _check_labels(labels: dict[str, np.ndarray], num_outputs: int) -> None:
    """Refuses labels that are out of range; a file of another data set often has such."""
    for name, values in labels.items():
        if len(values) and values.max() >= num_outputs:
            row = int(np.argmax(values >= num_outputs))
            validate.fail(f"{name} image {row}", f"a label below {num_outputs}", int(values[row]))


def _divided(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    num_outputs: int,
    partition: Partitioner,
    standardise: bool | Scale | None,
    published: tuple[int, int],
) -> FederatedData:
    """Makes the data set of images in bytes and their labels: pixel b becomes (b / 255 - mean) / deviation.

    Mean and deviation are those of the pixel's colour.

    Args:
      name: of the data set.
      train: images [n, height, width, colours] uint8, and labels [n] integers in [0, num_outputs). One colour is grey,
        three are red, green and blue.
      test: the test images and labels, of the same shape but for n.
      num_outputs: the number of classes.
      partition: gives the training rows to clients.
      standardise: as in `cifar10`; mean and deviation are in units of b / 255.
      published: the numbers of training and of test images that the authors published. If others are there, `notes`
        says so.
    """
    colours = ("red", "green", "blue") if train[0].shape[-1] == 3 else ("grey",)
    mean, deviation, learned = scale_of(standardise, colours, lambda: _colours(train[0]))
    mean, deviation = np.float32(mean), np.float32(deviation)
    training, testing = (
        cast_examples(
            where, {"x": (images / np.float32(255) - mean) / deviation, "y": labels}, "classification", num_outputs
        )
        for where, (images, labels) in (("train", train), ("test", test))
    )
    shape = training["x"].shape[1:]
    units = None
    if standardise is not False:  # of each number of an image, in units of x / 255
        flat_mean, flat_deviation = (np.broadcast_to(numbers, shape).reshape(-1) for numbers in (mean, deviation))
        units = units_of(flat_mean, flat_deviation, flat_mean.size)
    notes = (SCALED_BYTES,)
    if learned:
        notes += ("each colour is standardised by the training images",)
    elif standardise:
        notes += ("each colour is standardised by stated constants",)
    counts = (len(train[1]), len(test[1]))
    if counts != published:
        parts = zip(counts, published, ("training", "test"), strict=True)
        notes += ("; ".join(f"{count:,} of {all_of_them:,} {split} images" for count, all_of_them, split in parts),)
    return FederatedData(
        train=indexed(training, partition.divide(training["y"]), learned=learned),
        test=testing,
        held_out=None,
        input_shape=training["x"].shape[1:],
        num_outputs=num_outputs,
        task="classification",
        name=name,
        units=units,
        notes=notes,
    )


def _colours(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of each colour over images of bytes, as float32 of values in [0, 1].

    They come from counts of the 256 values, so that no copy of the images as wide numbers is made.
    """
    values = np.arange(256) / 255
    counts = [np.bincount(images[..., colour].reshape(-1), minlength=256) for colour in range(images.shape[-1])]
    shares = np.stack(counts) / images[..., 0].size
    mean = shares @ values
    deviation = np.sqrt(shares @ values**2 - mean**2)
    # An image of one colour everywhere stays as it is.
    return mean.astype(np.float32), np.where(deviation > 0, deviation, 1.0).astype(np.float32)

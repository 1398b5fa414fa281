"""This module reads the files in which CIFAR-10, CIFAR-100, SVHN, and MNIST and its relatives are published."""

from __future__ import annotations

import gzip
import io
import math
import pathlib
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.pickled_arrays import read_pickled
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.population.datasets.hdf5_file import MOST_EXPANSION
from fedjax_sim.population.datasets.quantities import scale_of, units_of
from fedjax_sim.population.federated_data import SCALED_BYTES, FederatedData, cast_examples, existing_path
from fedjax_sim.population.partitioners import Partitioner
from fedjax_sim.population.population import indexed
from fedjax_sim.types import FolderPath, Scale

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32  # of an image of CIFAR, a byte each: all red ones by row, then all green, then all blue ones
IDX_BYTES = 8  # the code in the third byte of an IDX file that stands for numbers of one byte
MNIST_FOLDERS = ("MNIST", "FashionMNIST", "KMNIST", "QMNIST")  # in which torchvision keeps their folders "raw"
EMNIST_SPLITS = {  # outputs, the label of output 0, training and test images, as published
    "balanced": (47, 0, 112_800, 18_800),
    "byclass": (62, 0, 697_932, 116_323),
    "bymerge": (47, 0, 697_932, 116_323),
    "digits": (10, 0, 240_000, 40_000),
    "letters": (26, 1, 124_800, 20_800),
    "mnist": (10, 0, 60_000, 10_000),
}


@validate.named_arguments
def cifar10(
    *, partition: Partitioner, directory: FolderPath | None = None, standardise: bool | Scale | None = None
) -> FederatedData:
    """Reads CIFAR-10, colour images of ten kinds of things, whose training images a partitioner gives to clients.

    Args:
      partition: such as `population.partitioners.dirichlet(num_clients=100, alpha=0.3)`.
      directory: a folder with the files data_batch_1, ..., data_batch_5 and test_batch of CIFAR-10's "python version",
        or with the same names and the suffix .bin of its "binary version", unpacked; or a folder in which one of them
        lies as cifar-10-batches-py or cifar-10-batches-bin, such as torchvision's root. Where both lie, the binary one
        is read. For None the error says where to get them.
      standardise: whether each colour is brought to mean 0 and standard deviation 1 of the training images, after bytes
        are divided by 255. Beside noise, state constants that are known without the images, in units of x / 255:
        {mean = [0.5, 0.5, 0.5], deviation = [0.25, 0.25, 0.25]}, one number for each colour, or false.

    Returns: `FederatedData` with x [n, 32, 32, 3] float32, ten labels, and no held-out clients. `notes` tells if there
    are other than 50,000 training and 10,000 test images.

    Raises: ValueError that names the file, for a missing file, a size that is no whole number of images, a label out of
    range, and a Python batch with anything but texts, numbers and arrays in it.

    Guarantees: pixels, colours and labels are those of the published layout, and statistics those of training images
    (tests/population/datasets/test_image_files.py::test_images_are_as_published). Both versions are the same data, and
    reading the Python version runs nothing (::test_python_batches, ::test_hostile_batches).

    References: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    names = [f"data_batch_{i}" for i in range(1, 6)]
    what = "the files of cifar-10-python.tar.gz or cifar-10-binary.tar.gz"
    folder = _cifar_folder(directory, what, "cifar-10-batches", names[0])
    train, test = (_cifar(folder, files, ("labels",)) for files in (names, ["test_batch"]))
    train, test = ((images, labels[:, 0]) for images, labels in (train, test))
    _check_labels({"data_batch": train[1], "test_batch": test[1]}, 10)
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
      directory: a folder with train and test of CIFAR-100's "python version", or with train.bin and test.bin of its
        "binary version", unpacked; or a folder in which one of them lies as cifar-100-python or cifar-100-binary, such
        as torchvision's root. Where both lie, the binary one is read. For None the error says where to get them.
      labels: "fine" for the hundred kinds, "coarse" for the twenty groups.

    Returns: `FederatedData` as `cifar10` does.

    Raises: as `cifar10` does.

    Guarantees: those of `cifar10` (tests/population/datasets/test_image_files.py::test_images_are_as_published).

    References: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    # A record has its coarse label in the first byte, and its fine one in the second.
    column, num_outputs = (1, 100) if labels == "fine" else (0, 20)
    folder = _cifar_folder(
        directory, "the files of cifar-100-python.tar.gz or cifar-100-binary.tar.gz", "cifar-100", "train"
    )
    train, test = (_cifar(folder, [name], ("coarse_labels", "fine_labels")) for name in ("train", "test"))
    train, test = ((images, both[:, column]) for images, both in (train, test))
    _check_labels({"train": train[1], "test": test[1]}, num_outputs)
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
        t10k-labels-idx1-ubyte, or with the same names and .gz; or a folder in which they lie as raw, MNIST/raw,
        FashionMNIST/raw or KMNIST/raw, such as torchvision's root. Where both forms of a file lie, the unpacked one is
        read. For None the error says where to get them.

    Returns: `FederatedData` with x [n, 28, 28, 1] float32, ten labels, and no held-out clients. `notes` tells if there
    are other than 60,000 training and 10,000 test images.

    Raises: ValueError that names the file, for a missing file, several data sets in one folder, a file that is no IDX
    file of bytes, another size than its header says, another number of labels than of images, test images of another
    shape than training images, and a label out of range.

    Guarantees: pixels and labels are those of the published layout, and statistics those of training images
    (tests/population/datasets/test_image_files.py::test_images_are_as_published). Packed files and torchvision's
    folders are the same data (::test_packed_files_in_torchvision_folders).

    References: LeCun, Cortes, Burges, The MNIST database; Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017.
    """
    where = "https://github.com/zalandoresearch/fashion-mnist, or one of MNIST's mirrors"
    folder = _folder(directory, "the four files of MNIST, or of Fashion-MNIST", where)
    inner = ["raw", *(f"{name}/raw" for name in MNIST_FOLDERS)]
    folder = _with_file(folder, inner, ["train-images-idx3-ubyte"], (".gz",))
    train, test = (_idx_images(folder, split) for split in ("train", "t10k"))
    _check_labels({"train-labels-idx1-ubyte": train[1], "t10k-labels-idx1-ubyte": test[1]}, 10)
    return _divided_idx(
        "mnist", train, test, "t10k", 10, partition=partition, standardise=standardise, published=(60_000, 10_000)
    )


@validate.named_arguments
def emnist(
    *,
    partition: Partitioner,
    directory: FolderPath | None = None,
    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced",
    standardise: bool | Scale | None = None,
) -> FederatedData:
    """Reads EMNIST, handwritten digits and letters, whose training images a partitioner gives to clients.

    The files do not say who wrote an image. `tff_hdf5` reads the version with writers as clients.

    Args:
      partition, standardise: as in `cifar10`.
      directory: a folder with NIST's files emnist-SPLIT-train-images-idx3-ubyte and so on (train and test, images and
        labels), packed as .gz or not; or a folder in which they lie as raw, gzip, EMNIST/raw or EMNIST/raw/gzip, such
        as torchvision's root. For None the error says where to get them.
      split: "byclass" has 62 classes (digits, capitals, small letters); "bymerge" and "balanced" have 47, where small
        letters that look like capitals are one with them; "letters" has 26; "digits" and "mnist" have 10.

    Returns: `FederatedData` with x [n, 28, 28, 1] float32 and no held-out clients. Images stand upright: the files have
    them by column. Labels of "letters", 1 to 26 in the files, are 0 to 25. `notes` tells if there are other numbers of
    images than those published.

    Raises: as `mnist` does.

    Guarantees: pixels and labels are those of the published layout
    (tests/population/datasets/test_image_files.py::test_emnist).

    References: Cohen, Afshar, Tapson, van Schaik, EMNIST: an extension of MNIST to handwritten letters, 2017.
    """
    where = "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)"
    folder = _folder(directory, f"the four files emnist-{split}-...", where)
    inner = ["raw", "gzip", "EMNIST/raw", "EMNIST/raw/gzip"]
    folder = _with_file(folder, inner, [f"emnist-{split}-train-images-idx3-ubyte"], (".gz",))
    num_outputs, first, *published = EMNIST_SPLITS[split]
    parts = []
    for part in ("train", "test"):
        name = f"emnist-{split}-{part}"
        images, labels = _idx_images(folder, name)
        if len(labels) and labels.min() < first:
            row = int(np.argmin(labels))
            validate.fail(f"{name}-labels-idx1-ubyte image {row}", f"a label of at least {first}", int(labels[row]))
        parts.append((images.transpose(0, 2, 1, 3), labels - np.uint8(first)))
        _check_labels({f"{name}-labels-idx1-ubyte": parts[-1][1]}, num_outputs)
    train, test = parts
    return _divided_idx(
        "emnist",
        train,
        test,
        f"emnist-{split}-test",
        num_outputs,
        partition=partition,
        standardise=standardise,
        published=(published[0], published[1]),
    )


@validate.named_arguments
def svhn(
    *, partition: Partitioner, directory: FolderPath | None = None, standardise: bool | Scale | None = None
) -> FederatedData:
    """Reads SVHN, colour images of the digits of house numbers, cropped to 32 x 32 pixels.

    Args:
      partition, standardise: as in `cifar10`.
      directory: a folder with train_32x32.mat and test_32x32.mat of "Format 2", or a folder in which they lie as SVHN
        or svhn. For None the error says where to get them.

    Returns: `FederatedData` as `cifar10` does. The digit 0, whose label is 10 in the files, has label 0. `notes` tells
    if there are other than 73,257 training and 26,032 test images.

    Raises: ValueError that names the file, for a missing file, what is no MATLAB file of version 5, arrays X and y of
    another shape or type, and a label out of range.

    Guarantees: pixels, colours and labels are those of the published layout
    (tests/population/datasets/test_image_files.py::test_svhn). A file whose arrays say that they are larger than
    deflate can pack into it is refused before they are read (::test_broken_svhn).

    References: Netzer, Wang, Coates, Bissacco, Wu, Ng, Reading digits in natural images with unsupervised feature
    learning, 2011.
    """
    what = "train_32x32.mat and test_32x32.mat"
    folder = _folder(directory, what, "http://ufldl.stanford.edu/housenumbers")
    folder = _with_file(folder, ["SVHN", "svhn"], ["train_32x32.mat"])
    train, test = (_matlab_images(folder / f"{split}_32x32.mat") for split in ("train", "test"))
    return _divided(
        "svhn",
        train,
        test,
        num_outputs=10,
        partition=partition,
        standardise=standardise,
        published=(73_257, 26_032),
    )


def _folder(directory: FolderPath | None, what: str, where: str) -> pathlib.Path:
    """Returns the folder; if none is given the error says what to download, and from where."""
    if directory is None:
        hint = f"Download them from {where}, unpack them, and give their folder."
        validate.fail("directory", f"a folder with {what}", "none", hint)
    return existing_path("directory", directory)


def _with_file(
    folder: pathlib.Path, inner: Sequence[str], names: Sequence[str], suffixes: Sequence[str] = ()
) -> pathlib.Path:
    """Returns the folder, or the one folder in it, that has a file of these names.

    Args:
      folder: the user's.
      inner: folders in it where the files may lie.
      names: of files, of which one is enough.
      suffixes: which the names may also have.

    Returns: the user's folder if the files lie there or nowhere, so that the reader says which file is missing.
    """
    full_names = [name + suffix for name in names for suffix in ("", *suffixes)]
    places = [place for place in (folder, *(folder / name for name in inner)) if _has_any(place, full_names)]
    if len(places) > 1 and places[0] != folder:
        rule = "a folder with one data set of these files"
        validate.fail("directory", rule, ", ".join(map(str, places)), "Name one of these folders.")
    return places[0] if places else folder


def _has_any(folder: pathlib.Path, names: Sequence[str]) -> bool:
    """Returns whether one of the names is there, as a file or as anything else that the reader then refuses."""
    return any((folder / name).exists() for name in names)


def _bytes_of(path: pathlib.Path) -> bytes:
    """Returns the content of a file of the data set."""
    if not path.exists():
        validate.fail("directory", f"a folder with the file {path.name}", str(path.parent))
    return content_of(path)


def _cifar_folder(directory: FolderPath | None, what: str, name: str, file: str) -> pathlib.Path:
    """Returns the folder with CIFAR's files.

    Args:
      directory: the user's folder. None is refused, and the error says what to download.
      what: the files in words, for that error.
      name: how the names of the folders begin, in which they are packed.
      file: the name of the first file, in the Python version.
    """
    folder = _folder(directory, what, CIFAR)
    if _has_any(folder, [f"{file}.bin", file]):
        return folder
    for inner in ("bin", "binary", "py", "python"):
        if (folder / f"{name}-{inner}").is_dir():
            return folder / f"{name}-{inner}"
    return folder


def _cifar(folder: pathlib.Path, names: Sequence[str], labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Reads files of CIFAR: NAME.bin of the binary version, or NAME of the Python version.

    A record of the binary version has a byte a label and 3,072 bytes of an image. A file of the Python version is a
    dict with such images, "data" [n, 3072], and with lists of labels.

    Args:
      folder: with the files.
      names: of the files without a suffix, in the order of the rows.
      labels: names of the labels in the Python version, in the order of the binary one.

    Returns: images [n, 32, 32, 3] uint8, the last axis red, green, blue; and labels [n, number of `labels`] uint8.
    """
    num_labels = len(labels)
    parts = []
    is_python = not _has_any(folder, [f"{name}.bin" for name in names]) and _has_any(folder, names)
    for name in names:
        if is_python:
            parts.append(_python_batch(folder / name, labels))
            continue
        content = np.frombuffer(_bytes_of(folder / f"{name}.bin"), np.uint8)
        if not len(content) or len(content) % (num_labels + PIXELS):
            rule = f"a number of records of {num_labels + PIXELS:,} bytes"
            validate.fail(f"{name}.bin", rule, f"{len(content):,} bytes")
        parts.append(content.reshape(-1, num_labels + PIXELS))
    records = np.concatenate(parts)
    return records[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, :num_labels]


def _python_batch(path: pathlib.Path, labels: Sequence[str]) -> np.ndarray:
    """Returns the records of a file of CIFAR's Python version as the binary version has them, [n, labels + 3072] uint8.

    Args:
      path: of the file.
      labels: names of its lists of labels.
    """
    name = path.name
    batch = read_pickled(name, _bytes_of(path))
    wanted = ["data", *labels]
    if not isinstance(batch, dict) or not all(key in batch for key in wanted):
        found = sorted(batch) if isinstance(batch, dict) else type(batch).__name__
        validate.fail(name, f"a dict with {', '.join(wanted)}", found, "Is it a batch of the other CIFAR?")
    images = batch["data"]
    is_images = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (PIXELS,)
    if not is_images or not len(images):
        shown = f"{images.dtype}{list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        validate.fail(f"{name} data", f"an array of bytes with rows of {PIXELS:,}", shown)
    columns = []
    for key in labels:
        values = batch[key]
        if not isinstance(values, list) or len(values) != len(images):
            shown = f"{len(values):,}" if isinstance(values, list) else type(values).__name__
            validate.fail(f"{name} {key}", f"a list of {len(images):,} labels, one an image", shown)
        for row, label in enumerate(values):
            if type(label) is not int or not (0 <= label < 256):
                shown = label if isinstance(label, int) else type(label).__name__
                validate.fail(f"{name} {key} image {row}", "a label as an integer from 0 to 255", shown)
        columns.append(np.array(values, np.uint8))
    return np.concatenate([np.stack(columns, 1), images], axis=1)


def _idx(folder: pathlib.Path, name: str, dimensions: int) -> np.ndarray:
    """Reads an IDX file of bytes.

    Args:
      folder: where it lies.
      name: of the file. If there is only NAME.gz, that is unpacked.
      dimensions: how many the array must have.
    """
    path = folder / name
    packed = folder / f"{name}.gz"
    is_packed = not path.exists() and packed.exists()
    name = packed.name if is_packed else name
    header = 4 + 4 * dimensions
    content = _bytes_of(packed if is_packed else path)
    start = _unpacked(name, content, header) if is_packed else content[:header]
    if len(start) < header or [*start[:4]] != [0, 0, IDX_BYTES, dimensions]:
        rule = f"an IDX file of bytes in {dimensions} dimensions, beginning with 0, 0, {IDX_BYTES}, {dimensions}"
        validate.fail(name, rule, [*start[:4]])
    shape = tuple(np.frombuffer(start[4:], ">u4").tolist())
    size = math.prod(shape)
    if is_packed:
        if size > MOST_EXPANSION * len(content):
            rule = f"at most {MOST_EXPANSION:,} times the file's {len(content):,} bytes"
            validate.fail(name, rule, f"{size:,} bytes behind the header", "No compression packs bytes closer.")
        content = _unpacked(name, content, header + size + 1)
    if len(content) - header != size:
        validate.fail(name, f"{size:,} bytes behind the header", f"{len(content) - header:,} or more")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _unpacked(name: str, content: bytes, length: int) -> bytes:
    """Returns the first bytes of a gzip file, up to `length`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return file.read(length)
    except (OSError, EOFError, zlib.error) as error:
        validate.fail(name, "a whole gzip file", str(error), "Take the file anew.")


def _idx_images(folder: pathlib.Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads NAME-images-idx3-ubyte and NAME-labels-idx1-ubyte: images [n, height, width, 1], labels [n], both uint8."""
    images = _idx(folder, f"{name}-images-idx3-ubyte", 3)
    labels = _idx(folder, f"{name}-labels-idx1-ubyte", 1)
    if len(images) != len(labels):
        validate.fail(f"{name}-labels-idx1-ubyte", f"{len(images):,} labels, one an image", len(labels))
    return images[..., None], labels


def _matlab_images(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of SVHN.

    Args:
      path: of the file.

    Returns: images [n, 32, 32, 3] uint8, and labels [n] uint8 in 0..9.
    """
    from scipy.io import loadmat, whosmat

    name = path.name
    content = _bytes_of(path)
    try:
        # Sizes are checked as they are declared, before anything is allocated.
        declared = {key: (shape, kind) for key, shape, kind in whosmat(io.BytesIO(content))}
        for key in ("X", "y"):
            if key not in declared:
                validate.fail(name, "arrays X and y", sorted(declared), "Take the files of Format 2.")
        shape, kind = declared["X"]
        count = shape[-1]
        if kind != "uint8" or shape != (32, 32, 3, count) or not 0 < count * PIXELS <= MOST_EXPANSION * len(content):
            validate.fail(f"{name} X", "bytes [32, 32, 3, n], as many as the file can hold", f"{kind}{list(shape)}")
        if declared["y"][0] != (count, 1):
            validate.fail(f"{name} y", f"[{count}, 1], a label an image", list(declared["y"][0]))
        arrays = loadmat(io.BytesIO(content), variable_names=["X", "y"])
    except validate.InvalidArgument:
        raise
    except Exception as error:  # whatever SciPy meets in bytes that are no such file
        hint = "Take the file anew; MATLAB's later format, 7.3, is not SVHN's."
        validate.fail(name, "a MATLAB file of version 5", f"{type(error).__name__}: {error}", hint)
    labels = arrays["y"][:, 0]
    if labels.dtype.kind not in "iuf" or not np.isin(labels, np.arange(1, 11)).all():
        validate.fail(f"{name} y", "labels from 1 to 10, which stands for the digit 0", str(np.unique(labels)[:20]))
    return arrays["X"].transpose(3, 0, 1, 2), (labels % 10).astype(np.uint8)


def _check_labels(labels: dict[str, np.ndarray], num_outputs: int) -> None:
    """Refuses labels that are out of range; a file of another data set often has such."""
    for name, values in labels.items():
        if len(values) and values.max() >= num_outputs:
            row = int(np.argmax(values >= num_outputs))
            validate.fail(f"{name} image {row}", f"a label below {num_outputs}", int(values[row]))


def _divided_idx(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    test_files: str,
    num_outputs: int,
    *,
    partition: Partitioner,
    standardise: bool | Scale | None,
    published: tuple[int, int],
) -> FederatedData:
    """Makes the data set of IDX files, whose images say their shape.

    Args:
      name, train, test, num_outputs, partition, standardise, published: as in `_divided`.
      test_files: how the names of the test files begin, for an error.
    """
    if train[0].shape[1:] != test[0].shape[1:]:
        validate.fail(f"{test_files}-images-idx3-ubyte", f"images of shape {train[0].shape[1:]}", test[0].shape[1:])
    return _divided(
        name,
        train,
        test,
        num_outputs=num_outputs,
        partition=partition,
        standardise=standardise,
        published=published,
    )


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

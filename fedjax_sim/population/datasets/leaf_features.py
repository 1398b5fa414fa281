"""Two data sets of LEAF whose features are not numbers: Sent140's tweets as counts of words, CelebA's photographs."""

from __future__ import annotations

import collections
import re
from typing import Annotated, Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.datasets.leaf_tff import leaf_split
from fedjax_sim.population.federated_data import FederatedData, existing, from_sites
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, PositiveInt

__all__ = ["celeba", "sent140"]

FIELDS = ("id", "date", "query", "user", "text")  # of a tweet


def words_of(text: str) -> list[str]:
    """Words and punctuation of a tweet, as LEAF splits it, in small letters.

    >>> words_of("I don't, @you!")
    ['i', "don't", ',', 'you', '!']
    """
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


@validate.named_arguments
def sent140(
    *,
    directory: FolderPath,
    num_words: PositiveInt = 1000,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**33,
) -> FederatedData:
    """LEAF's Sent140: is a tweet positive? A user is a client; features count words, as in LEAF's bag of words.

    Args:
      directory: holds LEAF's train/*.json and test/*.json; examples are [id, date, query, user, text], labels 0, 1.
      num_words: V, the words that are most often in the training tweets (of equally many, the alphabet's first).
      max_bytes: refuse tweets that take more as a table, 4 n V.

    Returns: `FederatedData`, task "binary", x [n, V]: column j counts `vocabulary[j]`; held-out clients are the users
      of test/.

    Raises: ValueError or TypeError that names file and user; MemoryError.

    Guarantees: tests/population/datasets/test_leaf_features.py::test_sent140.

    References: Go, Bhayani, Huang, Twitter sentiment classification using distant supervision, 2009; Caldas et al.,
      LEAF, 2018.
    """
    folder = existing("directory", directory)
    splits = {split: leaf_split(folder / split) for split in ("train", "test")}
    for split, clients in splits.items():
        for user, client in clients.items():
            x = client["x"]
            if len(x) and (x.dtype.kind != "U" or x.ndim != 2 or x.shape[1] < len(FIELDS)):
                validate.fail(f"{split} {user!r}.x", f"tweets [{', '.join(FIELDS)}]", x[0].tolist(), error=TypeError)
    counts: collections.Counter[str] = collections.Counter()
    for client in splits["train"].values():
        for text in _texts(client):
            counts.update(words_of(text))
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))[:num_words]
    num_rows = sum(len(client["y"]) for clients in splits.values() for client in clients.values())
    hint = "Set a smaller num_words, or sample fewer users in LEAF."
    validate.fits_in_memory("directory", 4 * num_rows * len(vocabulary), max_bytes, hint=hint)
    column = {word: j for j, word in enumerate(vocabulary)}

    def bags(client: dict[str, np.ndarray]) -> np.ndarray:
        x = np.zeros((len(client["y"]), len(vocabulary)), np.float32)
        for i, text in enumerate(_texts(client)):
            for word in words_of(text):
                if word in column:
                    x[i, column[word]] += 1
        return x

    train, test = (
        {user: {"x": bags(client), "y": _labels(client["y"])} for user, client in clients.items()}
        for clients in splits.values()
    )
    about: dict[str, Any] = {"label_names": ("negative", "positive"), "vocabulary": tuple(vocabulary)}
    return from_sites(train, test, task="binary", num_outputs=1, name="sent140", **about)


@validate.named_arguments
def celeba(
    *,
    directory: FolderPath,
    images: FolderPath,
    image_size: Annotated[int, Integer(1, 4096)] = 84,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
) -> FederatedData:
    """LEAF's CelebA: a celebrity's photographs are a client; does the person smile? Needs the extra `images` (Pillow).

    Args:
      directory: holds LEAF's train/*.json and test/*.json, whose examples are names of image files with labels 0 and 1.
      images: the folder with those files (img_align_celeba), JPEG or PNG.
      image_size: s, to which they are resized, as LEAF does.
      max_bytes: refuse images that take more as a table, 12 n s^2.

    Returns: `FederatedData`, task "binary", x [n, s, s, 3] in [0, 1].

    Raises: ImportError without Pillow, naming the extra; ValueError or TypeError that names file and user, for images
      that are not there and names that are paths; MemoryError.

    Guarantees: tests/population/datasets/test_leaf_features.py::test_celeba, ::test_broken_celeba.

    References: Liu et al., Deep learning face attributes in the wild, 2015; Caldas et al., LEAF, 2018.
    """
    folder, photographs = existing("directory", directory), existing("images", images)
    try:
        import PIL.Image as pillow
    except ImportError:
        message = "celeba: expected Pillow to be installed. Install the extra: pip install 'fedjax_sim[images]'."
        raise ImportError(message) from None
    splits = {split: leaf_split(folder / split) for split in ("train", "test")}
    num_rows = sum(len(client["y"]) for clients in splits.values() for client in clients.values())
    hint = "Set a smaller image_size, or sample fewer users in LEAF."
    validate.fits_in_memory("directory", 12 * num_rows * image_size**2, max_bytes, hint=hint)

    def image(place: str, name: str) -> np.ndarray:
        if "/" in name or "\\" in name:
            validate.fail(place, "the name of a file in the folder of images", name)
        path = existing(place, str(photographs / name), folder=False)
        try:
            with pillow.open(path, formats=("JPEG", "PNG")) as file:
                pixels = np.asarray(file.resize((image_size, image_size)).convert("RGB"))
        except (OSError, SyntaxError, pillow.DecompressionBombError) as error:
            validate.fail(place, "a JPEG or PNG image", name, str(error))
        return pixels.astype(np.float32) / 255

    def photos(place: str, names: np.ndarray) -> np.ndarray:
        if len(names) and (names.dtype.kind != "U" or names.ndim != 1):
            validate.fail(place, "names of image files", names[0].tolist(), error=TypeError)
        shape = (len(names), image_size, image_size, 3)
        return np.array([image(place, str(name)) for name in names], np.float32).reshape(shape)

    train, test = (
        {
            user: {"x": photos(f"{split} {user!r}.x", client["x"]), "y": _labels(client["y"])}
            for user, client in clients.items()
        }
        for split, clients in splits.items()
    )
    return from_sites(train, test, task="binary", num_outputs=1, name="celeba")


def _texts(client: dict[str, np.ndarray]) -> list[str]:
    column = FIELDS.index("text")
    return [str(tweet[column]) for tweet in client["x"]]


def _labels(y: np.ndarray) -> np.ndarray:
    """Labels as numbers, where they are numbers written as texts."""
    return np.array([validate.decimal(str(label)) for label in y]) if y.dtype.kind == "U" else y

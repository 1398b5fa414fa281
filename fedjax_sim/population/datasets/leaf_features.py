"""This module reads two data sets of LEAF whose features are not numbers: tweets (Sent140) and photographs (CelebA)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.regular_files import opened
from fedjax_sim.population.datasets.leaf_tff import leaf_split
from fedjax_sim.population.datasets.vocabularies import frequent_words, stated_tokens, vocabulary_learned
from fedjax_sim.population.federated_data import FederatedData, existing_path, from_sites
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, PositiveInt

MOST_PICTURE_BYTES = 1 << 27  # of a picture in RGB before it is resized; those of CelebA have 0.1 MB
TWEET_FIELDS = ("id", "date", "query", "user", "text")  # of a tweet


def tokens_of(text: str) -> list[str]:
    """Splits a tweet into words and punctuation, as LEAF does, in lower case.

    >>> tokens_of("I don't, @you!")
    ['i', "don't", ',', 'you', '!']
    """
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


@validate.named_arguments
def sent140(
    *,
    directory: FolderPath,
    num_words: PositiveInt = 1000,
    vocabulary: Sequence[str] | None = None,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**33,
) -> FederatedData:
    """Reads Sent140 of LEAF, where the task is to predict whether a tweet is positive. Each user is a client.

    The features of a tweet are the counts of its words, LEAF's bag of words.

    Args:
      directory: a folder with LEAF's train/*.json and test/*.json. Examples are [id, date, query, user, text], and
        labels are 0 or 1.
      num_words: V, the size of the vocabulary. It holds the most frequent words of the training tweets. Words of equal
        frequency are taken in alphabetical order.
      vocabulary: the words, in the order of the columns, in place of the most frequent ones. Noise needs them stated,
        since one client could change them. None: the most frequent ones.
      max_bytes: the most bytes that the table of counts may take, 4 n V for n tweets.

    Returns: `FederatedData` of the task "binary", with x [n, V], where column j counts `vocabulary[j]`. Held-out
      clients are the users of test/.

    Raises: ValueError or TypeError that names file and user. MemoryError beyond `max_bytes`.

    Guarantees: the counts of words equal those by hand, and words that only test tweets have are not in the vocabulary
    (tests/population/datasets/test_leaf_features.py::test_sent140).

    References: Go, Bhayani, Huang, Twitter sentiment classification using distant supervision, 2009; Caldas et al.,
      LEAF, 2018.
    """
    folder = existing_path("directory", directory)
    splits = {split: leaf_split(folder / split) for split in ("train", "test")}
    for split, clients in splits.items():
        for user, client in clients.items():
            x = client["x"]
            if len(x) and (x.dtype.kind != "U" or x.ndim != 2 or x.shape[1] < len(TWEET_FIELDS)):
                validate.fail(
                    f"{split} {user!r}.x", f"tweets [{', '.join(TWEET_FIELDS)}]", x[0].tolist(), error=TypeError
                )
    if vocabulary is None:
        tweets = (text for client in splits["train"].values() for text in _texts(client))
        words = frequent_words((word for text in tweets for word in tokens_of(text)), num_words)
    else:
        words = stated_tokens(vocabulary)
    num_rows = sum(len(client["y"]) for clients in splits.values() for client in clients.values())
    hint = "Set a smaller num_words, or sample fewer users in LEAF."
    validate.fits_in_memory("directory", 4 * num_rows * len(words), max_bytes, hint=hint)
    column = {word: j for j, word in enumerate(words)}

    def bags(client: dict[str, np.ndarray]) -> np.ndarray:
        x = np.zeros((len(client["y"]), len(words)), np.float32)
        for i, text in enumerate(_texts(client)):
            for word in tokens_of(text):
                if word in column:
                    x[i, column[word]] += 1
        return x

    train, test = (
        {user: {"x": bags(client), "y": _labels(client["y"])} for user, client in clients.items()}
        for clients in splits.values()
    )
    about: dict[str, Any] = {"label_names": ("negative", "positive"), "vocabulary": tuple(words)}
    about["learned"] = vocabulary_learned(vocabulary)
    data = from_sites(train, test, task="binary", num_outputs=1, name="sent140", **about)
    return data._replace(feature_names=tuple(words))


@validate.named_arguments
def celeba(
    *,
    directory: FolderPath,
    images: FolderPath,
    image_size: Annotated[int, Integer(1, 4096)] = 84,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
) -> FederatedData:
    """Reads CelebA of LEAF, where the task is to predict whether a person smiles. Each celebrity is a client.

    It needs the extra `images` (Pillow).

    Args:
      directory: a folder with LEAF's train/*.json and test/*.json. Examples are names of image files, and labels are 0
        or 1.
      images: the folder with these image files (img_align_celeba), JPEG or PNG.
      image_size: s. Images are resized to s x s pixels, as LEAF does.
      max_bytes: the most bytes that the images may take, 12 n s^2 for n images.

    Returns: `FederatedData` of the task "binary", with x [n, s, s, 3] in [0, 1].

    Raises: ImportError without Pillow, which names the extra. ValueError or TypeError that names file and user, for
      images that do not exist and names that are paths. MemoryError beyond `max_bytes`.

    Guarantees: images and labels have the order of the files, and pixels are divided by 255
    (tests/population/datasets/test_leaf_features.py::test_celeba); names that lead out of the folder, and files that do
    not exist or are no images, are refused (::test_broken_celeba).

    References: Liu et al., Deep learning face attributes in the wild, 2015; Caldas et al., LEAF, 2018.
    """
    folder = existing_path("directory", directory)
    image_folder = existing_path("images", images)
    try:
        from PIL import Image
    except ImportError:
        message = "celeba: expected Pillow to be installed. Install the extra: pip install 'fedjax_sim[images]'."
        raise ImportError(message) from None
    splits = {split: leaf_split(folder / split) for split in ("train", "test")}
    num_rows = sum(len(client["y"]) for clients in splits.values() for client in clients.values())
    hint = "Set a smaller image_size, or sample fewer users in LEAF."
    validate.fits_in_memory("directory", 12 * num_rows * image_size**2, max_bytes, hint=hint)

    def image(place: str, name: str) -> np.ndarray:
        # A name with a slash could lead out of the folder.
        if "/" in name or "\\" in name:
            validate.fail(place, "the name of a file in the folder of images", name)
        path = existing_path(place, str(image_folder / name), folder=False)
        # Only the formats of the data set are decoded, since each further decoder is a risk with files from others.
        try:
            with opened(path) as content, Image.open(content, formats=("JPEG", "PNG")) as file:
                # A picture declares its size, and is decoded only then.
                validate.fits_in_memory(place, 3 * file.width * file.height, MOST_PICTURE_BYTES)
                pixels = np.asarray(file.resize((image_size, image_size)).convert("RGB"))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
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
    return from_sites(train, test, task="binary", num_outputs=1, name="celeba", learned=())


def _texts(client: dict[str, np.ndarray]) -> list[str]:
    """Returns the texts of a client's tweets."""
    column = TWEET_FIELDS.index("text")
    return [str(tweet[column]) for tweet in client["x"]]


def _labels(y: np.ndarray) -> np.ndarray:
    """Returns labels as numbers. LEAF writes some of them as texts."""
    return np.array([validate.decimal(str(label)) for label in y]) if y.dtype.kind == "U" else y

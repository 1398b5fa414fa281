"""Texts of TensorFlow Federated's HDF5 files: next characters of Shakespeare, next words of StackOverflow."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.datasets.hdf5_file import random_split, read_clients
from fedjax_sim.population.datasets.shakespeare import windows
from fedjax_sim.population.federated_data import PADDING, FederatedData, existing, from_sites
from fedjax_sim.types import FilePath
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare, PositiveInt

__all__ = ["tff_text"]

MARKS = ("<padding>", "<start>", "<end>", "<unknown>")  # tokens 0 to 3 where words are tokens
START, END, UNKNOWN = 1, 2, 3


@validate.named_arguments
def tff_text(
    *,
    path: FilePath,
    test_path: FilePath | None = None,
    features: str = "snippets",
    unit: Literal["character", "word"] = "character",
    sequence_length: Annotated[int, Integer(1, 1000000)] = 80,
    vocabulary_size: PositiveInt = 10_000,
    max_clients: PositiveInt | None = None,
    test_fraction: OpenShare = 0.2,
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """TensorFlow Federated's Shakespeare (by characters) or StackOverflow (by words). Needs the extra `hdf5`.

    By characters, a client's texts are joined by line ends and cut into windows of L. By words, a text is a row: x is
    <start>, w_1, w_2, ... and y is w_1, w_2, ..., <end>, both cut after L and padded (x 0, y -1); a word that is not in
    the vocabulary is <unknown>, also where it is to be predicted.

    Args:
      path: file of the training clients, such as shakespeare_train.h5 or stackoverflow_train.h5.
      test_path: file of the test clients; None to split each client's texts at random.
      features: name of the texts, "snippets" of Shakespeare and "tokens" of StackOverflow.
      unit: what is predicted, "character" or "word" (words stand between spaces).
      sequence_length: L.
      vocabulary_size: the words that are most often in the training texts; of characters, all count.
      max_clients: of each file, so many in the order of their ids; None for all.
      test_fraction: share of each client's texts that is its test part, when there is no test_path.
      max_bytes: refuse texts, or rows of tokens, that take more.
      seed: decides the split.

    Returns: `FederatedData`, task "next_token", x and y [n, L] int32, and the `vocabulary`.

    Raises: ImportError without h5py, naming the extra; ValueError or TypeError naming file and member; MemoryError.

    Guarantees: tests/population/datasets/test_tff_text.py::test_characters, ::test_words.

    References: `tff.simulation.datasets.shakespeare` and `stackoverflow`, TensorFlow Federated, 2019; Reddi et al.,
      Adaptive federated optimization, 2021, appendix C (the tokens of words).
    """
    source = existing("path", path, folder=False)

    def read(file: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
        leaves = {"texts": features}
        return read_clients("tff_text", file, leaves, texts=True, max_clients=max_clients, max_bytes=max_bytes)

    train, test = read(source), {}
    if test_path is not None:
        test = read(existing("test_path", test_path, folder=False))
    else:
        rng = np.random.default_rng(seed)
        for id, client in list(train.items()):
            train[id], test[id] = random_split(client, test_fraction, rng)
    splits = [{id: client["texts"].tolist() for id, client in split.items()} for split in (train, test)]
    trained = [text for texts in splits[0].values() for text in texts]
    every = trained + [text for texts in splits[1].values() for text in texts]
    if unit == "character":
        vocabulary = ("<padding>", *sorted({"\n"}.union(*every)))
        num_rows = sum(len(text) // sequence_length + 1 for text in every)
    else:
        counts = collections.Counter(word for text in trained for word in text.split())
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary_size]
        vocabulary = (*MARKS, *frequent)
        num_rows = len(every)
    hint = "Set max_clients, or a smaller sequence_length."
    validate.fits_in_memory("path", 8 * num_rows * sequence_length, max_bytes, hint=hint)
    code = {token: i for i, token in enumerate(vocabulary)}

    def rows(texts: list[str]) -> dict[str, np.ndarray]:
        if unit == "word":
            return sentences([text.split() for text in texts], code, sequence_length)
        return windows(np.array([code[c] for c in "\n".join(texts)], np.int32), sequence_length)

    train, test = ({id: rows(texts) for id, texts in split.items()} for split in splits)
    size, name = len(vocabulary), source.stem
    return from_sites(train, test, task="next_token", num_outputs=size, vocabulary=vocabulary, name=name)


def sentences(texts: Sequence[list[str]], code: dict[str, int], length: int) -> dict[str, np.ndarray]:
    """x and y [texts, length] of texts as words, with marks of start and end.

    >>> sentences([["hi", "you"]], {"hi": 4}, 4)
    {'x': array([[1, 4, 3, 0]], dtype=int32), 'y': array([[ 4,  3,  2, -1]], dtype=int32)}
    """
    x, y = np.zeros((len(texts), length), np.int32), np.full((len(texts), length), PADDING, np.int32)
    for i, words in enumerate(texts):
        tokens = [START, *(code.get(word, UNKNOWN) for word in words[:length]), END]
        size = min(len(tokens) - 1, length)
        x[i, :size] = tokens[:size]
        y[i, :size] = tokens[1 : size + 1]
    return {"x": x, "y": y}

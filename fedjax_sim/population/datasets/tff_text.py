"""This module reads texts of TensorFlow Federated, to predict next characters (Shakespeare) or words (Stack Overflow).

The files are HDF5, see `hdf5_file`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.datasets.hdf5_file import read_clients, split_clients
from fedjax_sim.population.datasets.shakespeare import windows
from fedjax_sim.population.datasets.vocabularies import codes_of, frequent_words, stated_tokens, vocabulary_learned
from fedjax_sim.population.federated_data import PADDING, FederatedData, existing_path, from_sites
from fedjax_sim.population.splits import split_learned
from fedjax_sim.types import FilePath
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare, PositiveInt

MARK_TOKENS = ("<padding>", "<start>", "<end>", "<unknown>")  # tokens 0 to 3, if words are tokens
START, END, UNKNOWN = 1, 2, 3  # their positions in MARK_TOKENS


@validate.named_arguments
def tff_text(
    *,
    path: FilePath,
    test_path: FilePath | None = None,
    features: str = "snippets",
    unit: Literal["character", "word"] = "character",
    sequence_length: Annotated[int, Integer(1, 1000000)] = 80,
    vocabulary_size: PositiveInt = 10_000,
    vocabulary: Sequence[str] | None = None,
    max_clients: PositiveInt | None = None,
    test_fraction: OpenShare = 0.2,
    split: Literal["together", "by_client"] = "together",
    max_bytes: Annotated[int, Integer(1, 4611686018427387904)] = 2**34,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads Shakespeare (by characters) or StackOverflow (by words) of TensorFlow Federated, to predict the next token.

    It needs the extra `hdf5`. With unit="character", the texts of a client are joined by line ends and cut into windows
    of L characters. With unit="word", each text is one row. Its x is <start>, w_1, w_2, ... and its y is
    w_1, w_2, ..., <end>. Both are cut after L tokens and padded, with 0 in x and -1 in y. A word that is not in the
    vocabulary is <unknown>, also as a target. Accuracies are over words: they leave out <end> and <unknown> as targets,
    and count them as wrong predictions of words. `accuracy_all_tokens` counts every target, as loss and perplexity do.

    Args:
      path: file of the training clients, such as shakespeare_train.h5 or stackoverflow_train.h5.
      test_path: file of the test clients. None splits each client's texts at random.
      features: name of the texts in the file, "snippets" for Shakespeare and "tokens" for StackOverflow.
      unit: the token that is predicted, "character" or "word". Words are separated by spaces.
      sequence_length: L.
      vocabulary_size: number of words in the vocabulary, the most frequent ones of the training texts. For characters
        it has no effect, and the vocabulary has all of them.
      vocabulary: the words, or the characters, in the order of their tokens. Noise needs them stated, since one client
        could change them. Texts may have other words, which are unknown, but no other characters. None for those of the
        texts.
      max_clients: only the first clients of each file, in the order of their ids, are read. None for all.
      test_fraction: share of each client's texts that is its test part, if there is no test_path.
      split: "together" or "by_client", as in `csv_sites`, if there is no test_path.
      max_bytes: the most bytes that the texts, and the rows of tokens, may take.
      seed: of the split.

    Returns: `FederatedData` of the task "next_token", with x and y [n, L] int32, and the `vocabulary`.

    Raises: ImportError without h5py, which names the extra. ValueError or TypeError that names file and member.
      MemoryError beyond `max_bytes`.

    Guarantees: a client's first character and targets spell its texts, joined by line ends
    (tests/population/datasets/test_tff_text.py::test_characters); rows of words equal those by hand, with words that
    are unknown, texts that are cut and texts that are padded (::test_words).

    References: `tff.simulation.datasets.shakespeare` and `stackoverflow`, TensorFlow Federated, 2019; Reddi et al.,
      Adaptive federated optimization, 2021, appendix C (the tokens of words).
    """
    source = existing_path("path", path, folder=False)

    def read(file: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
        leaves = {"texts": features}
        return read_clients("tff_text", file, leaves, texts=True, max_clients=max_clients, max_bytes=max_bytes)

    train = read(source)
    test = {}
    if test_path is not None:
        test = read(existing_path("test_path", test_path, folder=False))
    else:
        train, test = split_clients(train, test_fraction, seed, split)
    splits = [{id: client["texts"].tolist() for id, client in split.items()} for split in (train, test)]
    train_texts = [text for texts in splits[0].values() for text in texts]
    all_texts = train_texts + [text for texts in splits[1].values() for text in texts]
    if unit == "character":
        characters, _ = codes_of(vocabulary, {"\n"}.union(*all_texts))
        tokens = ("<padding>", *characters)
        num_rows = sum(len(text) // sequence_length + 1 for text in all_texts)  # at most: texts are joined
    else:
        if vocabulary is None:
            words = frequent_words((word for text in train_texts for word in text.split()), vocabulary_size)
        else:
            words = stated_tokens(vocabulary)
        tokens = (*MARK_TOKENS, *words)
        num_rows = len(all_texts)
    # x and y hold int32, so a token takes 8 bytes.
    hint = "Set max_clients, or a smaller sequence_length."
    validate.fits_in_memory("path", 8 * num_rows * sequence_length, max_bytes, hint=hint)
    code = {token: i for i, token in enumerate(tokens)}

    def rows(texts: list[str]) -> dict[str, np.ndarray]:
        if unit == "word":
            return sentences([text.split() for text in texts], code, sequence_length)
        return windows(np.array([code[c] for c in "\n".join(texts)], np.int32), sequence_length)

    train, test = ({id: rows(texts) for id, texts in split.items()} for split in splits)
    about: dict[str, Any] = {"vocabulary": tokens, "name": source.stem, "learned": vocabulary_learned(vocabulary)}
    if unit == "word":
        about["special_tokens"] = tuple(range(len(MARK_TOKENS)))
    if test_path is None:
        about["learned"] += split_learned(split)
    return from_sites(train, test, task="next_token", num_outputs=len(tokens), **about)


def sentences(texts: Sequence[list[str]], code: dict[str, int], length: int) -> dict[str, np.ndarray]:
    """Encodes texts, given as lists of words, as x and y [texts, length], with marks of start and end.

    Words that `code` lacks become UNKNOWN. A text of `length` words or more loses its end mark, and its words past
    `length` are cut off.

    Args:
      texts: lists of words.
      code: the number of each known word.
      length: tokens of a row, at least 1.

    >>> sentences([["hi", "you"]], {"hi": 4}, 4)
    {'x': array([[1, 4, 3, 0]], dtype=int32), 'y': array([[ 4,  3,  2, -1]], dtype=int32)}
    """
    x = np.zeros((len(texts), length), np.int32)
    y = np.full((len(texts), length), PADDING, np.int32)
    for i, words in enumerate(texts):
        # A text of `length` words or more is cut before its end mark, so the mark is not a target.
        tokens = [START, *(code.get(word, UNKNOWN) for word in words[:length]), END]
        num_targets = min(len(tokens) - 1, length)
        x[i, :num_targets] = tokens[:num_targets]
        y[i, :num_targets] = tokens[1 : num_targets + 1]
    return {"x": x, "y": y}

"""Vocabularies of texts: stated beforehand, or those of the texts themselves, which are recorded as learnt."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from fedjax_sim import validate
from fedjax_sim.types import Learned


def vocabulary_learned(stated: Sequence[str] | None) -> tuple[Learned, ...]:
    """Returns the record that the vocabulary is that of all clients' texts, unless it is stated."""
    if stated is not None:
        return ()
    effect = "change which tokens the texts of every other client consist of, and their number"
    return (Learned("the vocabulary", (), effect, 'vocabulary = ["...", "..."]'),)


def frequent_words(words: Iterable[str], count: int) -> list[str]:
    """Returns the most frequent words, at most `count`. Words of equal frequency are in alphabetical order.

    >>> frequent_words("to be or not to be".split(), 3)
    ['be', 'to', 'not']
    """
    counts = collections.Counter(words)
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def stated_tokens(stated: Sequence[str]) -> list[str]:
    """Returns the tokens of a vocabulary that a user states: distinct texts that are not empty."""
    validate.sequence("vocabulary", stated)
    tokens = list(stated)
    for token in tokens:
        if not isinstance(token, str) or not token:
            validate.fail("vocabulary", "texts that are not empty", token, error=TypeError)
    if len(set(tokens)) != len(tokens) or not tokens:
        validate.fail("vocabulary", "distinct texts, at least one", tokens)
    return tokens


def codes_of(stated: Sequence[str] | None, found: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Returns the characters of a vocabulary, and the code of each: 1, 2, ..., since 0 is padding.

    Args:
      stated: the characters in the order of their codes; None for those that are found, in sorted order.
      found: the characters of the texts.

    Raises: ValueError for a character of the texts that is not stated.

    >>> codes_of(None, "ba"), codes_of(["b", "a", "c"], "ab")[1]
    ((['a', 'b'], {'a': 1, 'b': 2}), {'b': 1, 'a': 2, 'c': 3})
    """
    characters = sorted(set(found)) if stated is None else stated_tokens(stated)
    if others := sorted(set(found) - set(characters)):
        validate.fail("vocabulary", "all characters of the texts", f"none of {others[:10]}", "Add them.")
    return characters, {character: code for code, character in enumerate(characters, 1)}

"""Plays by role: no character is lost."""

import jax
import numpy as np
import pytest

from fedjax_sim.population.datasets.shakespeare import shakespeare, speeches

client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


PLAY = "Ann:\nHello there,\nfriend.\n\nBob:\n\nCat:\nWho: is it\n\nstill me.\n\nAnn:\nBye!\n\nDan:\nx\n"


def text_of(data, i, parts):
    """A role's text: its first character, then every target that is no padding."""
    first = data.vocabulary[rows(data.train, i)["x"][0, 0]]
    targets = np.concatenate([part["y"].reshape(-1) for part in parts])
    return first + "".join(data.vocabulary[code] for code in targets if code >= 0)


def check_roles(data, roles):
    """Every role's text from training and held-out windows, and inputs that are the targets one step earlier."""
    held = 0
    for i, text in enumerate(roles.values()):
        train = rows(data.train, i)
        parts = [train]
        if len(text) - max(len(text) - int(0.2 * len(text)), 2):
            parts.append(rows(data.held_out, held))
            held += 1
        assert text_of(data, i, parts) == text
        x, y = train["x"].reshape(-1), train["y"].reshape(-1)
        valid = (y >= 0).sum()
        assert (y[valid:] == -1).all() and (x[valid:] == 0).all() and (x[:valid] > 0).all()
        np.testing.assert_array_equal(x[1:valid], y[: valid - 1])
    assert data.held_out.size == held


def test_no_character_is_lost(tmp_path):
    # Faults: the last partial window dropped, a window boundary that skips a target, a colon or an empty line inside a
    # speech taken for a role, the first test character never predicted.
    roles = speeches(PLAY)
    assert roles == {"Ann": "Hello there,\nfriend.\nBye!\n", "Cat": "Who: is it\nstill me.\n", "Dan": "x\n"}
    (tmp_path / "input.txt").write_text(PLAY)
    for length in (1, 4, 7, 100):
        data = shakespeare(directory=str(tmp_path), sequence_length=length)
        assert data.input_shape == (length,) and data.num_outputs == len(data.vocabulary)
        check_roles(data, roles)
    assert shakespeare(directory=str(tmp_path), min_characters=20).train.size == 2


def test_a_mark_and_a_share(tmp_path):
    """Catches a mark of UTF-8 taken for a part of the first role's name, and a share of 0.29 of 100 that is 28."""
    play = "Ann:\n" + 99 * "a" + "\n\nBob:\nHo!\n\nAnn:\n"
    (tmp_path / "input.txt").write_bytes(b"\xef\xbb\xbf" + play.encode())
    data = shakespeare(directory=str(tmp_path), test_fraction=0.29, sequence_length=10)
    assert data.train.size == 2 and "\ufeff" not in data.vocabulary
    assert (rows(data.held_out, 0)["y"] >= 0).sum() == 29


def test_published_shakespeare_is_complete(shared_data):
    # Fault: as above, on the real text, whose roles sum to its length less headings and empty lines.
    folder = shared_data / "shakespeare"
    roles = speeches((folder / "input.txt").read_text())
    data = shakespeare(directory=str(folder))
    sample = {name: text for name, text in roles.items()}
    assert data.train.size == len(sample) > 200
    train, test = np.asarray(data.train.examples["y"]), data.test["y"]
    assert (train >= 0).sum() + (test >= 0).sum() == sum(len(text) - 1 for text in roles.values())
    offsets = np.asarray(data.train.offsets)
    y = train[offsets[0] : offsets[1]].reshape(-1)
    text = next(iter(roles.values()))
    assert "".join(data.vocabulary[c] for c in y if c >= 0) == text[1 : len(text) - int(0.2 * len(text))]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("No role here\n", {}, "line 1: expected a role"),
        ("", {}, "a role with at least"),
        (PLAY, {"min_characters": 1000}, "a role with at least 1000"),
        (PLAY, {"sequence_length": 0}, "sequence_length"),
        (PLAY, {"test_fraction": 0.0}, "test_fraction"),
        (None, {}, "existing file"),
    ],
)
def test_broken_text(tmp_path, text, options, message):
    # Fault: text without a speaker that no role gets.
    if text is not None:
        (tmp_path / "input.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        shakespeare(directory=str(tmp_path), **options)

"""Texts of TensorFlow Federated's files, in small files of their layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.metrics.baseline import constant_baseline
from fedjax_sim.population.datasets.leaf_tff import tff_hdf5
from fedjax_sim.population.datasets.tff_text import tff_text

h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
PLAYS = {
    "ALL_S_WELL_THAT_ENDS_WELL_CELIA": ["I pray you, be merry.", "Nöthing?"],
    "THE_TRAGEDY_OF_KING_LEAR_KING": ["What, art mad?"],
    "THE_TRAGEDY_OF_KING_LEAR_MUTE": [],
}
QUESTIONS = {"00000001": ["how do i do this ?", "it is broken"], "00000002": ["how do i ?"]}


def write(path, feature, clients, **others):
    with h5py.File(path, "w") as file:
        for id, texts in clients.items():
            data = np.array([text.encode() for text in texts], object)
            file.create_dataset(f"examples/{id}/{feature}", data=data, dtype=h5py.string_dtype("ascii"))
            for name, values in others.items():
                file[f"examples/{id}/{name}"] = values
    return str(path)


client_of = jax.jit(lambda population, id: population.client(id))


def rows(population, id):
    data = client_of(population, np.int32(id))
    return {name: np.asarray(leaf)[np.asarray(data.mask)] for name, leaf in data.examples.items()}


def read(vocabulary, row):
    return [vocabulary[token] for token in row.tolist() if token >= 0]


def test_characters(tmp_path):
    """A client's text is its first character and its targets. Faults: bytes for characters, texts that run together, a
    character of the test file without a token, a silent role that stops the others."""
    path = write(tmp_path / "shakespeare_train.h5", "snippets", PLAYS)
    test_path = write(tmp_path / "shakespeare_test.h5", "snippets", {"THE_TRAGEDY_OF_KING_LEAR_KING": ["Zounds!"]})
    data = tff_text(path=path, test_path=test_path, sequence_length=7)
    assert (data.task, data.train.size, data.input_shape) == ("next_token", 3, (7,))
    for i, texts in enumerate(list(PLAYS.values())[:2]):
        client = rows(data.train, i)
        first = data.vocabulary[client["x"][0, 0]]
        targets = read(data.vocabulary, client["y"].ravel())
        assert first + "".join(targets) == "\n".join(texts)
    assert "".join(read(data.vocabulary, data.test["y"].ravel())) == "ounds!" and len(rows(data.train, 2)["y"]) == 0
    assert tff_text(path=path, test_path=test_path, max_clients=1).train.size == 1


def test_words(tmp_path):
    """By hand. Faults: a start or end that is missing, a sentence longer than L that ends, unknown words that are left
    out, tags or numbers read as texts."""
    path = write(tmp_path / "stackoverflow_train.h5", "tokens", QUESTIONS, score=np.arange(2))
    test_path = write(tmp_path / "stackoverflow_test.h5", "tokens", {"00000009": ["how odd"]})
    options = {"path": path, "test_path": test_path, "features": "tokens", "unit": "word", "sequence_length": 5}
    data = tff_text(**options, vocabulary_size=4)
    assert data.vocabulary == ("<padding>", "<start>", "<end>", "<unknown>", "do", "?", "how", "i")
    client = rows(data.train, 0)
    assert [read(data.vocabulary, x) for x in client["x"]] == [
        ["<start>", "how", "do", "i", "do"],
        ["<start>", "<unknown>", "<unknown>", "<unknown>", "<padding>"],
    ]
    assert [read(data.vocabulary, y) for y in client["y"]] == [
        ["how", "do", "i", "do", "<unknown>"],
        ["<unknown>", "<unknown>", "<unknown>", "<end>"],
    ]
    assert read(data.vocabulary, data.test["y"][0]) == ["how", "<unknown>", "<end>"]
    parts = tff_text(path=path, features="tokens", unit="word", test_fraction=0.3)
    assert len(parts.test["y"]) == 1 and sum(len(rows(parts.train, i)["y"]) for i in range(2)) == 2
    with pytest.raises(TypeError, match=r"score: .*texts.*population\.tff_hdf5"):
        tff_text(path=path, features="score")
    with pytest.raises(TypeError, match=r"tokens: .*numbers.*population\.tff_text"):
        tff_hdf5(path=path, features="tokens", label="score")
    with pytest.raises(ValueError, match="Did you mean 'tokens'"):
        tff_text(path=path, features="token")
    for most, told in ((60, "Raise max_bytes"), (110, "max_clients")):
        with pytest.raises(MemoryError, match=told):
            tff_text(**options, max_bytes=most)
    with h5py.File(tmp_path / "latin.h5", "w") as file:
        file.create_dataset("examples/a/tokens", data=np.array([b"\xff"], object), dtype=h5py.string_dtype("ascii"))
    with pytest.raises(ValueError, match="texts in UTF-8"):
        tff_text(path=str(tmp_path / "latin.h5"), features="tokens")


def test_accuracies_are_of_words(tmp_path):
    """A run's evaluation of a model that always says <unknown>: on the test set, at held-out clients, at clients' own
    rows, and of a data set that was written and read. Catches .667 for it, and a folder that forgets the tokens."""
    path = write(tmp_path / "train.h5", "tokens", QUESTIONS)
    test_path = write(tmp_path / "test.h5", "tokens", {"00000009": ["how odd"], "00000010": ["odd"]})
    data = tff_text(
        path=path, test_path=test_path, features="tokens", unit="word", sequence_length=5, vocabulary_size=4
    )
    assert data.special_tokens == (0, 1, 2, 3)
    assert constant_baseline(data.test, data.task, data.special_tokens)["baseline_accuracy"] == 1.0
    assert tff_text(path=path, features="tokens").special_tokens == ()  # all characters are predicted
    population.write_native(tmp_path / "folder", data)
    settings = ["data.name=native", f"data.directory={tmp_path / 'folder'}", "data.with_local_test.fraction=0.5"]
    settings += ["model.name=gru", "model.hidden=3", "sampler.cohort_size=2", "run.evaluate_train=all"]
    experiment = build(load(None, settings))
    assert experiment.data.special_tokens == data.special_tokens
    zeros = jax.tree.map(jnp.zeros_like, experiment.params)
    (name,) = (name for name, leaf in zeros["output"].items() if leaf.ndim == 1)
    for token, right in ((3, 0.0), (data.vocabulary.index("how"), 1.0)):
        params = zeros | {"output": zeros["output"] | {name: zeros["output"][name].at[token].set(9.0)}}
        record = experiment.evaluation(params)
        # The targets are how <unknown> <end> and <unknown> <end>: one word.
        assert record["test_accuracy"] == record["held_out_accuracy"] == right
        assert record["test_accuracy_all_tokens"] == pytest.approx(0.4 if token == 3 else 0.2)
        assert {"train_accuracy_all_tokens", "local_test_accuracy_all_tokens"} <= record.keys()

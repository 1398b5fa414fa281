"""Pickles of arrays: what Python wrote is read, and nothing that a file asks for is run."""

import pickle
import pickletools
import struct

import numpy as np
import pytest

from fedjax_sim import InvalidArgument
from fedjax_sim.files import pickled_arrays
from fedjax_sim.files.pickled_arrays import read_pickled
from tests.refusals import refused

VALUES = {
    "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "columns": np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)),
    "big": np.arange(3, dtype=">i8"),
    "truth": np.array([True, False]),
    "labels": [0, 255, 256, 70_000, -1],
    "names": ["a", "ä" * 300],
    "more": {"raw": b"x" * 300, "half": 0.5, "yes": True, "none": None},
}


def python_2(values):
    """A file as Python 2 wrote it, in protocol 2: names are bytes, and arrays are of bytes."""

    def text(value):
        content = value if isinstance(value, bytes) else value.encode()
        short = len(content) < 256
        return (b"U" + bytes([len(content)]) if short else b"T" + struct.pack("<I", len(content))) + content

    def number(value):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    def array(value):
        shape = b"(" + b"".join(number(size) for size in value.shape) + b"t"
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
        dtype = (
            b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
        )
        return empty + b"q\x05(K\x01" + shape + dtype + b"K\x00tb\x89" + text(value.tobytes()) + b"tb"

    def written(value):
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"](" + b"".join(written(item) for item in value) + b"e"
        return number(value) if isinstance(value, int) else text(value)

    items = b"".join(text(key) + written(value) for key, value in values.items())
    return b"\x80\x02}q\x01(" + items + b"u."


def same(found, expected):
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("protocol", [3, 4])
def test_values_are_those_that_were_written(protocol):
    """Faults: rows for columns, the other order of bytes, and an array that is lost where a file refers to it again."""
    assert same(read_pickled("a", pickle.dumps(VALUES, protocol)), VALUES)
    twice = read_pickled("a", pickle.dumps([VALUES["data"]] * 2, protocol))
    assert twice[0] is twice[1] and same(twice[0], VALUES["data"])
    objects = np.empty((), object)
    objects[()] = {"x": VALUES["columns"], "list": [[1], [2]]}
    found = read_pickled("a", pickle.dumps(objects, protocol))
    assert found.shape == () and same(found[()], objects[()])


def test_files_of_python_2():
    values = {"data": VALUES["data"], "labels": [3, 300], "filenames": ["a.png", "b" * 300]}
    content = python_2(values)
    assert same({**pickle.loads(content, encoding="latin-1")}, values)  # the file of this test is what it says
    found = read_pickled("a", content)
    assert same(found["data"], values["data"]) and found["labels"] == [3, 300]
    assert found["filenames"] == [b"a.png", b"b" * 300]


class Runs:
    """What a hostile file does: it calls a function of Python."""

    ran = []

    def __reduce__(self):
        return Runs.ran.append, (1,)


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
HOSTILE = {
    "a call": (pickle.dumps(Runs(), 4), "name builtins.getattr"),
    "a call of the system": (b"cos\nsystem\n(S'true'\ntR.", "name os.system"),
    "an old class": (b"(ios\nsystem\n.", "instruction b'i'"),
    "an object": (b"\x80\x02cnumpy\nndarray\n)\x81.", "instruction"),
    "a persistent id": (b"Pfile\n.", "instruction b'P'"),
    "another name of NumPy": (b"cnumpy\nload\n.", "name numpy.load"),
    "a name with dots": (b"\x8c\x05numpy\x8c\x0bndarray.dot\x93.", "name numpy.ndarray.dot"),
    "a class as a value": (b"cnumpy\nndarray\n.", "a part of an array"),
    "an unfinished array": (ARRAY + b".", "a part of an array"),
    "an unfinished array in a list": (b"]" + ARRAY + b"a.", "a part of an array"),
    "an unfinished array in a tuple": (b"]" + ARRAY + b"\x85a.", "a tuple"),
    "other arguments": (b"cnumpy\nndarray\n)R.", "a call"),
    "a state of text": (ARRAY + b"U\x01xb.", "a state"),
    "a huge text": (b"T\xff\xff\xff\xff.", "the end of the file"),
    "a huge text of protocol 4": (b"\x8e" + b"\xff" * 8 + b".", "the end of the file"),
    "a protocol to come": (b"\x80\x05N.", "protocol"),
    "a list as a key": (b"}]Ns.", "no text"),
    "a key twice": (b"}U\x01aNsU\x01aNs.", "twice"),
    "nothing": (b"", "the end of the file"),
    "no value": (b".", "less than one value"),
    "two values": (b"NN.", "more"),
    "more behind": (b"N.N", "behind the end"),
    "bad text": (b"X\x01\x00\x00\x00\xff.", "utf-8"),
    "a stack without end": (b"(" * 100_000 + b"t" * 100_000 + b".", "a tuple"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name):
    """Faults: a name that is looked up, a call that is made, and a size that is believed."""
    content, words = HOSTILE[name]
    with refused("bad.pkl") as raised:
        read_pickled("bad.pkl", content)
    assert words in str(raised.value) and not Runs.ran


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x03K\x04", b"K\x03K\x05"),  # a shape with more numbers than there are
        (b"K\x03K\x04", b"J\xff\xff\xff\xffK\x04"),
        (b"U\x02u1", b"U\x02O8"),
        (b"U\x02u1", b"U\x02V8"),
        (b"U\x02u1", b"U\x08u1,u1,u1"),
        (b"U\x02u1", b"U\x02M8"),
        (b"U\x02u1", b"U\x02??"),
        (b"NNNJ", b"NNKJ"),
    ],
)
def test_arrays_that_do_not_fit(old, new):
    content = python_2({"data": VALUES["data"]})
    assert old in content
    with refused("bad.pkl"):
        read_pickled("bad.pkl", content.replace(old, new))


def test_cuts_and_changed_bytes():
    """Fault: another error than the one that names the file."""
    for content in (python_2({"data": VALUES["data"], "labels": [1, 2]}), pickle.dumps(VALUES, 4)):
        for cut in range(0, len(content), 1 + len(content) // 300):
            with refused("bad.pkl"):
                read_pickled("bad.pkl", content[:cut])
        rng = np.random.default_rng(0)
        for place in range(0, len(content), 1 + len(content) // 300):
            for byte in rng.integers(0, 256, 8):
                changed = content[:place] + bytes([byte]) + content[place + 1 :]
                try:
                    read_pickled("bad.pkl", changed)
                except InvalidArgument as error:
                    assert error.argument == "bad.pkl"


def test_instructions_are_counted(monkeypatch):
    monkeypatch.setattr(pickled_arrays, "MOST_INSTRUCTIONS", 10)
    with refused("bad.pkl", rule="plain values"):
        read_pickled("bad.pkl", b"N" * 10 + b".")


def test_every_instruction_is_one_of_python():
    """Fault: a code that stands for another instruction in Python's own list."""
    assert {code.decode("latin-1") for code in pickled_arrays._INSTRUCTIONS} <= set(pickletools.code2op)

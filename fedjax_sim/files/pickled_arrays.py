"""Reads arrays, texts, numbers, lists and dicts from a pickle, without running anything that the file asks for.

A pickle is a program for a stack. This module knows the few instructions with which NumPy's arrays and plain values are
written, builds its own values for them, and refuses every other one. It imports nothing that a file names.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate

MOST_INSTRUCTIONS = 1 << 23  # of a file; each makes at most one small object of Python
MOST_PROTOCOL = 4
# Dtypes of arrays: truth values, integers, floats, bytes, and objects that are such values themselves.
_CODE = re.compile("b1|[iu][1248]|f[248]|S[1-9][0-9]{0,5}|O8")
_NAMES = {  # what a file may name, in NumPy 1 and 2 -> what stands for it here
    ("numpy.core.multiarray", "_reconstruct"): "empty array",
    ("numpy._core.multiarray", "_reconstruct"): "empty array",
    ("numpy", "ndarray"): "class of arrays",
    ("numpy", "dtype"): "dtype",
}
_MARK = object()


class _Name(NamedTuple):
    """A name of `_NAMES` on the stack."""

    meaning: str


class _Array:
    """An array that the file makes in two instructions, before the second one."""

    def __init__(self) -> None:
        self.places: list[int] = []  # where it is remembered


class _Dtype:
    """A dtype, whose byte order comes after its code."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order: str | None = None


class _Refused(Exception):
    """What is wrong at some instruction, in words."""


def read_pickled(name: str, content: bytes) -> Any:
    """Returns the value of a pickle of arrays and plain values.

    Args:
      name: of the file, for the error.
      content: the whole file, or the part of it that is the pickle.

    Returns: None, bool, int, float, str, bytes, list, dict with keys of text (bytes become text), or an array
      with dtype bool, int, float, bytes or object. Objects in an array are again such values.

    Raises: ValueError that names the file and the place, for an instruction that these values do not need, a name
      beyond NumPy's arrays, a file that ends early, bytes behind its end, an array whose bytes do not fit its shape,
      and more than `MOST_INSTRUCTIONS` instructions.

    Guarantees: nothing that a file names is imported or called, and every cut and every changed byte of a file ends in
    a value or in this error (tests/files/test_pickled_arrays.py::test_hostile_files, ::test_cuts_and_changed_bytes).
    Values are those that NumPy and Python wrote (::test_values_are_those_that_were_written).

    >>> read_pickled("four", bytes([0x80, 2, ord("K"), 4, ord(".")]))
    4
    """
    machine = _Machine(content)
    try:
        return machine.run()
    except (_Refused, UnicodeDecodeError) as error:
        hint = "Only arrays, texts, numbers, lists and dicts are read, since a pickle can run code. Take the file anew."
        validate.fail(name, "a pickle of arrays and plain values alone", f"{error} at byte {machine.at:,}", hint)


class _Machine:
    """The stack, and the values that a file refers to again."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0
        self.at = 0  # where the instruction began
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follows the instructions up to the end; returns the one value that is left."""
        for _ in range(MOST_INSTRUCTIONS):
            self.at = self.position
            code = self.taken(1)
            if code == b".":
                if len(self.stack) != 1:
                    raise _Refused("an end with more or less than one value")
                if self.position != len(self.content):
                    raise _Refused("bytes behind the end")
                return _plain(self.stack[0])
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise _Refused(f"instruction {code!r}")
            instruction(self)
        raise _Refused(f"more than {MOST_INSTRUCTIONS:,} instructions")

    def taken(self, length: int) -> bytes:
        """Returns the next bytes of the file."""
        end = self.position + length
        if end > len(self.content):
            raise _Refused("the end of the file")
        part = self.content[self.position : end]
        self.position = end
        return part

    def number(self, layout: str) -> Any:
        """Returns the next number, in a layout of `struct`."""
        return struct.unpack(layout, self.taken(struct.calcsize(layout)))[0]

    def line(self) -> str:
        """Returns the text up to the end of the line."""
        end = self.content.find(b"\n", self.position, self.position + 256)
        if end < 0:
            raise _Refused("a name without an end")
        text = self.taken(end - self.position).decode()
        self.position += 1
        return text

    def pop(self) -> Any:
        """Takes a value from the stack."""
        if not self.stack or self.stack[-1] is _MARK:
            raise _Refused("a missing value")
        return self.stack.pop()

    def popped(self, count: int) -> tuple:
        """Takes so many values from the stack; returns them in the order in which they came."""
        return tuple(reversed([self.pop() for _ in range(count)]))

    def marked(self) -> list:
        """Takes the values behind the last mark from the stack."""
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is _MARK:
                values = self.stack[start + 1 :]
                del self.stack[start:]
                return values
        raise _Refused("a missing mark")

    def top(self, kind: type) -> Any:
        """Returns the value on top of the stack, which must be of this kind."""
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise _Refused(f"no {kind.__name__}")
        return self.stack[-1]


def _pushed(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    """Returns the instruction that puts a value on the stack."""
    return lambda machine: machine.stack.append(value(machine))


def _protocol(machine: _Machine) -> None:
    if machine.number("<B") > MOST_PROTOCOL:
        raise _Refused(f"a protocol above {MOST_PROTOCOL}")


def _named(module: str, attribute: str) -> _Name:
    meaning = _NAMES.get((module, attribute))
    if meaning is None:
        raise _Refused(f"the name {module}.{attribute}")
    return _Name(meaning)


def _named_on_stack(machine: _Machine) -> _Name:
    module, attribute = machine.popped(2)
    if not (isinstance(module, str) and isinstance(attribute, str)):
        raise _Refused("a name that is no text")
    return _named(module, attribute)


def _remember(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    """Returns the instruction that remembers the value on top of the stack."""

    def instruction(machine: _Machine) -> None:
        place, value = index(machine), machine.top(object)
        if value is _MARK:
            raise _Refused("a mark as a value")
        machine.memo[place] = value
        if isinstance(value, _Array):
            value.places.append(place)

    return instruction


def _recalled(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    """Returns the instruction that puts a remembered value on the stack again."""

    def value(machine: _Machine) -> Any:
        place = index(machine)
        if place not in machine.memo:
            raise _Refused("a value that was not remembered")
        return machine.memo[place]

    return _pushed(value)


def _append(machine: _Machine) -> None:
    value = _plain(machine.pop())
    machine.top(list).append(value)


def _extend(machine: _Machine) -> None:
    values = [_plain(value) for value in machine.marked()]
    machine.top(list).extend(values)


def _set_items(machine: _Machine, values: list | tuple) -> None:
    if len(values) % 2:
        raise _Refused("a key without a value")
    target = machine.top(dict)
    for key, value in zip(values[::2], values[1::2], strict=True):
        text = key.decode() if isinstance(key, bytes) else key
        if not isinstance(text, str):
            raise _Refused("a key that is no text")
        if text in target:
            raise _Refused("a key twice")
        target[text] = _plain(value)


def _made(machine: _Machine) -> _Array | _Dtype:
    """What NumPy's two functions would make of their arguments, without their values."""
    function, arguments = machine.popped(2)
    if isinstance(function, _Name) and isinstance(arguments, tuple):
        if function.meaning == "empty array" and len(arguments) == 3 and arguments[0] == _Name("class of arrays"):
            return _Array()
        if function.meaning == "dtype" and arguments and isinstance(arguments[0], (str, bytes)):
            return _Dtype(_text(arguments[0]))
    raise _Refused("a call")


def _build(machine: _Machine) -> None:
    """Completes an array, or a dtype, by its state."""
    state = machine.pop()
    target = machine.top(object)
    if isinstance(target, _Dtype) and isinstance(state, tuple) and len(state) >= 3:
        # The order of bytes, and three things that other dtypes have: parts, names, fields.
        if target.order is None and _text(state[1]) in ("<", ">", "|") and state[2:5] in ((None,) * 3, (None,)):
            target.order = _text(state[1])
            return
    if isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5:
        machine.stack[-1] = values = _values(*state[1:])
        machine.memo |= {place: values for place in target.places if machine.memo[place] is target}
        return
    raise _Refused("a state")


def _values(shape: Any, dtype: Any, by_column: Any, content: Any) -> np.ndarray:
    """Makes an array of the four things that its state has, each of which is checked first.

    Args:
      shape: a tuple of sizes >= 0.
      dtype: a `_Dtype` with its order of bytes.
      by_column: whether the first index moves fastest.
      content: the bytes of all values, or, for objects, a list of them.
    """
    if not (isinstance(shape, tuple) and len(shape) <= 32 and all(type(size) is int and size >= 0 for size in shape)):
        raise _Refused("a shape")
    if not (isinstance(dtype, _Dtype) and dtype.order and isinstance(by_column, bool)):
        raise _Refused("no dtype")
    order = "F" if by_column else "C"
    size = math.prod(shape)
    if not _CODE.fullmatch(dtype.code):
        raise _Refused(f"the dtype {dtype.code[:20]!r}")
    kind = np.dtype(dtype.order + dtype.code)
    if kind.kind == "O":
        if not (isinstance(content, list) and len(content) == size):
            raise _Refused(f"an array of {size:,} objects with others in number")
        objects = np.empty(size, object)
        for index, value in enumerate(content):  # a slice would take lists apart
            objects[index] = value
        return objects.reshape(shape, order=order)
    if not (isinstance(content, bytes) and len(content) == size * kind.itemsize):
        raise _Refused(f"an array of {size * kind.itemsize:,} bytes with others in number")
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _plain(value: Any) -> Any:
    """Returns a value of the file; refuses parts of arrays, and tuples, of which only arrays are made here."""
    if value is _MARK or isinstance(value, (_Array, _Dtype, _Name, tuple)):
        raise _Refused("a tuple or a part of an array as a value")
    return value


def _text(value: Any) -> str:
    """Returns a text, of which Python 2 wrote bytes."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise _Refused("no text")
    return text


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": lambda machine: machine.number("<Q") and None,  # a frame: how many bytes follow
    b"(": _pushed(lambda machine: _MARK),
    b"N": _pushed(lambda machine: None),
    b"\x88": _pushed(lambda machine: True),
    b"\x89": _pushed(lambda machine: False),
    b"K": _pushed(lambda machine: machine.number("<B")),
    b"M": _pushed(lambda machine: machine.number("<H")),
    b"J": _pushed(lambda machine: machine.number("<i")),
    b"G": _pushed(lambda machine: machine.number(">d")),
    b"U": _pushed(lambda machine: machine.taken(machine.number("<B"))),
    b"T": _pushed(lambda machine: machine.taken(machine.number("<I"))),
    b"C": _pushed(lambda machine: machine.taken(machine.number("<B"))),
    b"B": _pushed(lambda machine: machine.taken(machine.number("<I"))),
    b"\x8e": _pushed(lambda machine: machine.taken(machine.number("<Q"))),
    b"X": _pushed(lambda machine: machine.taken(machine.number("<I")).decode()),
    b"\x8c": _pushed(lambda machine: machine.taken(machine.number("<B")).decode()),
    b"]": _pushed(lambda machine: []),
    b"}": _pushed(lambda machine: {}),
    b")": _pushed(lambda machine: ()),
    b"\x85": _pushed(lambda machine: machine.popped(1)),
    b"\x86": _pushed(lambda machine: machine.popped(2)),
    b"\x87": _pushed(lambda machine: machine.popped(3)),
    b"t": _pushed(lambda machine: tuple(machine.marked())),
    b"a": _append,
    b"e": _extend,
    b"s": lambda machine: _set_items(machine, machine.popped(2)),
    b"u": lambda machine: _set_items(machine, machine.marked()),
    b"q": _remember(lambda machine: machine.number("<B")),
    b"r": _remember(lambda machine: machine.number("<I")),
    b"\x94": _remember(lambda machine: len(machine.memo)),
    b"h": _recalled(lambda machine: machine.number("<B")),
    b"j": _recalled(lambda machine: machine.number("<I")),
    b"c": _pushed(lambda machine: _named(machine.line(), machine.line())),
    b"\x93": _pushed(_named_on_stack),
    b"R": _pushed(_made),
    b"b": _build,
}

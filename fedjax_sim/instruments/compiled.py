"""Reads a compiled program: its kernels, the bytes that each of them moves, and its matrix products.

XLA prints what it compiled as text, in the same form for all hardware, and also where the hardware itself is absent.
From the text follows an estimate from below of the time that the program takes, from the speeds of the device's memory
and of its matrix units.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

# These give names to values, or wait for something that began before.
NO_WORK = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "add-dependency", "domain",
    "partition-id", "replica-id", "opt-barrier", "get-dimension-size",
}  # fmt: skip
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"}
# Calls of the compiler's own that only reserve memory or state what is known.
MARKERS = {"AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound", "ConsumeBuffer"}
READS_A_PART = {"dynamic-slice", "slice", "gather"}
# These write into their first operand, in place: opcode -> the place of the operand that holds what is written.
WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": -1}


class Kernel(NamedTuple):
    """A piece of work that the device begins on its own."""

    name: str
    opcode: str
    source: str  # the operation that it stems from, as JAX names it; "" where the compiler does not say
    times: int  # how often it runs in a call of the program
    memory_bytes: float  # of the device's memory that it reads and writes, each time
    flops: tuple[tuple[str, float], ...]  # (precision, operations of matrix products) each time


class Collective(NamedTuple):
    """An exchange between devices."""

    opcode: str
    times: int
    result_bytes: float  # of the result on each device, each time


class CompiledProgram(NamedTuple):
    """What one device does in a call of a compiled program."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    open_loops: tuple[str, ...]  # loops whose number of turns only the device knows; one turn of each is counted
    num_host_calls: int  # calls of functions on the host

    @property
    def num_launches(self) -> int:
        """The number of kernels that the device begins."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def memory_bytes(self) -> float:
        """The bytes of the device's memory that are read and written."""
        return sum(kernel.times * kernel.memory_bytes for kernel in self.kernels)

    @property
    def flops(self) -> dict[str, float]:
        """The operations of matrix products, by their precision."""
        total: dict[str, float] = {}
        for kernel in self.kernels:
            for precision, flops in kernel.flops:
                total[precision] = total.get(precision, 0) + kernel.times * flops
        return total


def read_compiled(text: str, backend: str) -> CompiledProgram:
    """Reads the text of a compiled program.

    Args:
      text: what `jax.stages.Compiled.as_text()` returns.
      backend: "cpu", "gpu" or "tpu". On a TPU arrays are padded to tiles, and those in its fast memory cost nothing.

    Returns: kernels in the order of the program. A loop's kernels count as often as the loop turns. Of branches the one
      that moves the fewest bytes counts, with its exchanges and calls, because estimates are from below.

    Raises: ValueError for a text that holds no program.

    Guarantees: products, slices, loops and tiles are counted as by hand (tests/instruments/test_compiled.py).

    >>> import jax, jax.numpy as jnp
    >>> compiled = jax.jit(lambda a, b: a @ b).lower(jnp.zeros((8, 4)), jnp.zeros((4, 16))).compile()
    >>> read_compiled(compiled.as_text(), "cpu").flops
    {'float32': 1024.0}
    """
    computations, entry = _parsed(text)
    if entry is None:
        raise ValueError(f"text: expected a compiled program with an ENTRY, got {text[:60]!r}. Use Compiled.as_text().")
    return _program(computations, backend, entry, 1)


# ---- the text


class _Instruction(NamedTuple):
    name: str
    type: str  # such as "f32[8,4]{1,0}", or a tuple of these in parentheses
    opcode: str
    arguments: str  # what stands in its parentheses
    attributes: str  # what stands behind them
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def attribute(self, pattern: str) -> str | None:
        """Returns what a pattern's group matches in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]

    def named(self, pattern: str) -> str:
        """Returns what a pattern's group matches in the attributes, of which one must match."""
        name = self.attribute(pattern)
        assert name is not None, f"{self.opcode} without an attribute {pattern}"
        return name


_Computation = dict[str, _Instruction]
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


def _parsed(text: str) -> tuple[dict[str, _Computation], str | None]:
    """Returns (computations by name, the name of the program's own)."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    entry = None
    for line in text.splitlines():
        if start := _START.match(line):
            instruction = _instruction(start, line[start.end() :])
            current[instruction.name] = instruction
        elif (header := _HEADER.match(line)) and not line.startswith("HloModule"):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
    return computations, entry


def _instruction(start: re.Match, rest: str) -> _Instruction:
    """Returns the instruction of a line, cut behind its equals sign."""
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, behind = rest[type_end:].lstrip().partition("(")
    arguments_end = _closing("(" + behind, 0) - 1
    arguments, attributes = behind[:arguments_end], behind[arguments_end + 1 :]
    return _Instruction(
        name=start[2],
        type=rest[:type_end],
        opcode=opcode,
        arguments=arguments,
        attributes=attributes,
        is_root=bool(start[1]),
    )


def _closing(text: str, start: int) -> int:
    """Returns where the parenthesis closes that opens at `start`."""
    depth = 0
    for parenthesis in re.compile(r"[()]").finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return len(text)


# ---- work


def _program(computations: Mapping[str, _Computation], backend: str, computation: str, times: int) -> CompiledProgram:
    """Returns the work of a computation that runs so many times."""
    reader = _Reader(computations, backend)
    kernels = tuple(reader.kernels(computation, times))
    return CompiledProgram(kernels, tuple(reader.collectives), tuple(reader.open_loops), reader.num_host_calls)


class _Reader:
    """Adds up the work of a program's computations."""

    def __init__(self, computations: Mapping[str, _Computation], backend: str):
        self.computations = computations
        self.backend = backend
        self.collectives: list[Collective] = []
        self.open_loops: list[str] = []
        self.num_host_calls = 0
        self.fused = functools.cache(self._fused)

    def kernels(self, computation: str, times: int) -> Iterator[Kernel]:
        """Yields the kernels of a computation. Exchanges, open loops and host calls go into the reader's fields.

        A loop's inner computations run `times` x (its number of turns). If the text does not tell this number, one turn
        counts, and the loop is one of `open_loops`.

        Args:
          computation: its name in the program's text.
          times: how often it runs in a call of the program.
        """
        for x in self.computations[computation].values():
            opcode = x.opcode.removesuffix("-start")
            if x.opcode in NO_WORK or x.opcode.endswith(("-done", "-update")):
                continue
            if opcode == "while":
                turns = x.attribute(r'"known_trip_count":\{"n":"(\d+)"')
                if turns is None:
                    self.open_loops.append(_source(x))
                for inner in (x.named(r"condition=%?([\w.\-]+)"), x.named(r"body=%?([\w.\-]+)")):
                    yield from self.kernels(inner, times * int(turns or 1))
            elif opcode == "conditional":
                branches = [_program(self.computations, self.backend, name, times) for name in _branches(x)]
                yield from self.cheapest(branches)
            elif opcode in ("call", "async"):
                yield from self.kernels(x.named(r"(?:to_apply|calls|called_computation)=%?([\w.\-]+)"), times)
            elif opcode in COLLECTIVES:
                self.collectives.append(Collective(opcode, times, _result_bytes(x, opcode)))
            elif opcode == "custom-call" and _called(x) in MARKERS:
                continue
            else:
                self.num_host_calls += times * (
                    opcode in ("infeed", "outfeed", "send", "recv") or "callback" in _called(x)
                )
                yield self.kernel(x, self.computations[computation], times)

    def cheapest(self, branches: list[CompiledProgram]) -> tuple[Kernel, ...]:
        """Returns the kernels of the branch that moves the fewest bytes, and counts what else it does."""
        if not branches:
            return ()
        chosen = min(branches, key=lambda program: program.memory_bytes)
        self.collectives += chosen.collectives
        self.open_loops += chosen.open_loops
        self.num_host_calls += chosen.num_host_calls
        return chosen.kernels

    def kernel(self, x: _Instruction, around: _Computation, times: int) -> Kernel:
        """Returns the kernel of one instruction.

        Args:
          x: the instruction.
          around: the computation that holds it, in which its operands are found by name.
          times: how often it runs in a call of the program.
        """
        operand_types = [around[name].type for name in x.operands if name in around]
        if x.opcode == "fusion":
            parts, result_bytes, flops = self.fused(x.attribute(r"calls=%?([\w.\-]+)"))
            whole = [self.type_bytes(type) for type in operand_types]
            # A part that is read several times comes from the memory once, if at all.
            read_bytes = sum(min(full, part) for full, part in zip(whole, parts, strict=False))
            result_bytes = min(result_bytes, self.type_bytes(x.type))
        else:
            read_bytes, result_bytes = self.moved(x, operand_types)
            flops = self.products(x, operand_types)
        return Kernel(
            name=x.name,
            opcode=x.opcode,
            source=_source(x),
            times=times,
            memory_bytes=read_bytes + result_bytes,
            flops=tuple(sorted(flops.items())),
        )

    def moved(self, x: _Instruction, operand_types: list[str]) -> tuple[float, float]:
        """Returns (bytes that are read, bytes that are written) by an instruction that is a kernel of its own.

        Args:
          x: the instruction.
          operand_types: the types of its operands as HLO writes them, such as "f32[8,128]{1,0}".
        """
        result_bytes = self.type_bytes(x.type)
        if x.opcode in READS_A_PART:
            return result_bytes + sum(map(self.type_bytes, operand_types[1:])), result_bytes
        if x.opcode in WRITES_A_PART:
            part_bytes = self.type_bytes(operand_types[WRITES_A_PART[x.opcode]])
            return part_bytes, part_bytes
        if x.opcode.startswith("copy") and x.type.startswith("("):
            # The type of a copy that has only begun is (result, operand, mark).
            result_bytes = self.array_bytes(*_ARRAY.findall(x.type)[0])
        if x.opcode.startswith("slice") and x.type.startswith("("):
            result_bytes = self.array_bytes(*_ARRAY.findall(x.type)[-2])
            return result_bytes, result_bytes
        return sum(map(self.type_bytes, operand_types)), result_bytes

    def _fused(self, computation: str) -> tuple[list[float], float, dict[str, float]]:
        """Returns the work of a fusion. What stays inside of it costs no bytes of the device's memory.

        Args:
          computation: the name of the fused computation.

        Returns: the bytes that are read at most of each parameter, in the order of the parameters; the bytes that are
          written of all results together; and the operations of matrix products by precision, those of inner fusions
          among them.
        """
        inside = self.computations[computation]
        users: dict[str, list[_Instruction]] = {}
        for x in inside.values():
            for name in x.operands:
                users.setdefault(name, []).append(x)
        parameters = [x for x in inside.values() if x.opcode == "parameter"]
        parameters.sort(key=lambda x: int(x.arguments))
        parts = [self.part_read(x, users) for x in parameters]
        root = next(x for x in inside.values() if x.is_root)
        roots = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        written = sum(self.written(x, inside) for x in roots)
        flops: Counter[str] = Counter()
        for x in inside.values():
            if x.opcode == "fusion":
                flops.update(self.fused(x.attribute(r"calls=%?([\w.\-]+)"))[2])
            flops.update(self.products(x, [inside[name].type for name in x.operands]))
        return parts, written, dict(flops)

    def part_read(self, x: _Instruction, users: Mapping[str, list[_Instruction]]) -> float:
        """Returns the bytes of a value that its users inside of a fusion read at most."""
        total = 0.0
        for user in users.get(x.name, []):
            is_first = user.operands[0] == x.name
            if user.opcode == "bitcast":
                total += self.part_read(user, users)
            elif user.opcode in READS_A_PART and is_first:
                total += self.type_bytes(user.type)
            elif user.opcode in WRITES_A_PART and is_first:
                continue  # it is written in place
            else:
                return self.type_bytes(x.type)
        return total

    def written(self, x: _Instruction, inside: _Computation) -> float:
        """Returns the bytes that a fusion writes of one of its results."""
        while x.opcode == "bitcast":
            x = inside[x.operands[0]]
        if x.opcode in WRITES_A_PART:
            return self.type_bytes(inside[x.operands[WRITES_A_PART[x.opcode]]].type)
        return 0.0 if x.opcode == "parameter" else self.type_bytes(x.type)

    def products(self, x: _Instruction, operand_types: list[str]) -> dict[str, float]:
        """Returns the operations of an instruction's matrix products, by precision; {} for another instruction."""
        target = _called(x)
        if x.opcode == "dot":
            contracted = x.named(r"lhs_contracting_dims=\{([\d,]*)\}")
        elif "gemm" in target or "matmul" in target:
            contracted = (x.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]') or "").replace('"', "")
        elif x.opcode == "convolution" or "conv" in target:
            return {self.precision(x, operand_types): _convolution_flops(x, operand_types)}
        else:
            return {}
        left = _dimensions(operand_types[0])
        depth = math.prod(left[int(axis)] for axis in contracted.split(",") if axis)
        return {self.precision(x, operand_types): 2.0 * math.prod(_dimensions(x.type)) * depth}

    def precision(self, x: _Instruction, operand_types: list[str]) -> str:
        """Returns in which precision a matrix product multiplies."""
        dtypes = {_first_array(type)[1] for type in operand_types[:2]}
        if dtypes != {"f32"}:
            return "float64" if "f64" in dtypes else "bfloat16"
        asked = (x.attribute(r'operand_precision"?[=:][\[{]"?(\w+)') or "default").lower()
        if self.backend == "cpu" or asked == "highest":
            return "float32"
        return "tensorfloat32" if self.backend == "gpu" else {"high": "bfloat16_3x"}.get(asked, "bfloat16")

    def type_bytes(self, type: str) -> float:
        """Returns the bytes in the device's memory of all arrays of a type."""
        return sum(self.array_bytes(*array) for array in _ARRAY.findall(type))

    def array_bytes(self, dtype: str, dimensions: str, layout: str) -> float:
        """Returns the bytes of an array in the device's memory: 0 in a TPU's fast memory, padded to its tiles."""
        sizes = [int(size) for size in dimensions.split(",") if size]
        if self.backend == "tpu":
            if "S(" in layout:
                return 0.0
            tile = re.search(r"T\(([\d,]+)\)", layout)
            from_minor = [int(axis) for axis in layout.split(":")[0].split(",") if axis]
            for length, axis in zip(reversed(tile[1].split(",") if tile else []), from_minor, strict=False):
                sizes[axis] = -(-sizes[axis] // int(length)) * int(length)
        return math.prod(sizes) * _element_bytes(dtype)


def _plain_bytes(dtype: str, dimensions: str, _: str) -> float:
    """Returns the bytes of an array's numbers, wherever they are."""
    return math.prod(int(size) for size in dimensions.split(",") if size) * _element_bytes(dtype)


def _element_bytes(dtype: str) -> float:
    """Returns the bytes of a number; XLA's names of dtypes, such as bf16 and f8e4m3fn, begin with its bits.

    >>> [_element_bytes(dtype) for dtype in ("pred", "s4", "f8e4m3fn", "bf16", "c64", "token")]
    [1, 0.5, 1.0, 2.0, 8.0, 0]
    """
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else int(dtype == "pred")


def _dimensions(type: str) -> list[int]:
    """Returns the sizes of the first array of a type."""
    return [int(size) for size in _first_array(type)[2].split(",") if size]


def _first_array(type: str) -> re.Match[str]:
    """Returns the match of `_ARRAY` with the first array of a type."""
    match = _ARRAY.search(type)
    assert match is not None, f"no array in {type}"
    return match


def _result_bytes(x: _Instruction, opcode: str) -> float:
    """Returns the bytes of an exchange's results on a device.

    Args:
      x: the exchange, or the instruction that begins it.
      opcode: its opcode without "-start".
    """
    # The type of an exchange that has only begun is (operands, results), in this order.
    arrays = _ARRAY.findall(x.type)
    if x.opcode.endswith("-start") and len(arrays) > 1:
        # On a TPU, marks of the exchange follow: scalars of type u32, which no operand is.
        if opcode == "collective-permute":
            arrays = [array for array in arrays if array[:2] != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    return sum(_plain_bytes(*array) for array in arrays)


def _source(x: _Instruction) -> str:
    """Returns the operation that an instruction stems from."""
    return x.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""


def _called(x: _Instruction) -> str:
    """Returns what a custom call calls; "" for another instruction."""
    return x.attribute(r'custom_call_target="([^"]*)"') or ""


def _branches(x: _Instruction) -> list[str]:
    """Returns the computations of a conditional."""
    listed = x.attribute(r"branch_computations=\{([^}]*)\}")
    if listed is not None:
        return [name.strip().lstrip("%") for name in listed.split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", x.attributes)


def _convolution_flops(x: _Instruction, operand_types: list[str]) -> float:
    """Returns the operations of a convolution; places that padding or dilation fills with zeros are not counted.

    They are 2 (batch / batch groups) (inputs of a group) (outputs) prod_a places_a. For the spatial axis a, places_a
    counts the pairs of an output o and a tap k whose place o stride - pad + k kernel_dilation holds a number of the
    input: it is a multiple of base_dilation, from 0 to (inputs_a - 1) base_dilation.

    Args:
      x: the convolution, with labels of its axes such as "b01f_01io->b01f", or a call of a library with such labels.
      operand_types: the types of the images and of the kernel, such as "f32[8,28,28,1]{3,2,1,0}".

    Returns: the number, each multiplication and each addition counted as one; 0 where there are no labels.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    if labels is None:
        return 0.0
    (left, kernel, result), shapes = labels.groups(), [*map(_dimensions, operand_types[:2]), _dimensions(x.type)]
    window = x.attribute(r"window=\{([^}]*)\}") or ""

    def numbers(name: str, default: str) -> list[str]:
        stated = re.search(rf"\b{name}=([\d_x\-]+)", window)
        return stated[1].split("x") if stated else [default] * sum(label.isdigit() for label in kernel)

    options = [
        numbers(*option) for option in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    ]
    places = 1.0
    for axis, (stride, pad, base_dilation, kernel_dilation) in enumerate(zip(*options, strict=True)):
        inputs, taps, outputs = (
            shape[label.index(str(axis))] for shape, label in zip(shapes, (left, kernel, result), strict=True)
        )
        at_output = np.arange(outputs) * int(stride) - int(pad.split("_")[0])
        reach = (inputs - 1) * int(base_dilation) + 1
        count = 0
        for tap in range(taps):
            at_input = at_output + tap * int(kernel_dilation)
            count += int(((at_input >= 0) & (at_input < reach) & (at_input % int(base_dilation) == 0)).sum())
        places *= count
    batch_groups = int(x.attribute(r"batch_group_count=(\d+)") or 1)
    batch = shapes[0][left.index("b")] / batch_groups
    return 2.0 * places * batch * shapes[1][kernel.index("i")] * shapes[2][result.index("f")]

"""Computes digests of what a run computes: of its round, and of all that a private run's releases depend on.

The digest of a run's round is in its checkpoints, so that a run does not go on with another program (`RoundProgram`).

The fingerprint of a private run is a digest of its program, its initial model, its data and its seed. A seed determines
the noise of every round. Two programs with the same seed would share the noise, and the difference of their releases
would be free of it. They would also share cohorts, and one release could then reveal the sampling that hides clients in
the other (tests/running/test_fingerprint.py::test_shared_cohorts_do_not_add). Therefore the key of a private run is
bound to its fingerprint. Runs with equal fingerprints and keys make equal releases, bit for bit, on any devices. Runs
with different fingerprints draw independent cohorts and noise, and their epsilons add.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import types
import warnings
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fedjax_sim import engine, tree
from fedjax_sim.engine.jaxpr import CALLS, Program, jaxpr_and_constants
from fedjax_sim.running.environment import matmul_precision, numerics
from fedjax_sim.types import Algorithm, Array, PyTree, noisy_parts

OPAQUE = "?"
ONLY_LOOKING = ("debug_callback", "debug_print")  # host callbacks that change no number


@runtime_checkable
class Fingerprinted(Protocol):
    """A store of the library, whose methods are host callbacks."""

    @property
    def fingerprint(self) -> str:
        """What its callbacks read and compute, as text."""
        ...


def is_private(algorithm: Algorithm) -> bool:
    """Returns whether a part of the algorithm adds noise that hides clients."""
    return bool(noisy_parts(algorithm.parts))


def is_opaque(digest: str) -> bool:
    """Returns whether a fingerprint, or a program's digest, leaves open what was computed."""
    return not digest or digest.endswith(OPAQUE)


def fingerprint(key: Array, algorithm: Algorithm, params: PyTree, population: PyTree, program: str = "") -> str:
    """Returns 32 hex digits that depend on everything that a private run's releases depend on; "" without noise.

    A computation in a host callback cannot be read, except for the library's own reading of stores. (`jax.debug.print`
    changes no number and is ignored.) The fingerprint of a program with callbacks covers the rest, and ends in a
    question mark. Two such runs may still share their noise, so each needs a seed of its own.

    Args:
      key: the key of the run.
      algorithm, params, population: the run's algorithm, its initial model and its clients.
      program: its `program_digest`, if it is known; else it is computed.

    Guarantees:
      The fingerprint changes with learning rate, model, mechanism, data set, initial model and key
      (tests/running/test_fingerprint.py::test_what_counts).
      It changes with whatever changes draws or rounding: versions, backend, precision, threads, lanes and chunks
      (tests/running/test_fingerprint.py::test_other_numerics_are_another_run).
      It is the same for any devices, client memory and process
      (tests/running/test_fingerprint.py::test_devices_leave_no_trace, ::test_processes_agree).
      Programs with callbacks are distinguished by the parts that can be read
      (tests/running/test_fingerprint.py::test_opaque_programs).
    """
    if not is_private(algorithm):
        return ""
    program = program or program_digest(algorithm, params, population)
    return fingerprint_of_digests(
        program, array_digest(jax.tree.map(jnp.asarray, params)), array_digest(population), key
    )


def fingerprint_of_digests(program: str, start: str, data: str, key: Array) -> str:
    """Returns the fingerprint, from the digests of program, initial model and data, and from the key."""
    words = [program, start, data, str(jax.random.key_impl(key)), array_digest(key)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32] + OPAQUE * is_opaque(program)


def bound(key: Array, stream: str) -> Array:
    """Returns a key that depends on the text `stream`, such as a fingerprint; the key itself for "".

    >>> key = jax.random.key(0)
    >>> bound(key, "") is key, bool((bound(key, "a") == bound(key, "b")).all())
    (True, False)
    """
    words = np.frombuffer(hashlib.sha256(stream.encode()).digest()[:16], "<u4") if stream else ()
    return functools.reduce(lambda key, word: jax.random.fold_in(key, np.uint32(word)), words, key)


def array_digest(values: PyTree) -> str:
    """Returns the SHA-256 of a pytree's arrays: dtypes, shapes, bytes. It takes below a second for each gigabyte."""
    return tree.sha256_of(values).hexdigest()


def value_digest(value: Any) -> str:
    """Returns the SHA-256 of plain values and arrays; it ends in a question mark if a part of them cannot be read.

    >>> value_digest({"a": 1, "b": [2.0]}) == value_digest({"b": [2.0], "a": 1}), is_opaque(value_digest(print))
    (True, True)
    """
    findings = _Findings({}, [], set())
    word = _word(value, findings)
    return hashlib.sha256(repr(word).encode()).hexdigest() + OPAQUE * bool(findings.opaque)


def program_digest(algorithm: Algorithm, params: PyTree, population: PyTree) -> str:
    """Returns the SHA-256 of an algorithm's traced init and step, and of the versions that compile them.

    Constants in the programs count. Versions count because another compiler rounds differently. The digest ends in a
    question mark if a part of the programs cannot be read.

    Args:
      algorithm: whose init and step are traced.
      params: the initial model, of which shapes and dtypes are read.
      population: arrays or their shapes and dtypes, which are the programs' arguments.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    with engine.unplaced(), jax.default_matmul_precision(matmul_precision()):
        # A new lambda is traced anew: a cached trace would depend on the devices that it was made for.
        init, state = jax.make_jaxpr(lambda *args: algorithm.init(*args), return_shape=True)(
            key, tree.spec(params), population
        )
        step = jax.make_jaxpr(lambda *args: algorithm.step(*args))(key, state, population)
    findings = _Findings({}, [], set())
    words = (
        sorted(numerics().items()),
        jax.__version__,
        jaxlib.version.__version__,
        _digest(init, findings),
        _digest(step, findings),
    )
    return hashlib.sha256(repr(words).encode()).hexdigest() + OPAQUE * bool(findings.opaque)


class RoundProgram(NamedTuple):
    """The program of a run's round, as its checkpoints hold it.

    A program for several devices is another one than that for one device, so their number stands beside the digest.
    """

    sha256: str  # it ends in a question mark if a part of the program cannot be read
    devices: int  # that share a cohort


def round_program(program: Program) -> RoundProgram:
    """Returns the digest of a traced round, and the number of devices that it is for.

    Guarantees:
      The digest is the same in every process, and changes with everything that a round computes
      (tests/running/test_same_program.py::test_what_counts).
    """
    findings = _Findings({}, [], set())
    digest = _digest(program, findings)
    return RoundProgram(digest + OPAQUE * bool(findings.opaque), max(findings.devices, default=1))


def round_program_on(
    num_devices: int, algorithm: Algorithm, key: Array, params: PyTree, population: PyTree
) -> RoundProgram:
    """Returns the program that a round of this algorithm would have on another number of devices, which is not run.

    Call it where client memory is set to the kind that the run has (`engine.client_memory`).
    """
    with engine.assumed_devices(num_devices), warnings.catch_warnings(action="ignore"):
        state = jax.eval_shape(lambda: algorithm.init(key, params, population))
        # A new lambda is traced anew: a cached trace may have been made for other devices.
        program = jax.make_jaxpr(lambda *args: algorithm.step(*args))(key, state, population)
    return round_program(program)


class _Findings(NamedTuple):
    """Results that are collected while a program is read."""

    digests: dict[int, str]  # of inner programs, by identity
    opaque: list[str]  # parameters whose text does not determine their meaning
    devices: set[int]  # the sizes of the meshes that occur


def _digest(program: Program, findings: _Findings) -> str:
    """Returns the SHA-256 of a traced program.

    It does not depend on the names of variables and functions, or on memory addresses.

    Args:
      program: what tracing returned, with or without its constants.
      findings: of all programs that are read together. Digests of inner programs are looked up in it and added to it,
        and so are parameters that cannot be read and sizes of meshes.

    Returns: 64 hex digits. Whether a part could not be read is in `findings.opaque`, and not in the digits.
    """
    if id(program) in findings.digests:
        return findings.digests[id(program)]
    jaxpr, consts = jaxpr_and_constants(program)
    sha = hashlib.sha256()
    numbers = {}  # variable -> its number, in the order in which variables occur

    def add(*words: Hashable) -> None:
        sha.update(repr(words).encode())

    def value(x: Any) -> Hashable:
        """Returns a literal by its bytes, and a variable by its number in place of its name."""
        if isinstance(x, Literal):
            return str(x.aval), np.asarray(x.val).tobytes()
        return str(x.aval), numbers.setdefault(x, len(numbers))

    add(*map(value, (*jaxpr.constvars, *jaxpr.invars)), *map(array_digest, consts))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ONLY_LOOKING:
            continue
        add(eqn.primitive.name, *map(value, eqn.invars))
        for name, parameter in sorted(eqn.params.items()):
            # The other parameters of a call, such as its name, do not change what is computed.
            if eqn.primitive.name not in CALLS or isinstance(parameter, Program):
                add(name, _word(parameter, findings))
        add(*map(value, eqn.outvars))
    add(*map(value, jaxpr.outvars))
    return findings.digests.setdefault(id(program), sha.hexdigest())


def _word(value: Any, findings: _Findings) -> Hashable:
    """Returns an equation's parameter as a value whose text is the same in every process.

    Args:
      value: the parameter: a number, an array, a program, a mesh, a function, or containers of them.
      findings: as for `_digest`.

    Returns: numbers, texts and tuples of them. A value that none of the rules below knows counts by its type and its
      text; if the text does not determine what it means, it is added to `findings.opaque`.
    """
    word_of = functools.partial(_word, findings=findings)
    if isinstance(value, Program):
        return _digest(value, findings)
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, jax.Array)):
        return array_digest(value)
    if isinstance(value, Mesh | AbstractMesh):
        # Devices count by their number: which ones they are changes no bit.
        findings.devices.add(value.size)
        return value.axis_names, tuple(value.shape.values())
    if isinstance(value, NamedSharding):
        mesh_word = word_of(value.mesh)
        # An array that is whole on every device is traced with its place if it is there, and without it as a spec.
        is_whole = all(axis is None for axis in value.spec)
        return word_of(None) if is_whole else (mesh_word, str(value.spec))
    if hasattr(value, "key_shape"):  # a random generator
        return value.tag
    if isinstance(value, (tuple, list)):
        return tuple(map(word_of, value))
    if isinstance(value, (set, frozenset)):
        # A set has no order, so its members are sorted by their text.
        return tuple(sorted(map(repr, map(word_of, value))))
    if isinstance(value, dict):
        return tuple(sorted((repr(word_of(name)), word_of(x)) for name, x in value.items()))
    if hasattr(value, "callback_func"):
        return word_of(value.callback_func)
    if isinstance(value, functools.partial):
        return word_of(value.func), word_of(value.args), word_of(value.keywords)
    # The library's own stores state the fingerprint of their content.
    if isinstance(value, types.MethodType) and isinstance(value.__self__, Fingerprinted):
        return value.__qualname__, value.__self__.fingerprint
    # Any other object is known by its text, without memory addresses. If it had one, or if it can be called, its text
    # does not determine its meaning.
    text = re.sub("0x[0-9a-f]+", "", with_addresses := repr(value))
    if callable(value) or text != with_addresses:
        findings.opaque.append(text)
    return type(value).__name__, text

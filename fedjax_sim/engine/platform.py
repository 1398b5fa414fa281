"""States the platform that a program is traced for: that of this machine's devices, or one that a caller asks for.

Code that differs by hardware asks `target` while it is traced, and does not ask which machine is running. So a program
for a TPU can be made and read on a laptop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax

from fedjax_sim import validate

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # jaxlib states no types
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # JAX's name for lowering: the backend's name


class _Target(NamedTuple):
    """The hardware that programs are traced for."""

    backend: str  # "cpu", "gpu" or "tpu"
    devices: tuple[Device, ...] = ()  # () for this machine's
    device_memory: int | None = None  # bytes of each of `devices`


# The setting is part of JAX's trace context: a program traced for one platform is not reused for another.
_target = jax.make_user_context(None)


def target() -> str:
    """Returns the platform of the program that is being traced: "cpu", "gpu" or "tpu"."""
    return jax.default_backend() if _target.value is None else _target.value.backend


def visible_devices() -> list[Device]:
    """Returns the devices that a program is traced for, of all processes: this machine's, or those that are stated."""
    return jax.devices() if _target.value is None else list(_target.value.devices) or jax.devices()


def are_devices_absent() -> bool:
    """Returns whether a program is traced for devices that were stated, on which nothing runs."""
    return _target.value is not None and bool(_target.value.devices)


def device_memory() -> int | None:
    """Returns the bytes of memory of each device that a program is traced for; None where JAX does not know them."""
    if are_devices_absent():
        return _target.value.device_memory
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


@contextlib.contextmanager
def compiling_for(platform: str, devices: Sequence[Device] = (), device_memory: int | None = None) -> Iterator[None]:
    """Traces programs inside the block for a platform, which need not be that of this machine.

    A program for a TPU can thus be made and read on a laptop. A function that `jax.jit` has traced outside of the block
    is traced anew inside.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu", as in JAX's `lowering_platforms`.
      devices: the devices of a topology of JAX's, over which `device_mesh` then puts programs that are compiled and
        never run; () for this machine's.
      device_memory: the bytes of memory of each of these devices; None: not known.

    Raises:
      ValueError: for another platform.

    Guarantees:
      Every row of the law tests lowers for cpu, cuda and tpu (tests/laws/test_platforms.py).

    >>> import jax
    >>> from fedjax_sim import engine
    >>> with compiling_for("cuda"):
    ...     platform = engine.target()
    >>> platform, engine.target() == jax.default_backend()
    ('gpu', True)
    """
    validate.one_of("platform", platform, PLATFORMS)
    with _target(_Target(PLATFORMS[platform], tuple(devices), device_memory)):
        yield

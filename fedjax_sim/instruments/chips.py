"""Known accelerators, and the vendors' compilers for them, which run on machines without one.

Sources of the numbers: NVIDIA's data sheets of A100 80GB SXM, H100 SXM5 and H200 SXM (dense, without sparsity), and
Google Cloud's pages of TPU versions.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax

from fedjax_sim import validate

# jaxlib states no types, so that type checkers take its class for a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
JAX_SHARE = 0.75  # of a GPU's memory, as long as XLA_PYTHON_CLIENT_MEM_FRACTION does not state another


class Chip(NamedTuple):
    """One device of an accelerator."""

    title: str
    platform: str  # "cuda" or "tpu"
    memory_bytes: int
    bytes_per_second: float  # of its memory
    flops_per_second: Mapping[str, float]  # of its matrix units, by the precisions of `instruments.compiled`
    link_bytes_per_second: float  # to the other devices of its node or pod, all links in one direction
    launch_seconds: float  # what beginning a kernel adds to its work
    topology: str  # TPU: its name in JAX; CUDA: XLA's description of the card
    most_devices: int = 1  # that the vendor joins by links: the GPUs of a node, or a pod
    share: float = 1.0  # of its memory that JAX takes unless it is told otherwise

    @property
    def usable_bytes(self) -> int:
        """The bytes of memory that a run may use."""
        return int(self.share * self.memory_bytes)


def _tpu(title: str, *, gib: int, gigabytes: float, teraflops: float, links: float, topology: str, pod: int) -> Chip:
    """Returns a TPU; a float32 product takes six passes of its bfloat16 units, and three in the precision "high".

    Args:
      title: of the chip, for reports.
      gib: memory in GiB, 2^30 bytes.
      gigabytes: of the memory's speed, 1e9 bytes per second.
      teraflops: of the bfloat16 units, 1e12 operations per second.
      links: to other devices, 1e9 bytes per second, all links in one direction.
      topology: the chip's name in JAX.
      pod: the most devices that links join.
    """
    peak = teraflops * 1e12
    precisions = {"float32": peak / 6, "bfloat16_3x": peak / 3, "bfloat16": peak}
    return Chip(
        title=title,
        platform="tpu",
        memory_bytes=gib << 30,
        bytes_per_second=gigabytes * 1e9,
        flops_per_second=precisions,
        link_bytes_per_second=links * 1e9,
        launch_seconds=0.0,
        topology=topology,
        most_devices=pod,
    )


def _gpu(
    title: str,
    *,
    memory_bytes: int,
    gigabytes: float,
    float32: float,
    tensorfloat32: float,
    links: float,
    card: str,
) -> Chip:
    """Returns a GPU of a node of eight. Its bfloat16 units do twice the work of its TF32 units.

    Args:
      title: of the card, for reports; XLA's text has it too.
      memory_bytes: of the card.
      gigabytes: of the memory's speed, 1e9 bytes per second.
      float32, tensorfloat32: 1e12 operations per second, without sparsity.
      links: to the other cards of the node, 1e9 bytes per second, all links in one direction.
      card: XLA's text about the card, without its memory.
    """
    precisions = {"float32": float32, "tensorfloat32": tensorfloat32, "bfloat16": 2 * tensorfloat32}
    peaks = {name: teraflops * 1e12 for name, teraflops in precisions.items()}
    memory = f"memory_bandwidth: {gigabytes * 1e9:.0f} device_memory_size: {memory_bytes}"
    text = f'gpu_device_info {{ {card} {memory} }} platform_name: "CUDA" device_description_str: "{title}"'
    return Chip(
        title=title,
        platform="cuda",
        memory_bytes=memory_bytes,
        bytes_per_second=gigabytes * 1e9,
        flops_per_second=peaks,
        link_bytes_per_second=links * 1e9,
        launch_seconds=1e-6,  # a kernel of a recorded graph begins about a microsecond after the one before it
        topology=text,
        most_devices=8,
        share=JAX_SHARE,
    )


_CUDA = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 "
    "registers_per_block_limit: 65536 "
)
_HOPPER = _CUDA + (
    "shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800 clock_rate_ghz: 1.98 "
    "shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }"
)
_AMPERE = _CUDA + (
    "shared_memory_per_core: 167936 core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040 clock_rate_ghz: 1.41 "
    "shared_memory_per_block_optin: 166912 cuda_compute_capability { major: 8 }"
)
CHIPS: dict[str, Chip] = {
    "a100": _gpu(
        "NVIDIA A100 80GB",
        memory_bytes=85_094_825_984,
        gigabytes=2039,
        float32=19.5,
        tensorfloat32=156,
        links=300,
        card=_AMPERE,
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB",
        memory_bytes=84_942_979_072,
        gigabytes=3352,
        float32=66.9,
        tensorfloat32=494.7,
        links=450,
        card=_HOPPER,
    ),
    "h200": _gpu(
        "NVIDIA H200",
        memory_bytes=150_109_880_320,
        gigabytes=4800,
        float32=66.9,
        tensorfloat32=494.7,
        links=450,
        card=_HOPPER,
    ),
    # The compiler without a chip has a device for each of the two cores. JAX on a v4 has one for both.
    "v4": _tpu(
        "half of a TPU v4, one of its two cores",
        gib=16,
        gigabytes=600,
        teraflops=137.5,
        links=150,
        topology="v4",
        pod=8192,
    ),
    "v5e": _tpu("TPU v5e", gib=16, gigabytes=819, teraflops=197, links=200, topology="v5e", pod=256),
    # Slices have up to 6,144.
    "v5p": _tpu("TPU v5p", gib=95, gigabytes=2765, teraflops=459, links=600, topology="v5p", pod=4096),
    "v6e": _tpu("TPU v6e", gib=32, gigabytes=1638, teraflops=918, links=400, topology="v6e", pod=256),
}
FLAT_PODS = {"v5e", "v6e"}  # two-dimensional; the others have three dimensions


def missing_compiler(chip: Chip) -> str:
    """Returns what to install so that programs can be compiled for a chip; "" where it is there."""
    if chip.platform == "tpu":
        return "" if importlib.util.find_spec("libtpu") else "pip install 'fedjax_sim[tpu]'"
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    try:
        is_there = any(map(importlib.util.find_spec, plugins))
    except ModuleNotFoundError:  # no plugin at all
        is_there = False
    return "" if is_there else "pip install 'fedjax_sim[cuda]'"


def chip_devices(chip: Chip, num_devices: int) -> list[Device]:
    """Returns devices of a chip that programs can be compiled for and that nothing runs on.

    Args:
      chip: one of `CHIPS`.
      num_devices: a power of two, at most `chip.most_devices`.

    Raises: ValueError for another number; ModuleNotFoundError without the vendor's compiler.
    """
    validate.integer("num_devices", num_devices, 1, chip.most_devices)
    if num_devices & (num_devices - 1):
        validate.fail("num_devices", "a power of two", num_devices)
    if hint := missing_compiler(chip):
        raise ModuleNotFoundError(f"The compiler for {chip.title} is not installed: {hint}")
    from jax.experimental import topologies

    if chip.platform == "cuda":
        _find_assembler()
        node = {"target_config": chip.topology, "topology": f"1x1x{num_devices}"}
        return list(topologies.get_topology_desc("", "cuda", **node).devices)
    # What libtpu would otherwise ask the machine for. One kind of machine compiles for all kinds.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    shape = "x".join(map(str, _pod_shape(chip, num_devices)))
    # A pod has at least a host's devices.
    return list(topologies.get_topology_desc(f"{chip.topology}:{shape}", "tpu").devices)[:num_devices]


def _pod_shape(chip: Chip, num_devices: int) -> tuple[int, ...]:
    """Returns the sides of a pod of TPUs: as equal as powers of two can be, the first ones the shorter ones."""
    if chip.topology in FLAT_PODS:
        doublings = max(num_devices, 4).bit_length() - 1
        return 2 ** (doublings // 2), 2 ** (doublings - doublings // 2)
    num_chips = max(num_devices // (2 if chip.topology == "v4" else 1), 4)
    if num_chips == 4:
        return 2, 2, 1
    doublings = num_chips.bit_length() - 1
    return tuple(2 ** ((doublings + side) // 3) for side in range(3))


def _find_assembler() -> None:
    """Puts NVIDIA's assembler, which comes with JAX's wheels, where XLA looks for it."""
    package = importlib.util.find_spec("nvidia")
    roots = None if package is None else package.submodule_search_locations
    folders = [Path(root) for root in roots or []]
    assemblers = [path for root in folders for path in root.glob("*/bin/ptxas")]
    if assemblers:
        os.environ["PATH"] = os.pathsep.join([str(assemblers[0].parent), os.environ.get("PATH", "")])

"""Forecasts a round on an accelerator that is not there, from the program that the vendor's compiler makes for it.

Times are estimates from below: nine programs took 1.1 to 2.1 times as long on one H100.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_sim import engine
from fedjax_sim.engine.client_memory.host_calls import STAND_IN
from fedjax_sim.instruments.chips import Chip, Device
from fedjax_sim.instruments.compiled import Collective, CompiledProgram, read_compiled
from fedjax_sim.types import Algorithm, Array, Population, PyTree


class TargetForecast(NamedTuple):
    """A round on one or several devices of a chip."""

    memory_bytes: int  # that a device needs
    program: CompiledProgram  # what each device does
    seconds: dict[str, float]  # of a round at least, by what binds: see `least_seconds`
    compile_seconds: float  # on this machine

    @property
    def round_seconds(self) -> float:
        """The least time of a round."""
        return sum(self.seconds.values())


def forecast_on(
    chip: Chip, devices: list[Device], algorithm: Algorithm, *, key: Array, params: PyTree, population: Population
) -> TargetForecast:
    """Compiles a round for devices of a chip, reads the program, and runs nothing.

    Call it inside of `engine.compiling_for(chip.platform, devices, chip.memory_bytes)`. The algorithm must have been
    made in there too, because its plan and its mesh follow the devices.

    Args:
      chip: what the devices are.
      devices: from `chips.chip_devices`.
      algorithm, key, params, population: as for `run`; of the population only shapes count.

    Raises: MemoryError if the compiler says that the device's memory does not suffice; NotImplementedError with its
    words if it refuses the program otherwise, and for clients whose data are read on the host.
    """
    state = jax.eval_shape(algorithm.init, key, params, population)
    mesh = engine.device_mesh()
    everywhere = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    # The key says which devices there are. With several of them, the compiler places state and population, as in a run.
    place = everywhere if mesh is None else None
    key_shape = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
    others = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, population))
    arguments = (key_shape, *others)
    start_seconds = time.perf_counter()
    traced = jax.jit(algorithm.step, donate_argnums=1).trace(*arguments)
    num_host_calls = _num_host_calls(traced.jaxpr.jaxpr)
    lowered = traced.lower(lowering_platforms=(chip.platform,))
    # Autotuning would run kernels.
    options: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"} if chip.platform == "cuda" else {}
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(chip, error) from error
    compile_seconds = time.perf_counter() - start_seconds
    text = compiled.as_text()
    assert text is not None, "XLA's programs have a text"
    program = read_compiled(text, engine.target())
    program = program._replace(num_host_calls=program.num_host_calls + num_host_calls)
    # A topology may spread the devices over several hosts, so this process's devices are not all of them.
    memory_bytes = engine.needs_of_a_device(compiled).total
    return TargetForecast(memory_bytes, program, least_seconds(program, chip, len(devices)), compile_seconds)


def _num_host_calls(jaxpr: core.Jaxpr) -> int:
    """Returns how many calls of the host in a program `engine.on_host` has replaced.

    Raises: NotImplementedError for a call that it has not replaced.
    """
    number = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name.endswith("_callback"):
            hint = "Plan with clients whose data are in memory."
            raise NotImplementedError(f"a round calls the host, and no program is made for that here. {hint}")
        number += equation.params.get("name") == STAND_IN
        number += sum(map(_num_host_calls, core.jaxprs_in_params(equation.params)))
    return number


def _refusal(chip: Chip, error: Exception) -> Exception:
    """Returns what a compiler's refusal means; its first line says so, beginning with the kind of error."""
    words = str(error).splitlines()[0][:300]
    kind = MemoryError if words.startswith("RESOURCE_EXHAUSTED") else NotImplementedError
    return kind(f"the compiler for {chip.title} refuses a round. {words}")


def least_seconds(program: CompiledProgram, chip: Chip, num_devices: int) -> dict[str, float]:
    """Returns an estimate from below of the seconds that a program takes on a chip, by what binds.

    A kernel takes the time of its bytes at the memory's full speed, or of its matrix products at the peak of the matrix
    units, whichever is longer ("memory", "matrix products"); and a launch ("launches"). Other arithmetic is taken to
    cost nothing. An exchange takes the time in which a ring of devices passes its bytes on ("exchanges").

    It is no proof: bytes that lie in a GPU's cache come faster, kernels may overlap, and a switch may add on the way.

    Args:
      program: compiled for this chip.
      chip: its bandwidths in bytes/s, its peaks in operations/s, and the seconds of a launch.
      num_devices: D, the devices of an exchange's ring.

    Guarantees: each is as computed by hand (tests/instruments/test_target_forecast.py::test_seconds_by_hand).
    """
    seconds: dict[str, float] = dict.fromkeys(("memory", "matrix products", "launches", "exchanges"), 0.0)
    for kernel in program.kernels:
        in_memory = kernel.memory_bytes / chip.bytes_per_second
        # A precision that the chip does not state, such as float64, is not faster than float32.
        fastest = chip.flops_per_second["float32"]
        in_products = sum(flops / chip.flops_per_second.get(name, fastest) for name, flops in kernel.flops)
        bound = "memory" if in_memory >= in_products else "matrix products"
        seconds[bound] += kernel.times * max(in_memory, in_products)
        seconds["launches"] += kernel.times * chip.launch_seconds
    for exchange in program.collectives:
        passed_bytes = _shares_passed_on(exchange, num_devices) * exchange.result_bytes
        seconds["exchanges"] += exchange.times * passed_bytes / chip.link_bytes_per_second
    return seconds


def _shares_passed_on(exchange: Collective, num_devices: int) -> float:
    """Returns how often each device of a ring sends as many bytes as its result has."""
    others = (num_devices - 1) / num_devices
    if exchange.opcode == "all-reduce":
        return 2 * others
    # The result of a scattered sum is one device's share of it.
    return others * num_devices if exchange.opcode == "reduce-scatter" else others

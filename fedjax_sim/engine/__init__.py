"""Runs a function for all slots of a cohort on the devices that there are, and sums the messages exactly.

The engine chooses how many clients are simulated at once, and how they share devices. It knows nothing of what a client
or a server does.
"""

from fedjax_sim.engine.all_messages.order_statistics import median, order_statistic, trimmed_mean
from fedjax_sim.engine.all_messages.rows import Rows, all_rows, buffer, fill, rows_in_place
from fedjax_sim.engine.all_messages.top_k import top_k, top_k_mask
from fedjax_sim.engine.arithmetic import exact_sums, fast_arithmetic, reproducible, rounded_here, unsigned_zeros
from fedjax_sim.engine.client_memory.disk import MemoryFileError
from fedjax_sim.engine.client_memory.host_calls import on_host
from fedjax_sim.engine.client_memory.kinds import Disk, Sharded
from fedjax_sim.engine.client_memory.store import (
    client_memory,
    gathered,
    memory_files,
    memory_limit,
    owned,
    put,
    scattered,
    store,
    take,
)
from fedjax_sim.engine.constants import constants_as_arguments, jit
from fedjax_sim.engine.flops import flops
from fedjax_sim.engine.fold import (
    assumed_devices,
    check_mesh,
    device_mesh,
    fold,
    is_unplaced,
    mesh_for,
    num_places,
    one_device,
    unplaced,
)
from fedjax_sim.engine.largest import all_finite, largest_magnitude
from fedjax_sim.engine.plan import (
    Needs,
    Plan,
    check_plan,
    needs,
    needs_of_a_device,
    plan_for,
    shared_out,
    total_memory,
    working_bytes,
)
from fedjax_sim.engine.platform import compiling_for, target, visible_devices
from fedjax_sim.engine.shuffling import client_keys, shuffle
from fedjax_sim.engine.xla_passes import compiler_options

__all__ = [
    "Disk",
    "MemoryFileError",
    "Needs",
    "Plan",
    "Rows",
    "Sharded",
    "all_finite",
    "all_rows",
    "assumed_devices",
    "buffer",
    "check_mesh",
    "check_plan",
    "client_keys",
    "client_memory",
    "compiler_options",
    "compiling_for",
    "constants_as_arguments",
    "device_mesh",
    "exact_sums",
    "fast_arithmetic",
    "fill",
    "flops",
    "fold",
    "gathered",
    "is_unplaced",
    "jit",
    "largest_magnitude",
    "median",
    "memory_files",
    "memory_limit",
    "mesh_for",
    "needs",
    "needs_of_a_device",
    "num_places",
    "on_host",
    "one_device",
    "order_statistic",
    "owned",
    "plan_for",
    "put",
    "reproducible",
    "rounded_here",
    "rows_in_place",
    "scattered",
    "shared_out",
    "shuffle",
    "store",
    "take",
    "target",
    "top_k",
    "top_k_mask",
    "total_memory",
    "trimmed_mean",
    "unplaced",
    "unsigned_zeros",
    "visible_devices",
    "working_bytes",
]

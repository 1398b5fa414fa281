"""Runs a function for all slots of a cohort on the devices that there are, and sums the messages exactly.

The engine chooses how many clients are simulated at once, and how they share devices. It knows nothing of what a client
or a server does.
"""

from fedjax_sim.engine.all_messages.order_statistics import (
    median as median,
    order_statistic as order_statistic,
    trimmed_mean as trimmed_mean,
)
from fedjax_sim.engine.all_messages.rows import (
    Rows as Rows,
    all_rows as all_rows,
    buffer as buffer,
    fill as fill,
    rows_in_place as rows_in_place,
)
from fedjax_sim.engine.all_messages.top_k import top_k as top_k, top_k_mask as top_k_mask
from fedjax_sim.engine.arithmetic import (
    exact_sums as exact_sums,
    fast_arithmetic as fast_arithmetic,
    reproducible as reproducible,
    rounded_here as rounded_here,
    unsigned_zeros as unsigned_zeros,
)
from fedjax_sim.engine.client_memory.disk import MemoryFileError as MemoryFileError
from fedjax_sim.engine.client_memory.host_calls import on_host as on_host
from fedjax_sim.engine.client_memory.kinds import Disk as Disk, Sharded as Sharded
from fedjax_sim.engine.client_memory.store import (
    client_memory as client_memory,
    gathered as gathered,
    memory_files as memory_files,
    memory_limit as memory_limit,
    owned as owned,
    put as put,
    scattered as scattered,
    store as store,
    take as take,
)
from fedjax_sim.engine.constants import constants_as_arguments as constants_as_arguments, jit as jit
from fedjax_sim.engine.flops import flops as flops
from fedjax_sim.engine.fold import (
    assumed_devices as assumed_devices,
    check_mesh as check_mesh,
    device_mesh as device_mesh,
    fold as fold,
    is_unplaced as is_unplaced,
    mesh_for as mesh_for,
    num_places as num_places,
    one_device as one_device,
    unplaced as unplaced,
)
from fedjax_sim.engine.largest import all_finite as all_finite, largest_magnitude as largest_magnitude
from fedjax_sim.engine.plan import (
    Needs as Needs,
    Plan as Plan,
    check_plan as check_plan,
    needs as needs,
    needs_of_a_device as needs_of_a_device,
    plan_for as plan_for,
    shared_out as shared_out,
    total_memory as total_memory,
    working_bytes as working_bytes,
)
from fedjax_sim.engine.platform import (
    compiling_for as compiling_for,
    target as target,
    visible_devices as visible_devices,
)
from fedjax_sim.engine.shuffling import client_keys as client_keys, shuffle as shuffle
from fedjax_sim.engine.xla_passes import compiler_options as compiler_options

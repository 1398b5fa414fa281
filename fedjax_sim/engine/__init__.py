"""The engine room: how many clients are simulated at once, never what they do."""

from fedjax_sim.engine import exact
from fedjax_sim.engine.buffer import buffer, fill
from fedjax_sim.engine.exact import combine, merge
from fedjax_sim.engine.fold import device_mesh, fold
from fedjax_sim.engine.plan import Plan, plan_for
from fedjax_sim.engine.store import put, store

__all__ = ["Plan", "buffer", "combine", "device_mesh", "exact", "fill", "fold", "merge", "plan_for", "put", "store"]

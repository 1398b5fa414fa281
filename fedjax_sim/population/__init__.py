"""The field: who exists and what they hold."""

from __future__ import annotations

from fedjax_sim.population.groups import Group, Grouped, grouped
from fedjax_sim.population.host import Host, host_store
from fedjax_sim.population.partition import (
    Partition,
    by_group,
    dirichlet,
    dirichlet_draws,
    feature_shift,
    iid,
    quantity_lognormal,
    quantity_power_law,
    shards,
)
from fedjax_sim.population.population import (
    Generated,
    Indexed,
    Stored,
    from_clients,
    generated,
    indexed,
    pooled,
    stored,
)
from fedjax_sim.population.store import read_store, write_store

__all__ = [
    "Generated",
    "Group",
    "Grouped",
    "Host",
    "Indexed",
    "Partition",
    "Stored",
    "by_group",
    "dirichlet",
    "dirichlet_draws",
    "feature_shift",
    "from_clients",
    "generated",
    "grouped",
    "host_store",
    "iid",
    "indexed",
    "pooled",
    "quantity_lognormal",
    "quantity_power_law",
    "read_store",
    "shards",
    "stored",
    "write_store",
]

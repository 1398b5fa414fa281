"""The types that all subpackages share: data are pytrees, and a part is a NamedTuple of pure functions.

`types.data` has the data of a round: populations, clients' examples, cohorts, reports, messages. `types.time` has
simulated time: the work that a round asks of clients, the time and energy that they spend, and the clock. `types.graph`
has a graph as an example. `types.parts` has the parts of a federation (samplers, clients, transforms, aggregators,
servers) and the algorithm made of them. `types.facts` has the facts that parts state about themselves.

A part carries static facts about itself, `facts`, such as its sensitivity. Compatibility checks and the accountant read
these facts. The default of each fact is the claim that promises least
(tests/laws/test_facts.py::test_facts_fail_closed).

Symbols in shapes: N clients in the population, m slots of a cohort, c slots of a chunk, n rows of a client, T rounds,
d model dimension.
"""

from fedjax_sim.types.data import (
    Array,
    Attackers,
    CheapReads,
    ClientData,
    Cohort,
    ColumnFills,
    ColumnValues,
    Count,
    FilePath,
    FolderPath,
    Groups,
    Learned,
    Mean,
    Metric,
    Noise,
    Observed,
    Outcome,
    Population,
    PyTree,
    Received,
    Report,
    Round,
    Scale,
    StalenessWeight,
    Subpopulation,
    Wire,
    learned_from,
)
from fedjax_sim.types.facts import AggregatorFacts, ClientFacts, ParamsKind, TransformFacts
from fedjax_sim.types.graph import GraphData
from fedjax_sim.types.parts import (
    Aggregator,
    Algorithm,
    Availability,
    ClientUpdate,
    Devices,
    Evaluated,
    Execution,
    Inside,
    Level,
    Sampler,
    ServerUpdate,
    Star,
    UpdateTransform,
    noisy_parts,
)
from fedjax_sim.types.time import Clock, Load, Spent, TimeInside, Timing, Work

__all__ = [
    "Aggregator",
    "AggregatorFacts",
    "Algorithm",
    "Array",
    "Attackers",
    "Availability",
    "CheapReads",
    "ClientData",
    "ClientFacts",
    "ClientUpdate",
    "Clock",
    "Cohort",
    "ColumnFills",
    "ColumnValues",
    "Count",
    "Devices",
    "Evaluated",
    "Execution",
    "FilePath",
    "FolderPath",
    "GraphData",
    "Groups",
    "Inside",
    "Learned",
    "Level",
    "Load",
    "Mean",
    "Metric",
    "Noise",
    "Observed",
    "Outcome",
    "ParamsKind",
    "Population",
    "PyTree",
    "Received",
    "Report",
    "Round",
    "Sampler",
    "Scale",
    "ServerUpdate",
    "Spent",
    "StalenessWeight",
    "Star",
    "Subpopulation",
    "TimeInside",
    "Timing",
    "TransformFacts",
    "UpdateTransform",
    "Wire",
    "Work",
    "learned_from",
    "noisy_parts",
]

"""The types that all subpackages share: data are pytrees, and a part is a NamedTuple of pure functions.

`types.data` has the data of a round: populations, clients' examples, cohorts, reports, messages. `types.time` has
simulated time: the work that a round asks of clients, the time and energy that they spend, and the clock. `types.graph`
has a graph as an example. `types.parts` has the parts of a federation (samplers, clients, transforms, aggregators,
servers) and the algorithm made of them. `types.facts` has the facts that parts state about themselves. `types.shares`
computes with shares of whole numbers, such as the share of its work that a client does.

A part carries static facts about itself, `facts`, such as its sensitivity. Compatibility checks and the accountant read
these facts. The default of each fact is the claim that promises least
(tests/laws/test_facts.py::test_facts_fail_closed).

Symbols in shapes: N clients in the population, m slots of a cohort, c slots of a chunk, n rows of a client, T rounds,
d model dimension.
"""

from fedjax_sim.types.data import (
    AnyArray as AnyArray,
    Array as Array,
    Attackers as Attackers,
    CheapReads as CheapReads,
    ClientData as ClientData,
    Cohort as Cohort,
    ColumnFills as ColumnFills,
    ColumnValues as ColumnValues,
    Count as Count,
    FilePath as FilePath,
    FolderPath as FolderPath,
    Groups as Groups,
    Learned as Learned,
    Mean as Mean,
    Metric as Metric,
    Noise as Noise,
    Observed as Observed,
    Outcome as Outcome,
    Population as Population,
    PyTree as PyTree,
    Received as Received,
    Report as Report,
    Round as Round,
    RowsOfTable as RowsOfTable,
    Scale as Scale,
    Scores as Scores,
    StalenessWeight as StalenessWeight,
    Subpopulation as Subpopulation,
    Units as Units,
    Wire as Wire,
    learned_from as learned_from,
)
from fedjax_sim.types.facts import (
    AggregatorFacts as AggregatorFacts,
    ClientFacts as ClientFacts,
    ParamsKind as ParamsKind,
    TransformFacts as TransformFacts,
)
from fedjax_sim.types.graph import GraphData as GraphData
from fedjax_sim.types.parts import (
    Aggregator as Aggregator,
    Algorithm as Algorithm,
    Availability as Availability,
    ClientUpdate as ClientUpdate,
    Devices as Devices,
    Evaluated as Evaluated,
    Execution as Execution,
    Inside as Inside,
    Level as Level,
    Sampler as Sampler,
    ServerUpdate as ServerUpdate,
    Star as Star,
    UpdateTransform as UpdateTransform,
    noisy_parts as noisy_parts,
)
from fedjax_sim.types.time import (
    Clock as Clock,
    Load as Load,
    Spent as Spent,
    TimeInside as TimeInside,
    Timing as Timing,
    Work as Work,
)

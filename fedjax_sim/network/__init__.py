"""This package simulates devices of clients, their availability, graphs of nodes, and links inside a model."""

from fedjax_sim.network.availability import always, bernoulli, both, charging_and_wifi, daily_window, diurnal
from fedjax_sim.network.changing import (
    epidemic,
    one_peer_exponential,
    random_matching,
    with_link_failures,
    with_node_failures,
)
from fedjax_sim.network.control import ControlCycle, control_cycle, most_feasible_work, smallest_deadline
from fedjax_sim.network.devices import Profile, heterogeneous, of_profiles
from fedjax_sim.network.distributions import Distribution, constant, lognormal, pareto, tiers, uniform
from fedjax_sim.network.eigenvalues import (
    Spectrum,
    algebraic_connectivity,
    laplacian_extremes,
    laplacian_matrix,
    spectrum,
)
from fedjax_sim.network.hazards import Hazard, memoryless, weibull
from fedjax_sim.network.link import Link, Transcript, link, transcript
from fedjax_sim.network.load import load_of
from fedjax_sim.network.markov import markov
from fedjax_sim.network.measured import measured
from fedjax_sim.network.mixing import Links, Mixing, laplacian, lazy, matrix_of, metropolis, mixed, neighbour_mean, push
from fedjax_sim.network.presets import cross_device, cross_silo
from fedjax_sim.network.radio import within_budget
from fedjax_sim.network.random_graphs import erdos_renyi, k_regular, small_world, stochastic_block
from fedjax_sim.network.topology import (
    Graph,
    complete,
    exponential,
    from_csv,
    from_edges,
    hears_back,
    hypercube,
    is_connected,
    path,
    remove_node,
    ring,
    star,
    torus,
)
from fedjax_sim.network.trace import trace

__all__ = [
    "ControlCycle",
    "Distribution",
    "Graph",
    "Hazard",
    "Link",
    "Links",
    "Mixing",
    "Profile",
    "Spectrum",
    "Transcript",
    "algebraic_connectivity",
    "always",
    "bernoulli",
    "both",
    "charging_and_wifi",
    "complete",
    "constant",
    "control_cycle",
    "cross_device",
    "cross_silo",
    "daily_window",
    "diurnal",
    "epidemic",
    "erdos_renyi",
    "exponential",
    "from_csv",
    "from_edges",
    "hears_back",
    "heterogeneous",
    "hypercube",
    "is_connected",
    "k_regular",
    "laplacian",
    "laplacian_extremes",
    "laplacian_matrix",
    "lazy",
    "link",
    "load_of",
    "lognormal",
    "markov",
    "matrix_of",
    "measured",
    "memoryless",
    "metropolis",
    "mixed",
    "most_feasible_work",
    "neighbour_mean",
    "of_profiles",
    "one_peer_exponential",
    "pareto",
    "path",
    "push",
    "random_matching",
    "remove_node",
    "ring",
    "small_world",
    "smallest_deadline",
    "spectrum",
    "star",
    "stochastic_block",
    "tiers",
    "torus",
    "trace",
    "transcript",
    "uniform",
    "weibull",
    "with_link_failures",
    "with_node_failures",
    "within_budget",
]

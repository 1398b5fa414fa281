"""This package simulates devices of clients, their availability, graphs of nodes, and links inside a model."""

from fedjax_sim.network.availability import (
    always as always,
    bernoulli as bernoulli,
    both as both,
    charging_and_wifi as charging_and_wifi,
    daily_window as daily_window,
    diurnal as diurnal,
)
from fedjax_sim.network.changing import (
    epidemic as epidemic,
    one_peer_exponential as one_peer_exponential,
    random_matching as random_matching,
    with_link_failures as with_link_failures,
    with_node_failures as with_node_failures,
)
from fedjax_sim.network.control import (
    ControlCycle as ControlCycle,
    control_cycle as control_cycle,
    most_feasible_work as most_feasible_work,
    smallest_deadline as smallest_deadline,
)
from fedjax_sim.network.devices import Profile as Profile, heterogeneous as heterogeneous, of_profiles as of_profiles
from fedjax_sim.network.distributions import (
    Distribution as Distribution,
    constant as constant,
    lognormal as lognormal,
    pareto as pareto,
    tiers as tiers,
    uniform as uniform,
)
from fedjax_sim.network.eigenvalues import (
    Spectrum as Spectrum,
    algebraic_connectivity as algebraic_connectivity,
    laplacian_extremes as laplacian_extremes,
    laplacian_matrix as laplacian_matrix,
    spectrum as spectrum,
)
from fedjax_sim.network.hazards import Hazard as Hazard, memoryless as memoryless, weibull as weibull
from fedjax_sim.network.link import Link as Link, Transcript as Transcript, link as link, transcript as transcript
from fedjax_sim.network.load import load_of as load_of
from fedjax_sim.network.markov import markov as markov
from fedjax_sim.network.measured import measured as measured
from fedjax_sim.network.mixing import (
    Links as Links,
    Mixing as Mixing,
    laplacian as laplacian,
    lazy as lazy,
    matrix_of as matrix_of,
    metropolis as metropolis,
    mixed as mixed,
    neighbour_mean as neighbour_mean,
    push as push,
)
from fedjax_sim.network.presets import cross_device as cross_device, cross_silo as cross_silo
from fedjax_sim.network.radio import within_budget as within_budget
from fedjax_sim.network.random_graphs import (
    erdos_renyi as erdos_renyi,
    k_regular as k_regular,
    small_world as small_world,
    stochastic_block as stochastic_block,
)
from fedjax_sim.network.topology import (
    Graph as Graph,
    complete as complete,
    exponential as exponential,
    from_csv as from_csv,
    from_edges as from_edges,
    hears_back as hears_back,
    hypercube as hypercube,
    is_connected as is_connected,
    path as path,
    remove_node as remove_node,
    ring as ring,
    star as star,
    torus as torus,
)
from fedjax_sim.network.trace import trace as trace

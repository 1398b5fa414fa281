"""The kernel: a round of learning around one server is invite, collect, close; `observe` replays one."""

from fedjax_sim.round.collect import collect
from fedjax_sim.round.federated import federated
from fedjax_sim.round.round import aggregate, close, initial_state, invite, observe, remember
from fedjax_sim.round.state import FederatedState

__all__ = [
    "FederatedState",
    "aggregate",
    "close",
    "collect",
    "federated",
    "initial_state",
    "invite",
    "observe",
    "remember",
]

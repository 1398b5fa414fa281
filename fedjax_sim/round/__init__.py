"""The kernel: a round of learning around one server is invite, collect, close; `observe` replays one."""

from fedjax_sim.round.collect import collect as collect
from fedjax_sim.round.federated import federated as federated
from fedjax_sim.round.round import (
    aggregate as aggregate,
    close as close,
    initial_state as initial_state,
    invite as invite,
    observe as observe,
    remember as remember,
)
from fedjax_sim.round.state import FederatedState as FederatedState

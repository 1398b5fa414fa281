"""Algorithms: recipes over `federated`, itself composed of the steps of a round in `algorithms.round`; and others
over these steps, such as those without a server."""

from fedjax_sim.algorithms.asynchronous import asynchronous
from fedjax_sim.algorithms.choco import choco
from fedjax_sim.algorithms.clipped_gossip import clipped_gossip
from fedjax_sim.algorithms.clusters import hierarchical_gossip
from fedjax_sim.algorithms.corrected import feddyn, scaffold
from fedjax_sim.algorithms.decentralized import consensus, dgd, dpsgd
from fedjax_sim.algorithms.fedasync import fedasync
from fedjax_sim.algorithms.fedbuff import fedbuff
from fedjax_sim.algorithms.federated import federated
from fedjax_sim.algorithms.federated_graph import hierarchical_split_gnn
from fedjax_sim.algorithms.hierarchical import as_client_update, hierarchical_fedavg
from fedjax_sim.algorithms.mime import mime, mime_lite
from fedjax_sim.algorithms.pairwise import pairwise_gossip
from fedjax_sim.algorithms.push_sum import push_sum
from fedjax_sim.algorithms.recipes import fedavg, fednova, fedprox, fedsgd, record_private_fedavg
from fedjax_sim.algorithms.server_steps import fedadagrad, fedadam, fedavgm, fedexp, fedyogi
from fedjax_sim.algorithms.split import Split, split_loss
from fedjax_sim.algorithms.split_client import split_client
from fedjax_sim.algorithms.split_costs import SplitCosts, StepTime, split_costs
from fedjax_sim.algorithms.split_graph import split_gnn
from fedjax_sim.algorithms.splitfed import split_learning, splitfed
from fedjax_sim.algorithms.state import FederatedState
from fedjax_sim.algorithms.tiers import fedat
from fedjax_sim.algorithms.tracking import gradient_tracking
from fedjax_sim.algorithms.transfer import feddf, pretrained
from fedjax_sim.algorithms.vertical import vertical, vertical_loss, vertical_transcript

__all__ = [
    "FederatedState",
    "Split",
    "SplitCosts",
    "StepTime",
    "as_client_update",
    "asynchronous",
    "choco",
    "clipped_gossip",
    "consensus",
    "dgd",
    "dpsgd",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedat",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "feddf",
    "feddyn",
    "federated",
    "fedexp",
    "fednova",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "gradient_tracking",
    "hierarchical_fedavg",
    "hierarchical_gossip",
    "hierarchical_split_gnn",
    "mime",
    "mime_lite",
    "pairwise_gossip",
    "pretrained",
    "push_sum",
    "record_private_fedavg",
    "scaffold",
    "split_client",
    "split_costs",
    "split_gnn",
    "split_learning",
    "split_loss",
    "splitfed",
    "vertical",
    "vertical_loss",
    "vertical_transcript",
]

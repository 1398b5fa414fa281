"""All algorithms, one folder for each family: server, analytics, asynchronous, gossip, hierarchy, personal, split.

Each algorithm is a short program over the steps of a round (`fedjax_sim.round`).
"""

from fedjax_sim.algorithms.analytics.boosted_trees import boosted_trees
from fedjax_sim.algorithms.analytics.gaussian_mixture import gaussian_mixture
from fedjax_sim.algorithms.analytics.heavy_hitters import heavy_hitters
from fedjax_sim.algorithms.analytics.histogram import histogram
from fedjax_sim.algorithms.analytics.kmeans import kmeans
from fedjax_sim.algorithms.analytics.quantiles import quantiles
from fedjax_sim.algorithms.asynchronous.asynchronous import asynchronous
from fedjax_sim.algorithms.asynchronous.fedasync import fedasync
from fedjax_sim.algorithms.asynchronous.fedat import fedat
from fedjax_sim.algorithms.asynchronous.fedbuff import fedbuff
from fedjax_sim.algorithms.gossip.choco import choco
from fedjax_sim.algorithms.gossip.clipped_gossip import clipped_gossip
from fedjax_sim.algorithms.gossip.dpsgd import consensus, dgd, dpsgd
from fedjax_sim.algorithms.gossip.gradient_tracking import gradient_tracking
from fedjax_sim.algorithms.gossip.pairwise import pairwise_gossip
from fedjax_sim.algorithms.gossip.push_sum import push_sum
from fedjax_sim.algorithms.hierarchy.federated_splitgnn import hierarchical_split_gnn
from fedjax_sim.algorithms.hierarchy.gossip_under_cloud import hierarchical_gossip
from fedjax_sim.algorithms.hierarchy.hierfavg import as_client_update, hierarchical_fedavg
from fedjax_sim.algorithms.personal.apfl import apfl
from fedjax_sim.algorithms.personal.clustered_by_updates import clustered_by_updates
from fedjax_sim.algorithms.personal.ditto import ditto
from fedjax_sim.algorithms.personal.fedem import fedem
from fedjax_sim.algorithms.personal.fedmd import fedmd
from fedjax_sim.algorithms.personal.fedproto import fedproto
from fedjax_sim.algorithms.personal.fine_tuned import fine_tuned
from fedjax_sim.algorithms.personal.heterofl import heterofl
from fedjax_sim.algorithms.personal.ifca import ifca
from fedjax_sim.algorithms.personal.local import local
from fedjax_sim.algorithms.personal.parts import fedbabu, fedper, fedrep
from fedjax_sim.algorithms.personal.per_fedavg import per_fedavg
from fedjax_sim.algorithms.personal.pfedme import pfedme
from fedjax_sim.algorithms.server.agnostic import agnostic
from fedjax_sim.algorithms.server.distillation import feddf, pretrained
from fedjax_sim.algorithms.server.fair import qfedavg, term
from fedjax_sim.algorithms.server.fedavg import fedavg, fednova, fedprox, fedsgd, record_private_fedavg
from fedjax_sim.algorithms.server.feddyn import feddyn
from fedjax_sim.algorithms.server.fedmgda import fedmgda
from fedjax_sim.algorithms.server.fedopt import fedadagrad, fedadam, fedavgm, fedexp, fedyogi
from fedjax_sim.algorithms.server.flexlora import flexlora
from fedjax_sim.algorithms.server.mime import mime, mime_lite
from fedjax_sim.algorithms.server.scaffold import scaffold
from fedjax_sim.algorithms.split.client import split_client
from fedjax_sim.algorithms.split.costs import SplitCosts, StepTime, split_costs
from fedjax_sim.algorithms.split.loss import Split, split_loss
from fedjax_sim.algorithms.split.splitfed import split_learning, splitfed
from fedjax_sim.algorithms.split.splitgnn import split_gnn
from fedjax_sim.algorithms.split.vertical import vertical, vertical_loss, vertical_transcript
from fedjax_sim.round.federated import federated
from fedjax_sim.round.state import FederatedState

__all__ = [
    "FederatedState",
    "Split",
    "SplitCosts",
    "StepTime",
    "agnostic",
    "apfl",
    "as_client_update",
    "asynchronous",
    "boosted_trees",
    "choco",
    "clipped_gossip",
    "clustered_by_updates",
    "consensus",
    "dgd",
    "ditto",
    "dpsgd",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedat",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbuff",
    "feddf",
    "feddyn",
    "fedem",
    "federated",
    "fedexp",
    "fedmd",
    "fedmgda",
    "fednova",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedsgd",
    "fedyogi",
    "fine_tuned",
    "flexlora",
    "gaussian_mixture",
    "gradient_tracking",
    "heavy_hitters",
    "heterofl",
    "hierarchical_fedavg",
    "hierarchical_gossip",
    "hierarchical_split_gnn",
    "histogram",
    "ifca",
    "kmeans",
    "local",
    "mime",
    "mime_lite",
    "pairwise_gossip",
    "per_fedavg",
    "pfedme",
    "pretrained",
    "push_sum",
    "qfedavg",
    "quantiles",
    "record_private_fedavg",
    "scaffold",
    "split_client",
    "split_costs",
    "split_gnn",
    "split_learning",
    "split_loss",
    "splitfed",
    "term",
    "vertical",
    "vertical_loss",
    "vertical_transcript",
]

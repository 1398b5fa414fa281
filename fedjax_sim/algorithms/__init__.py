"""All algorithms, one folder for each family: server, analytics, asynchronous, gossip, hierarchy, personal, split.

Each algorithm is a short program over the steps of a round (`fedjax_sim.round`).
"""

from fedjax_sim.algorithms.analytics.boosted_trees import boosted_trees as boosted_trees
from fedjax_sim.algorithms.analytics.gaussian_mixture import gaussian_mixture as gaussian_mixture
from fedjax_sim.algorithms.analytics.heavy_hitters import heavy_hitters as heavy_hitters
from fedjax_sim.algorithms.analytics.histogram import histogram as histogram
from fedjax_sim.algorithms.analytics.kmeans import kmeans as kmeans
from fedjax_sim.algorithms.analytics.quantiles import quantiles as quantiles
from fedjax_sim.algorithms.asynchronous.asynchronous import asynchronous as asynchronous
from fedjax_sim.algorithms.asynchronous.fedasync import fedasync as fedasync
from fedjax_sim.algorithms.asynchronous.fedat import fedat as fedat
from fedjax_sim.algorithms.asynchronous.fedbuff import fedbuff as fedbuff
from fedjax_sim.algorithms.gossip.choco import choco as choco
from fedjax_sim.algorithms.gossip.clipped_gossip import clipped_gossip as clipped_gossip
from fedjax_sim.algorithms.gossip.dpsgd import consensus as consensus, dgd as dgd, dpsgd as dpsgd
from fedjax_sim.algorithms.gossip.gradient_tracking import gradient_tracking as gradient_tracking
from fedjax_sim.algorithms.gossip.pairwise import pairwise_gossip as pairwise_gossip
from fedjax_sim.algorithms.gossip.push_sum import push_sum as push_sum
from fedjax_sim.algorithms.hierarchy.federated_splitgnn import hierarchical_split_gnn as hierarchical_split_gnn
from fedjax_sim.algorithms.hierarchy.gossip_under_cloud import hierarchical_gossip as hierarchical_gossip
from fedjax_sim.algorithms.hierarchy.hierfavg import (
    as_client_update as as_client_update,
    hierarchical_fedavg as hierarchical_fedavg,
)
from fedjax_sim.algorithms.personal.apfl import apfl as apfl
from fedjax_sim.algorithms.personal.clustered_by_updates import clustered_by_updates as clustered_by_updates
from fedjax_sim.algorithms.personal.ditto import ditto as ditto
from fedjax_sim.algorithms.personal.fedala import fedala as fedala
from fedjax_sim.algorithms.personal.fedamp import fedamp as fedamp
from fedjax_sim.algorithms.personal.fedem import fedem as fedem
from fedjax_sim.algorithms.personal.fedmd import fedmd as fedmd
from fedjax_sim.algorithms.personal.fedproto import fedproto as fedproto
from fedjax_sim.algorithms.personal.fedrod import fedrod as fedrod
from fedjax_sim.algorithms.personal.fine_tuned import fine_tuned as fine_tuned
from fedjax_sim.algorithms.personal.heterofl import heterofl as heterofl
from fedjax_sim.algorithms.personal.ifca import ifca as ifca
from fedjax_sim.algorithms.personal.local import local as local
from fedjax_sim.algorithms.personal.parts import fedbabu as fedbabu, fedper as fedper, fedrep as fedrep
from fedjax_sim.algorithms.personal.per_fedavg import per_fedavg as per_fedavg
from fedjax_sim.algorithms.personal.pfedme import pfedme as pfedme
from fedjax_sim.algorithms.server.agnostic import agnostic as agnostic
from fedjax_sim.algorithms.server.distillation import feddf as feddf, pretrained as pretrained
from fedjax_sim.algorithms.server.fair import qfedavg as qfedavg, term as term
from fedjax_sim.algorithms.server.fedavg import (
    fedavg as fedavg,
    fednova as fednova,
    fedprox as fedprox,
    fedsgd as fedsgd,
    record_private_fedavg as record_private_fedavg,
)
from fedjax_sim.algorithms.server.feddyn import feddyn as feddyn
from fedjax_sim.algorithms.server.fedmgda import fedmgda as fedmgda
from fedjax_sim.algorithms.server.fedopt import (
    fedadagrad as fedadagrad,
    fedadam as fedadam,
    fedavgm as fedavgm,
    fedexp as fedexp,
    fedyogi as fedyogi,
)
from fedjax_sim.algorithms.server.fedsam import fedsam as fedsam
from fedjax_sim.algorithms.server.flexlora import flexlora as flexlora
from fedjax_sim.algorithms.server.label_skew import fedlc as fedlc, fedntd as fedntd, fedrs as fedrs
from fedjax_sim.algorithms.server.mime import mime as mime, mime_lite as mime_lite
from fedjax_sim.algorithms.server.moon import moon as moon
from fedjax_sim.algorithms.server.scaffold import scaffold as scaffold
from fedjax_sim.algorithms.split.client import split_client as split_client
from fedjax_sim.algorithms.split.costs import SplitCosts as SplitCosts, StepTime as StepTime, split_costs as split_costs
from fedjax_sim.algorithms.split.loss import Split as Split, split_loss as split_loss
from fedjax_sim.algorithms.split.splitfed import split_learning as split_learning, splitfed as splitfed
from fedjax_sim.algorithms.split.splitgnn import split_gnn as split_gnn
from fedjax_sim.algorithms.split.vertical import (
    vertical as vertical,
    vertical_loss as vertical_loss,
    vertical_transcript as vertical_transcript,
)
from fedjax_sim.round.federated import federated as federated
from fedjax_sim.round.state import FederatedState as FederatedState

"""This subpackage holds models and losses. `supervised` joins a model and a loss, `partition` splits parameters."""

from fedjax_sim.models import blocks, cells, layers
from fedjax_sim.models.adapters import from_equinox, from_linen, from_nnx
from fedjax_sim.models.attention import transformer
from fedjax_sim.models.convolution import conv_general_dilated
from fedjax_sim.models.cuts import Cut, cut
from fedjax_sim.models.distance_correlation import distance_correlation
from fedjax_sim.models.ensemble import distillation, ensemble, interpolated
from fedjax_sim.models.feedforward import cnn, linear, logistic, mlp
from fedjax_sim.models.freezing import freeze
from fedjax_sim.models.graph import gat, gcn, graph_network, graph_sage, link_prediction, rgcn
from fedjax_sim.models.losses import (
    default_loss,
    next_token_cross_entropy,
    node_cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
    taylor_cross_entropy,
)
from fedjax_sim.models.low_rank import lora, merged
from fedjax_sim.models.model import Model, from_fn, per_example, supervised
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.models.recurrent import gru, lstm
from fedjax_sim.models.sequential import Layer, branches, layer, sequential
from fedjax_sim.models.start import started_from
from fedjax_sim.models.vertical import by_party, vertical_linear, vertical_mlp

__all__ = [
    "Cut",
    "Layer",
    "Model",
    "blocks",
    "branches",
    "by_party",
    "cells",
    "cnn",
    "combine",
    "conv_general_dilated",
    "cut",
    "default_loss",
    "distance_correlation",
    "distillation",
    "ensemble",
    "freeze",
    "from_equinox",
    "from_fn",
    "from_linen",
    "from_nnx",
    "gat",
    "gcn",
    "graph_network",
    "graph_sage",
    "gru",
    "interpolated",
    "layer",
    "layers",
    "linear",
    "link_prediction",
    "logistic",
    "lora",
    "lstm",
    "merged",
    "mlp",
    "next_token_cross_entropy",
    "node_cross_entropy",
    "partition",
    "per_example",
    "rgcn",
    "sequential",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_error",
    "started_from",
    "supervised",
    "taylor_cross_entropy",
    "transformer",
    "vertical_linear",
    "vertical_mlp",
]

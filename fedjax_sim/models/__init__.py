"""This subpackage holds models and losses. `supervised` joins a model and a loss, `partition` splits parameters."""

from fedjax_sim.models import augmentations as augmentations, blocks as blocks, cells as cells, layers as layers
from fedjax_sim.models.adapters import from_equinox as from_equinox, from_linen as from_linen, from_nnx as from_nnx
from fedjax_sim.models.attention import transformer as transformer
from fedjax_sim.models.augmentations import Augmentation as Augmentation
from fedjax_sim.models.convolution import conv_general_dilated as conv_general_dilated
from fedjax_sim.models.cuts import Cut as Cut, cut as cut
from fedjax_sim.models.distance_correlation import distance_correlation as distance_correlation
from fedjax_sim.models.ensemble import distillation as distillation, ensemble as ensemble, interpolated as interpolated
from fedjax_sim.models.feedforward import cnn as cnn, linear as linear, logistic as logistic, mlp as mlp
from fedjax_sim.models.freezing import freeze as freeze
from fedjax_sim.models.graph import (
    gat as gat,
    gcn as gcn,
    graph_network as graph_network,
    graph_sage as graph_sage,
    link_prediction as link_prediction,
    rgcn as rgcn,
)
from fedjax_sim.models.image import (
    lenet5 as lenet5,
    resnet9 as resnet9,
    resnet18 as resnet18,
    resnet20 as resnet20,
    vgg11 as vgg11,
)
from fedjax_sim.models.losses import (
    default_loss as default_loss,
    next_token_cross_entropy as next_token_cross_entropy,
    node_cross_entropy as node_cross_entropy,
    sigmoid_cross_entropy as sigmoid_cross_entropy,
    softmax_cross_entropy as softmax_cross_entropy,
    squared_error as squared_error,
    taylor_cross_entropy as taylor_cross_entropy,
)
from fedjax_sim.models.low_rank import lora as lora, merged as merged
from fedjax_sim.models.model import (
    Model as Model,
    from_fn as from_fn,
    per_example as per_example,
    supervised as supervised,
)
from fedjax_sim.models.partition import combine as combine, partition as partition
from fedjax_sim.models.recurrent import gru as gru, lstm as lstm
from fedjax_sim.models.sequential import Layer as Layer, branches as branches, layer as layer, sequential as sequential
from fedjax_sim.models.start import started_from as started_from
from fedjax_sim.models.vertical import (
    by_party as by_party,
    vertical_linear as vertical_linear,
    vertical_mlp as vertical_mlp,
)

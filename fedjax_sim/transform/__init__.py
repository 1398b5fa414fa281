"""Transforms turn a client's update into the message that is sent, and process the aggregate at the server."""

from fedjax_sim.transform.chain import chain, identity, stateless
from fedjax_sim.transform.clip import clip, personal_clip
from fedjax_sim.transform.discrete import discrete_gaussian_mechanism, skellam_mechanism
from fedjax_sim.transform.feedback import ef21, error_feedback
from fedjax_sim.transform.gaussian import adaptive_clip, distributed_gaussian, gaussian_mechanism, local_gaussian
from fedjax_sim.transform.local import local_laplace, privunit, randomized_response
from fedjax_sim.transform.low_rank import low_rank
from fedjax_sim.transform.matrix import matrix_mechanism
from fedjax_sim.transform.momentum import client_momentum
from fedjax_sim.transform.quantize import qsgd, quantize, terngrad
from fedjax_sim.transform.rotation import drive, rotated
from fedjax_sim.transform.sign import cast, natural_compression, scaled_sign
from fedjax_sim.transform.sparsify import block_k, random_k, threshold, top_k

__all__ = [
    "adaptive_clip",
    "block_k",
    "cast",
    "chain",
    "client_momentum",
    "clip",
    "discrete_gaussian_mechanism",
    "distributed_gaussian",
    "drive",
    "ef21",
    "error_feedback",
    "gaussian_mechanism",
    "identity",
    "local_gaussian",
    "local_laplace",
    "low_rank",
    "matrix_mechanism",
    "natural_compression",
    "personal_clip",
    "privunit",
    "qsgd",
    "quantize",
    "random_k",
    "randomized_response",
    "rotated",
    "scaled_sign",
    "skellam_mechanism",
    "stateless",
    "terngrad",
    "threshold",
    "top_k",
]

"""Transforms turn a client's update into the message that is sent, and process the aggregate at the server."""

from fedjax_sim.transform.chain import chain as chain, identity as identity, stateless as stateless
from fedjax_sim.transform.clip import clip as clip, personal_clip as personal_clip
from fedjax_sim.transform.discrete import (
    discrete_gaussian_mechanism as discrete_gaussian_mechanism,
    skellam_mechanism as skellam_mechanism,
)
from fedjax_sim.transform.feedback import ef21 as ef21, error_feedback as error_feedback
from fedjax_sim.transform.gaussian import (
    adaptive_clip as adaptive_clip,
    distributed_gaussian as distributed_gaussian,
    gaussian_mechanism as gaussian_mechanism,
    local_gaussian as local_gaussian,
)
from fedjax_sim.transform.local import (
    local_laplace as local_laplace,
    privunit as privunit,
    randomized_response as randomized_response,
)
from fedjax_sim.transform.low_rank import low_rank as low_rank
from fedjax_sim.transform.matrix import matrix_mechanism as matrix_mechanism
from fedjax_sim.transform.momentum import client_momentum as client_momentum
from fedjax_sim.transform.quantize import qsgd as qsgd, quantize as quantize, terngrad as terngrad
from fedjax_sim.transform.rotation import drive as drive, rotated as rotated
from fedjax_sim.transform.sign import (
    cast as cast,
    natural_compression as natural_compression,
    scaled_sign as scaled_sign,
)
from fedjax_sim.transform.sparsify import (
    block_k as block_k,
    random_k as random_k,
    threshold as threshold,
    top_k as top_k,
)

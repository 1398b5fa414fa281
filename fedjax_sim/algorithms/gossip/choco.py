"""CHOCO-SGD: nodes send compressed differences of their models, and still reach consensus."""

from __future__ import annotations

from typing import Unpack

import jax
import optax

from fedjax_sim import tree, validate
from fedjax_sim.algorithms.gossip.dpsgd import NodeOptions, trained
from fedjax_sim.algorithms.gossip.rounds import node_algorithm
from fedjax_sim.algorithms.gossip.state import check_average, kept_by_node, nodes_of
from fedjax_sim.network import Mixing, mixed
from fedjax_sim.transform import identity
from fedjax_sim.types import Algorithm, UpdateTransform
from fedjax_sim.validate import LossFn, PositiveShare


@validate.named_arguments
def choco(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    *,
    transform: UpdateTransform | None = None,
    consensus_step: PositiveShare = 0.5,
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Makes CHOCO-SGD, in which nodes exchange compressed differences.

    Node i sends q_i = C(x_i - h_i), where C is the compressor and h_i is a public copy of its model that all its
    neighbours know. A round is x_i <- x_i + u_i(x_i); h_i <- h_i + q_i; x_i <- x_i + gamma sum_j W_ij (h_j - h_i),
    where u_i(x_i) is the update of its local steps.

    Args:
      loss_fn: as in `client.local_sgd`.
      mixing: with the same weights in every round, because a lost message would make neighbours' copies of h_i differ.
      transform: the compressor C, such as `top_k` or `quantize`; None sends differences as they are. It must have no
        memory, because h already makes up for what it leaves out, and its error must be below the difference itself.
      consensus_step: gamma in (0, 1], smaller for a coarser compressor.
      optimizer, num_steps, num_epochs, batch_size, shuffle, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm with the info of `dpsgd`.

    Raises: ValueError for a mixing whose weights change or that moves the average; for a transform with noise (no
    accountant covers it here), with memory, or that sends integers; in `init`, for a transform whose error is no less
    than what it compresses.

    Guarantees: the models are those of NumPy with top-k (tests/algorithms/gossip/test_choco.py::test_numpy); without a
    compressor and with gamma = 1 it is D-PSGD, "adapt_then_combine" (::test_without_a_compressor); nodes with a
    compressor reach consensus (::test_compressed_nodes_agree); a compressor that expands is refused
    (::test_a_compressor_that_expands).

    References: Koloskova, Stich and Jaggi 2019, algorithms 1 and 2.
    """
    check_average(mixing)
    if not mixing.static:
        hint = "Neighbours keep copies of what a node sent: they must hear all of it."
        validate.fail("mixing", "the same weights in every round", "ones that change", hint)
    compressor = identity() if transform is None else transform
    _check_compressor(compressor)
    local, node_options = trained(loss_fn, optimizer, options)

    def apply(key, broadcast, state, data):
        report, _ = local.apply(key, state["model"], (), data)
        model = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), state["model"], report.update)
        # The message is x_i - h_i, before the compressor.
        return report._replace(update=tree.subtract(model, state["public"])), state | {"model": model}

    node = local._replace(init=lambda params: {"model": params, "public": tree.zeros_like(params)}, apply=apply)
    nodes = nodes_of(node, mixing, aggregator=kept_by_node(), transform=compressor, **node_options)

    def combine(links, trained_nodes):
        # In terms of the docstring, "public" is h and the messages are q.
        old_public = trained_nodes.before["public"]
        own_model = trained_nodes.after["model"]
        public = jax.tree.map(lambda h, q: (h + q).astype(h.dtype), old_public, trained_nodes.sent["updates"])
        public_change = tree.subtract(mixed(links, public), public)
        model = jax.tree.map(lambda x, y: (x + consensus_step * y).astype(x.dtype), own_model, public_change)
        return {"model": model, "public": public}

    algorithm = node_algorithm(nodes, combine)

    def send(key, x):
        return compressor.on_client(key, x, compressor.init(x), ())[0]

    def init(key, params, population):
        hint = "Copies would grow without end: use the unscaled form, such as random_k(scaled=False), or send more."
        validate.contraction("transform", send, tree.spec(params), hint=hint)
        return algorithm.init(key, params, population)

    return algorithm._replace(init=init)


def _check_compressor(transform: UpdateTransform) -> None:
    """Raises ValueError, TypeError for a transform that adds noise, sends integers or may have a memory."""
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "Neighbours see every message, and no accountant covers that."
        validate.fail("transform", "one without noise", transform.facts.noise.mechanism, hint)
    if transform.facts.integer_range is not None:
        validate.fail("transform", "one that sends floats", "integers", "There is no sum to decode: integers=False.")
    if transform.facts.mirrored or jax.tree.leaves(transform.init_client(jax.ShapeDtypeStruct((8, 8), "float32"))):
        hint = "CHOCO itself makes up for what was left out: pass the compressor alone."
        validate.fail("transform", "one without memory", "one that may have some", hint)

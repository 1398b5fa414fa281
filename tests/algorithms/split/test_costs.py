"""Operations, bytes and time of a cut model, by hand."""

import jax
import jax.numpy as jnp
import pytest

from experiments import split_beside_federated
from fedjax_sim import network
from fedjax_sim.algorithms import split_loss
from fedjax_sim.algorithms.split.costs import split_costs
from fedjax_sim.models import mlp, squared_error

TOY = mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
PARAMS = TOY.init(jax.random.key(0))[0]
BATCH = {"x": jnp.zeros((32, 10)), "y": jnp.zeros(32)}


def costs(at="hidden_0", **options):
    return split_costs(split_loss(TOY, squared_error, at, **options), PARAMS, BATCH)


def test_operations_by_hand():
    """Catches another party's layers in one's count, a backward pass that is left out, and inputs that get gradients.

    Products: 32 examples, 10 x 20 at the client, twice (outputs and the kernel's gradient, none of the inputs); 20 x 15
    and 15 x 1 at the server, thrice (outputs, kernel, what comes in). Element-wise work is less than a tenth.
    """
    found = costs()
    assert found.num_values == (220, 331)
    client, server = 2 * 32 * 200 * 2, 2 * 32 * 315 * 3
    assert client <= found.training_flops[0] <= 1.25 * client
    assert server <= found.training_flops[1] <= 1.25 * server
    first, rest = 2 * 32 * 200, 2 * 32 * 315
    assert first <= found.inference_flops[0] <= 1.25 * first
    assert rest <= found.inference_flops[1] <= 1.25 * rest
    deeper = costs(("hidden_0", "hidden_1"), u_shaped=True)
    assert deeper.num_values == (220 + 16, 315) and sum(deeper.training_flops) == pytest.approx(
        sum(found.training_flops), rel=0.05
    )


def test_no_peek_is_not_for_nothing():
    """32 x 32 distances over 10 inputs and 20 activations, thrice each at least. Catches a penalty that nobody pays."""
    plain, hidden = costs(), costs(decorrelation=1.0)
    assert hidden.training_flops[0] - plain.training_flops[0] > 32 * 32 * 3 * (10 + 20)
    assert hidden.training_flops[1:] == plain.training_flops[1:] and hidden.inference_flops == plain.inference_flops


def test_times_by_hand():
    """Catches latency that is left out or counted for labels, bits for bytes, and messages of the other pass."""
    found = costs()
    speeds = (1e6, 1e7)
    busy = [flops / speed for flops, speed in zip(found.training_flops, speeds, strict=True)]
    time = found.time(speeds, bandwidth=1e4, latency=0.5)
    assert time.seconds == pytest.approx(sum(busy) + 2 * 0.5 + 1312 * 4 / 1e4)
    assert time.utilisation == pytest.approx([x / time.seconds for x in busy])
    fast = found.time(speeds, bandwidth=1e30, latency=0.5)
    assert fast.utilisation[0] == pytest.approx(busy[0] / (busy[0] + busy[1] + 2 * 0.5))
    request = found.time(speeds, bandwidth=1e4, latency=0.5, training=False)
    ours = sum(flops / speed for flops, speed in zip(found.inference_flops, speeds, strict=True))
    assert request.seconds == pytest.approx(ours + 2 * 0.5 + (640 + 32) * 4 / 1e4)
    u_shaped = costs(("hidden_0", "hidden_1"), u_shaped=True)
    assert [(s, t, bits // 32) for s, t, bits in u_shaped.messages()] == [
        (0, 1, 640),
        (1, 0, 480),
        (0, 1, 480),
        (1, 0, 640),
    ]
    assert len(u_shaped.messages(training=False)) == 2
    hidden = costs(link=network.link(encrypted=True)).messages()
    assert [bits for *_, bits in hidden] == [32 * 32, 640 * 32 + 224, 640 * 32 + 224]


def test_in_sequence_and_in_parallel():
    """m equal clients, no latency: a relay takes m times as long as a federation whose clients do the same work."""
    found = costs()
    one = found.time((1e6, 1e6), bandwidth=1e30)
    federated = max([sum(found.training_flops) / 1e6] * 7)  # all at once, each the whole model
    assert 7 * one.seconds / federated == pytest.approx(7)


def test_costs_that_cannot_be():
    """Catches speeds of other parties, and numbers out of range."""
    for speeds, how, words in (
        ((1.0,), {"bandwidth": 1.0}, "parties"),
        ((1.0, 0.0), {"bandwidth": 1.0}, r"speeds\[1\]"),
        ((1.0, 1.0), {"bandwidth": 0.0}, "bandwidth"),
        ((1.0, 1.0), {"bandwidth": 1.0, "latency": -1.0}, "latency"),
    ):
        with pytest.raises(ValueError, match=words):
            costs().time(speeds, **how)


@pytest.mark.full
def test_one_table():
    """The experiment. Catches a way that sends nothing, a relay as fast as a federation, and labels nobody hides."""
    plain, relay, u_shaped = split_beside_federated.main(2, ("federated", "split", "split, U-shaped"))
    assert plain.megabytes == pytest.approx(2 * 20 * 2 * 4 * 2778 / 1e6)
    assert relay.seconds > 10 * plain.seconds and relay.client_mflop < plain.client_mflop
    assert relay.labels == 1.0 and u_shaped.labels < 1.0 and 0 <= relay.examples <= 1

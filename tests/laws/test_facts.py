"""Facts that parts declare: true in every dtype, and where a part says nothing, the claim that promises least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, metrics, run, sampling, server, transform, tree, types
from fedjax_sim.privacy import mechanism_of
from tests.laws import cases, problems as p
from tests.refusals import refused

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

KEY = jax.random.key(0)
LEAST = {  # what a part promises that says nothing
    types.Aggregator: {
        "facts": types.AggregatorFacts(), "start": None, "rule": None, "stays": None, "view": None,
    },
    types.AggregatorFacts: {
        "sensitivity": None, "modulus": None, "max_weight": 1, "weighted": True, "partly_weighted": False,
        "homogeneous": False, "design": None, "metrics": (), "least": None, "keyless": False, "attackers": None,
        "chooses": False, "withstands": None, "wire": None, "wire_down": None,
    },
    types.ClientFacts: {
        "num_steps": None, "all_steps": None, "noise": None, "uniform_weights": False, "needs_weights": False,
        "metrics": (), "pulled": False, "scalable": False, "helped": False, "level": "client", "reads_round": False,
    },
    types.ClientUpdate: {"facts": types.ClientFacts(), "federation": None, "time_inside": None},
    types.Noise: {"details": None},
    types.ServerUpdate: {"wire": None, "takes": None, "moved": None, "params_kind": types.ParamsKind.UNSTATED},
    types.Star: {"execution": types.Execution(), "complete": False},
    types.TransformFacts: {
        "l2_bound": None, "nonexpansive": False, "releases_when_empty": False, "unbiased": False,
        "exact_error": False, "integer_range": None, "noise": None, "mirrored": True, "metrics": (),
    },
    types.UpdateTransform: {"facts": types.TransformFacts(), "squared_error": None},
}  # fmt: skip

DRAWS = 20_000


def farthest_mean(member, dtype) -> jax.Array:
    """Standard errors by which the mean message of one update misses it, at the worst of 16 numbers."""
    x = jnp.array(np.random.default_rng(3).normal(size=16), dtype)
    messages = jax.vmap(lambda key: member.on_client(key, x, (), ())[0])(jax.random.split(jax.random.key(0), DRAWS))
    rest = messages.astype(jnp.float32) - x.astype(jnp.float32)[None]
    error = jnp.sqrt(jnp.var(rest, axis=0) / DRAWS) + 1e-6 * jnp.abs(x.astype(jnp.float32))
    return (jnp.abs(rest.mean(0)) / error).max()


def test_unbiased_in_every_dtype():
    """Catches a decoded message that is rounded to its leaf's bfloat16 or float16: 92 standard errors for 8 bits.

    Six of them: 192 right means pass but with chance 4e-7.
    """
    rows = {name: row.unbiased_as or row.make for name, row in cases.CASES["transform"].items()}
    unbiased = {name: make for name, make in rows.items() if make().facts.unbiased}
    wrong = [name for name, row in cases.CASES["transform"].items() if row.unbiased_as and name not in unbiased]
    assert len(unbiased) > 5 and not wrong

    @jax.jit
    def all_of_them():
        dtypes = (jnp.bfloat16, jnp.float16)
        return {name: jnp.stack([farthest_mean(make(), d) for d in dtypes]) for name, make in unbiased.items()}

    found = jax.device_get(all_of_them())
    assert all((z < 6).all() for z in found.values()), found


@pytest.mark.parametrize("part", LEAST, ids=lambda part: part.__name__)
def test_facts_fail_closed(part):
    """Catches a fact whose default promises something, or that has none; a new one must be put into the table above."""
    assert part._field_defaults == LEAST[part]
    if part.__name__.endswith("Facts"):
        assert set(part._fields) == set(LEAST[part])


def gathered(**facts):
    return aggregation.gather(lambda key, updates, weights, ids: updates.mean(0), **facts)


def test_a_rule_that_says_nothing_is_taken_at_its_worst():
    """Catches `gather` with noise for which weights go unnoticed, as a mean by examples would not, and with integers
    in a unit that its rule does not know; and that stating the facts is enough."""
    noisy = {"sampler": cases.SAMPLER, "transform": transform.local_gaussian(1.0, 1.0)}
    for wrong in (gathered(), aggregation.mean()):
        with refused("aggregator", rule="no weights"):
            mechanism_of({**noisy, "aggregator": wrong})
    assert mechanism_of({**noisy, "aggregator": gathered(weighted=False)}).place == "local"
    central = {**noisy, "transform": transform.gaussian_mechanism(1.0, 1.0)}
    with refused("aggregator", rule="no weights"):
        mechanism_of({**central, "aggregator": gathered(sensitivity=1.0)})
    for sensitivity in (-1.0, np.nan, np.inf):
        stated = gathered(weighted=False).stating(sensitivity=sensitivity)
        with refused("aggregator.sensitivity", rule=">= 0"):
            mechanism_of({**central, "aggregator": stated})
    integers = transform.quantize(4, range=2.0, integers=True)
    with refused("transform", rule="sends numbers"):
        p.Federation(transform=integers, aggregator=gathered())
    p.Federation(transform=integers, aggregator=gathered(homogeneous=True))
    by_hand = types.UpdateTransform(*transform.identity()[:5])
    with pytest.raises(ValueError, match="nothing after it that changes messages"):
        transform.chain(by_hand, transform.clip(1.0))


def test_nobody_counts_twice():
    """Catches clients drawn for their size and weighted by it again: sizes 1 and 9 make 0.988 of 0.9. By fact, in every
    composition, for a user's own aggregator too; and right combinations pass."""
    drawn = sampling.weighted(p.SIZES, p.SLOTS)
    recipes = {name: getattr(algorithms, name) for name in ("fedavg", "fedprox", "fedexp", "mime", "mime_lite")}

    def make(name, sampler, **options):
        return recipes[name](p.linear_loss, sampler, optax.sgd(p.RATE), num_steps=1, **options)

    for name in recipes:
        make(name, drawn, weighting="uniform")
        make(name, sampling.weighted(np.ones(p.NUM_CLIENTS), p.SLOTS), weighting="examples")
        for sampler in (drawn, sampling.with_dropout(drawn, 0.2)):
            with refused("aggregator", rule="no weights", hint="twice"):
                make(name, sampler, weighting="examples")
    tables = (aggregation.keep_old(9.0), aggregation.fixed_mean(9.0, weighting="examples"), gathered())
    for wrong in (*tables, aggregation.by_part({"w": aggregation.total(), "b": aggregation.mean()})):
        with pytest.raises(ValueError, match="counts them twice"):
            make("fedavg", drawn, aggregator=wrong)
    for right in (aggregation.li_scheme_one(), aggregation.total(), gathered(weighted=False)):
        make("fedavg", drawn, aggregator=right)
    corrected = gathered().stating(design=drawn.design)  # a user's own w_i / p_i
    make("fedavg", drawn, aggregator=corrected)
    unsaid = drawn._replace(design=types_of_a_user(drawn.design))
    with refused("aggregator", rule="no weights", hint="equal_chances"):
        make("fedavg", unsaid, weighting="examples")


def types_of_a_user(design):
    """A design that has the sizes and says no more."""
    return type("Design", (), {"population_size": design.population_size, "replacement": design.replacement})()


def test_weights_belong_to_the_sampler():
    """Catches Horvitz-Thompson weights of another cohort, 4 times too long for 20 of 24 at the weights of 5 of 24, or
    of a sampler that dropout thins afterwards."""

    def make(sampler, aggregator):
        algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), num_steps=1, aggregator=aggregator)

    for sampler in (cases.SAMPLER, sampling.poisson(p.NUM_CLIENTS, 0.3), sampling.with_dropout(cases.SAMPLER, 0.2)):
        for factory in (aggregation.horvitz_thompson, aggregation.li_scheme_two):
            make(sampler, factory(sampler.design, cases.TOTAL))
            for other in (sampling.uniform(p.NUM_CLIENTS, 2), sampling.with_dropout(sampler, 0.5)):
                foreign = factory(sampler.design, cases.TOTAL)
                for wrong in (foreign, aggregation.by_part({"w": foreign, "b": aggregation.total()})):
                    with refused("aggregator.design", rule="sampler's"):
                        make(other, wrong)
                with refused("parts['b'].design", rule="other parts"):
                    aggregation.by_part({"w": foreign, "b": aggregation.mean()})


def metrics_of(member):
    """What a transform reports of a round of one message, of length 5."""

    @jax.jit
    def both_ends(update):
        state = member.init(update)
        message, _, measured = member.on_client(KEY, update, state, member.init_client(update))
        return member.on_server(KEY, None, message, state, measured, 1.0)[2]

    return both_ends(jnp.array([3.0, 4.0]))


def test_no_metric_hides_another():
    """Catches a clip of 10 whose zero hides the clip of 1 behind it, and parts that could not be put together."""
    found = metrics_of(transform.chain(transform.clip(10.0), transform.gaussian_mechanism(1.0, 0.0)))
    clipped = {name: float(x) for name, x in found.items() if name.endswith("clipped_update_share")}
    assert clipped == {"member_1_clipped_update_share": 0, "member_2_clipped_update_share": 1}
    with refused("metrics", value="a_x"):
        tree.joined_metrics({"a": {"x": 1}, "b": {"x": 2, "a_x": 3}})
    private = client.private_sgd(p.linear_loss, 1.0, 0.5, p.RATE, num_steps=1, batch_size=2, num_examples=p.ROWS)

    def counts(key, broadcast, state, data):
        metrics = {"clipped_share": types.Mean(jnp.ones(()), jnp.ones(()))}
        return types.Report(broadcast, jnp.ones(()), metrics), state

    counting = types.ClientUpdate(lambda params: (), counts)
    for work, member in ((private, transform.quantize(4, range=1.0)), (counting, transform.cast("float16"))):
        federation = p.Federation(client=work, transform=member)
        _, info = jax.eval_shape(federation.algorithm.step, KEY, federation.init(), p.ragged())
        assert {"client_clipped_share", "transform_clipped_share"} <= info.keys() and "clipped_share" not in info


def test_names_that_are_taken():
    """Catches a loss's own `steps`, `epsilon` or `loss_quantiles` that the number of steps, a run's epsilon or the
    spread over clients hides."""

    def loss(name):
        return lambda params, examples, key: {"loss": p.linear_loss(params, examples, key), name: examples["y"]}

    work = client.local_sgd(loss("steps"), optax.sgd(0.1), client.work(num_steps=1))
    with refused("loss_fn", rule="'steps'"):
        p.Federation(client=work).init()

    def spends(key, broadcast, state, data):
        return types.Report(broadcast, jnp.ones(()), {"epsilon": types.Mean(jnp.ones(()), jnp.ones(()))}), state

    federation = p.Federation(client=types.ClientUpdate(lambda params: (), spends))
    with refused("metrics", value="epsilon"):
        federation.run(p.COHORT, num_rounds=1)
    with refused("evaluation", value="epsilon"):
        run(
            KEY, p.Federation().algorithm, jnp.array(p.START), p.ragged(), 1, evaluation=lambda params: {"epsilon": 1.0}
        )
    found = metrics.evaluation(loss("loss_quantiles"), held_out=p.ragged())(jnp.array(p.START))
    assert {"metric_held_out_loss_quantiles", "spread_held_out_loss_quantiles"} <= found.keys()


def test_clients_with_state_are_distinct():
    """Catches a design that does not say whether a client is drawn twice, taken to say that none is."""
    sampler = sampling.uniform(p.NUM_CLIENTS, p.SLOTS)
    silent = sampler._replace(design=type("Design", (), {"population_size": p.NUM_CLIENTS, "equal_chances": True})())
    for wrong in (silent, sampling.with_replacement(p.NUM_CLIENTS, p.SLOTS)):
        with refused("sampler", rule="without replacement"):
            algorithms.scaffold(p.linear_loss, wrong, optax.sgd(0.1), num_steps=1, weighting="uniform")
        work = p.counting(client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=1)))
        made = algorithms.federated(wrong, work, aggregation.mean(), server.optimizer(optax.sgd(1.0)))
        with refused("sampler", rule="without replacement"):
            made.init(KEY, jnp.array(p.START), p.ragged())

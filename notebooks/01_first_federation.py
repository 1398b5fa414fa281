# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first federation
#
# Federated learning trains one model on data that stays with the people who made it. In each **round** a server
# invites a few clients (the **cohort**), sends them the model, lets each train on its own data, and averages the
# **updates** that come back. Nobody sends data.
#
# This notebook simulates such a federation on handwritten digits, first step by step, then in small experiments:
#
# 1. a population of clients, and what they hold
# 2. a model, and a federated algorithm from its four parts
# 3. a run, and how to read it
# 4. three experiments: how many clients take part, how different they are, how long each trains
# 5. your own parts: a local solver, a robust rule, a compressor
# 6. the same bits on another number of devices
#
# You need to know what stochastic gradient descent does; nothing about federated learning, and little about JAX.

# %%
# %matplotlib inline
import hashlib
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from fedjax_sim import aggregation, algorithms, client, engine, metrics, models, population, run, sampling, server, transform
from fedjax_sim.report import plots
from fedjax_sim.prng import stream
from fedjax_sim.types import ClientUpdate, Mean, Report

jax.config.update("jax_num_cpu_devices", 2)  # section 6 compares one device with two; two cores are enough

FAST = os.environ.get("FEDJAX_SIM_NOTEBOOK_FAST") == "1"  # the tests look only whether everything runs
NUM_CLIENTS, COHORT, ROUNDS, HIDDEN = (200, 20, 3, ()) if FAST else (5000, 50, 30, (32,))

# %% [markdown]
# ## 1. The population
#
# `population.digits` makes as many clients as you like out of scikit-learn's 1,797 digits (8 × 8 pixels). Each client
# holds 20 to 60 images, and its own mix of labels drawn from a Dirichlet law: with a small `alpha` a client has only
# a few kinds of digit, as one person's photographs show the same few friends (Hsu, Qi and Brown, 2019).
#
# Two further sets come with it. `test` is a central set of images that no client has. `held_out` are clients made of
# those test images: they never train, so they show how well the model serves people who did not take part.

# %%
data = population.digits(num_clients=NUM_CLIENTS, alpha=0.3, seed=0)


def label_counts(population, ids):
    """How often each digit occurs with some clients."""
    clients = [population.client(i) for i in ids]  # examples, and a mask: clients are padded to one length
    return [np.bincount(c.examples["y"][c.mask], minlength=10).tolist() for c in clients]


print(f"{data.train.size:,} clients train, {data.held_out.size} are held out")
print(f"{len(data.test['y'])} images in the central test set")
ids = list(range(12))
plots.label_mix({"client_ids": ids, "label_names": data.label_names, "label_counts": label_counts(data.train, ids)})

# %% [markdown]
# Each bar is a client; each shade is a digit. Nobody here has all ten, and two or three digits make up most of what a
# client holds: trained alone, it would hardly learn the others. That is the difficulty (**heterogeneity**, or *non-IID
# data*) and also the reason to train together: together the clients hold every digit.
#
# ## 2. Model, loss, algorithm
#
# A model is two functions, `init` and `apply`; `models.supervised` joins it with a loss into
# `loss_fn(params, examples, key)`, which gives one value **per example**. This is all that the rest needs to know.

# %%
model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=HIDDEN)
loss_fn = models.supervised(model, models.default_loss(data.task))

key = jax.random.key(0)  # the one seed
params, _ = model.init(stream(key, "init"))
print(f"d = {sum(x.size for x in jax.tree.leaves(params)):,} parameters")

# %% [markdown]
# A federated algorithm answers four questions:
#
# | question | part | here |
# |---|---|---|
# | who is invited? | sampler | `COHORT` of `NUM_CLIENTS`, uniformly, without replacement |
# | what does a client do? | client update | 5 steps of SGD on minibatches of 10 |
# | how do many updates become one? | aggregator | the mean, weighted by examples |
# | what does the server do with it? | server update | add it to the model: SGD with rate 1 |

# %%
from_parts = algorithms.federated(
    sampling.uniform(data.train.size, COHORT),
    client.local_sgd(loss_fn, optax.sgd(0.1), client.work(num_steps=5, batch_size=10)),
    aggregation.mean(),
    server.optimizer(optax.sgd(1.0)),
)

# %% [markdown]
# These four together are FedAvg (McMahan et al., 2017), so there is a recipe of that name. `algorithms` has more:
# FedProx, FedNova, FedAdam and others. Each is these few lines with another part in one place.

# %%
recipe = algorithms.fedavg(
    loss_fn, sampling.uniform(data.train.size, COHORT), optax.sgd(0.1), num_steps=5, batch_size=10
)

# %% [markdown]
# ## 3. A run, and how to read it
#
# `run` compiles the round once and repeats it. It returns the last state and a history with one record a round.

# %%
evaluation = metrics.evaluation(loss_fn, test=data.test, held_out=data.held_out)


def train(algorithm, data=data, evaluation=evaluation):
    """The algorithm's final model and its history, from the same seed each time."""
    rounds = stream(key, "rounds")
    state, history = run(rounds, algorithm, params, data.train, ROUNDS, evaluation=evaluation, evaluate_every=1)
    return algorithm.params(state), history


def fingerprint(params):
    """A hash over every bit of a model."""
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()[:12]


trained, base = train(recipe)
assembled, _ = train(from_parts)
print("recipe and parts give the same bits:", fingerprint(trained) == fingerprint(assembled))
plots.learning_curves(base.records)

# %% [markdown]
# The grey line is measured by the clients on the examples they train on, while they train. Its loss lies below the
# test loss from the first round on: within a round a client fits its own few digits quickly, and that is easier than
# recognising all ten. Local accuracy in a federation says how well clients adapt, not how good the shared model is.
# Judge by the other two curves, which coincide: all held-out clients together are much like the test set.
#
# An average over clients hides people. `held_out` accuracy, client by client:

# %%
plots.client_spread(base.records)

# %% [markdown]
# The median client does well early. The lower edge (the worst-served 5 %) comes later and stays well below. If your
# question is about fairness, this is the curve to report.
#
# ## 4. Three experiments
#
# Each changes one thing and leaves the rest as in section 3. Random numbers are addressed by seed, round, stage and
# client, so what you did not change stays the same: same start, same minibatches for the same client in the same
# round. A small helper draws the curves; darkness, dashes and marks tell them apart without colour.

# %%
plt.rcParams.update(
    {
        "figure.dpi": 80,
        "figure.constrained_layout.use": True,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#e6e9ed",
        "legend.frameon": False,
    }
)
LOOKS = (
    {"color": "#e69f00", "linestyle": ":", "marker": "^"},
    {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    {"color": "#1a1a1a", "linestyle": "--", "marker": "s"},
    {"color": "#8c96a0", "linestyle": "-.", "marker": "D"},
)


def accuracy(history):
    """[T + 1] test accuracy in percent, before training and after each round."""
    return 100 * history.column("test_accuracy")[1]


def sent(history):
    """[T + 1] megabytes that all clients together have uploaded."""
    return np.cumsum([0, *history.column("uplink_bytes")[1]]) / 1e6


def draw(axes, histories, along=None, label="Round", **scale):
    """Test accuracy of several runs along the rounds, or along what `along(name, history)` counts."""
    for i, ((name, history), look) in enumerate(zip(histories.items(), LOOKS, strict=False)):
        x = history.column("test_accuracy")[0] if along is None else along(name, history)
        axes.plot(x, accuracy(history), label=name, markevery=(i, 4), markersize=5, linewidth=1.7, **look)
    axes.set(xlabel=label, ylabel="Test accuracy (%)", ylim=(0, 100), **scale)


def legend(axes, loc="lower right", **place):
    axes.legend(loc=loc, **place)


# %% [markdown]
# ### How many clients take part?
#
# The participation rate is cohort over population, m/N.

# %%
cohorts = {}
for size in (COHORT // 10, COHORT, COHORT * 10):
    sampler = sampling.uniform(data.train.size, size)
    algorithm = algorithms.fedavg(loss_fn, sampler, optax.sgd(0.1), num_steps=5, batch_size=10)
    name = f"m = {size} ({100 * size / data.train.size:g} %)"
    cohorts[name] = base if size == COHORT else train(algorithm)[1]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), sharey=True)
draw(left, cohorts)
draw(right, cohorts, lambda name, history: sent(history), "Uploaded by all clients so far (MB)", xscale="log")
legend(left)

# %% [markdown]
# **What one sees.** The curve of the tiny cohort is noisy: a mean over five clients who hold a few digits each is a
# rough estimate of the mean over all clients, and a round can undo what the last one learned. Ten times more clients
# remove most of that. Ten times more again change little: the noise is gone, and what remains is the speed of the
# method itself. On the right are the same runs by cost: a cohort ten times as large uploads about ten times as much for
# the same accuracy. A cohort is large enough when its curve is smooth; a larger one gives little but traffic (or
# privacy, which is another topic).
#
# ### How different are the clients?
#
# `alpha` sets the skew of the labels: 0.1 leaves most clients two or three digits, 10 is nearly the same mix for all.
# We keep the central test set, and measure held-out clients of the same kind as those who train.

# %%
skews = {}
for alpha in (0.1, 0.3, 10.0):
    if alpha == 0.3:
        skews["alpha = 0.3"] = base
        continue
    other = population.digits(num_clients=NUM_CLIENTS, alpha=alpha, seed=0)
    look = metrics.evaluation(loss_fn, test=other.test, held_out=other.held_out)
    skews[f"alpha = {alpha:g}"] = train(recipe, other, look)[1]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), sharey=True)
draw(left, skews)
legend(left)
for row, (history, look) in enumerate(zip(skews.values(), LOOKS, strict=False)):
    q05, q25, q50, q75, q95 = 100 * np.array(history.records[-1]["held_out_accuracy_quantiles"])
    right.vlines(row, q05, q95, color=look["color"], linewidth=2)
    right.vlines(row, q25, q75, color=look["color"], linewidth=9)
    right.plot(row, q50, marker=look["marker"], color="white", markeredgecolor="black", markersize=8)
right.set_xticks(range(len(skews)), skews)
right.set(xlim=(-0.6, 2.6), ylabel="Held-out clients' accuracy (%)", title="after the last round")
right.title.set_size(10)
right.yaxis.set_tick_params(labelleft=True)

# %% [markdown]
# **What one sees.** Left: skew costs speed and adds noise. Clients pull in different directions, so that much of their
# work cancels in the mean, and which fifty were invited matters more. Right: thin lines hold 90 % of the clients, thick
# lines the middle half, the mark is the median. The medians are within a few points of each other, and yet with strong
# skew the clients lie far apart: a client whose few digits are the hard ones has no easy ones to make up for them. Two
# federations can have nearly the same mean and serve people very differently.
#
# ### How long should a client train?
#
# Sending a model is slow and computing is cheap, so FedAvg takes several local steps before it sends.

# %%
steps = {}
for num_steps in (1, 5, 20):
    sampler = sampling.uniform(data.train.size, COHORT)
    algorithm = algorithms.fedavg(loss_fn, sampler, optax.sgd(0.1), num_steps=num_steps, batch_size=10)
    name = f"{num_steps} local step{'s' if num_steps > 1 else ''}"
    steps[name] = base if num_steps == 5 else train(algorithm)[1]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2), sharey=True)
draw(left, steps)
draw(
    right,
    steps,
    lambda name, history: np.cumsum([0, *history.column("local_steps")[1]]),
    "Local steps so far, on the path of the model",
    xscale="log",
)
legend(left)

# %% [markdown]
# **What one sees.** By rounds (left) more local work is better, by far. By steps (right) the order is reversed: after
# the same number of gradient steps the run that communicates more often is ahead at first and never far behind, because
# its clients do not move far towards their own optima (**client drift**). Local steps trade computing for
# communication. On this easy problem the trade is good up to 20 steps. It is not always: with several local steps
# FedAvg can converge to a point beside the optimum. On quadratic losses (`population.quadratics`),
# `theory.fedavg_fixed_point` computes this fixed point exactly.
#
# ## 5. Your own parts
#
# Research changes one part and keeps the others. Each part is a few pure functions, written for one client or one
# aggregator; the engine adds cohorts, chunks and devices. You never write `vmap`.
#
# ### A local solver
#
# A client update defines what **one** client does with the model it receives. Here: full-batch gradient descent that
# sends the *average* of the models on its path rather than the last. `data.mask` marks the real rows.


# %%
def averaged_descent(loss_fn, learning_rate, num_steps):
    """Gradient descent whose result is the mean of its iterates (Polyak and Juditsky, 1992)."""

    def apply(key, broadcast, state, data):
        count = data.mask.sum()

        def total(params):
            return jnp.where(data.mask, loss_fn(params, data.examples, key)["loss"], 0).sum()

        def one_step(params, _):
            value, gradient = jax.value_and_grad(total)(params)
            params = jax.tree.map(lambda w, g: w - learning_rate * g / jnp.maximum(count, 1), params, gradient)
            return params, (params, value)

        _, (path, losses) = jax.lax.scan(one_step, broadcast, length=num_steps)
        update = jax.tree.map(lambda iterates, w: iterates.mean(axis=0) - w, path, broadcast)
        weight = count.astype(jnp.float32)
        return Report(update, weight, {"local_loss": Mean(losses[0], weight)}), state

    return ClientUpdate(init=lambda params: (), apply=apply)


sampler = sampling.uniform(data.train.size, COHORT)
averaging = algorithms.federated(
    sampler, averaged_descent(loss_fn, 0.1, num_steps=10), aggregation.mean(), server.optimizer(optax.sgd(1.0))
)
_, averaged = train(averaging)
figure, axes = plt.subplots(figsize=(6.4, 3))
draw(axes, {"mean of 10 iterates": averaged, "5 steps of SGD (section 3)": base})
legend(axes)

# %% [markdown]
# **What one sees.** The new client learns. The mean of ten iterates lies about where step 5.5 does, so ten of its
# steps move the model about as far as five of the old ones: a new idea that costs twice the computing for the same
# curve. Most ideas end like this; here it took half a minute to find out.
#
# ### A compressor, and a client that cannot be trusted
#
# `transform.stateless` makes a transform from `fn(key, update)`, which maps one client's update to the message it
# sends. This one rounds each coordinate at random, up or down, to one of 15 levels, so that the mean stays right;
# `wire` gives the size of a message.


# %%
def four_bits(key, update):
    """Unbiased stochastic rounding to 15 levels between plus and minus the largest coordinate."""
    flat, restore = jax.flatten_util.ravel_pytree(update)
    scale = jnp.maximum(jnp.abs(flat).max(), 1e-30) / 7
    return restore(scale * jnp.floor(flat / scale + jax.random.uniform(key, flat.shape)))


def four_bits_size(update_spec, wire):
    return wire._replace(payload_bits=4 * wire.values, side_bits=32)  # and the scale, one float


def federation(**parts):
    return algorithms.fedavg(loss_fn, sampler, optax.sgd(0.1), num_steps=5, batch_size=10, **parts)


_, compressed = train(federation(transform=transform.stateless(four_bits, wire=four_bits_size)))
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3), sharey=True)
messages = {"4 bits a coordinate": compressed, "32 bits (section 3)": base}
draw(left, messages)
draw(right, messages, lambda name, history: sent(history), "Uploaded by all clients so far (MB)", xscale="log")
legend(left)

# %% [markdown]
# **What one sees.** Round by round nearly the same curve, at an eighth of the bytes: the rounding errors of fifty
# clients are independent and mostly cancel in the mean.
#
# Now an attack. Let each message, with a probability of 20 %, be replaced by minus five times itself, and let the
# server defend the model with the median of each coordinate instead of the mean. `aggregation.gather` makes an
# aggregator from `rule(key, updates, weights)`, which sees all messages at once: `updates` has leaves `[m, ...]`, and
# the weight is 0 where nothing arrived.


# %%
def hostile(key, update):
    attack = jnp.where(jax.random.bernoulli(key, 0.2), -5.0, 1.0)
    return jax.tree.map(lambda x: attack * x, update)


def coordinate_median(key, updates, weights, ids):
    def leaf(x):
        arrived = (weights > 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.nan_to_num(jnp.nanmedian(jnp.where(arrived, x, jnp.nan), axis=0))  # no message: no update

    return jax.tree.map(leaf, updates)


attack, median = transform.stateless(hostile), aggregation.gather(coordinate_median)
attacked = {
    "mean, attacked": train(federation(transform=attack))[1],
    "mean, honest (section 3)": base,
    "median, attacked": train(federation(transform=attack, aggregator=median))[1],
    "median, honest": train(federation(aggregator=median))[1],
}
figure, axes = plt.subplots(figsize=(7.4, 3.2))
draw(axes, attacked)
legend(axes, loc="center left", bbox_to_anchor=(1, 0.5))

# %% [markdown]
# **What one sees.** A fifth of the messages is enough to destroy the mean: its expected factor 0.8 − 0.2 · 5 is
# negative, so the model moves uphill. The median withstands the attack. It has a price, seen in the honest run: where
# clients differ, the updates of most are near zero for what only a few clients hold, and the median follows the
# majority. Robustness and heterogeneity conflict; a paper on one should measure the other.
#
# ## 6. The same bits elsewhere
#
# Floating-point sums depend on their order, so on most systems another number of devices gives another model, and the
# difference grows with the rounds. Here messages are summed exactly, and neither the number of devices nor the order of
# the clients changes a bit. A `Plan` holds how many clients are simulated at once (`lanes`) and how many messages are
# summed at once (`chunk`). It is fixed here, because results depend on it:

# %%
prints = []
for devices in (None, "all"):
    algorithm = federation(plan=engine.Plan.checked(lanes=8), mesh=devices)
    number = 1 if devices is None else jax.device_count()
    prints.append(fingerprint(train(algorithm)[0]))
    print(f"{number} device{'s' if number > 1 else ' '}  model {prints[-1]}")
print("one device and all devices give the same bits:", prints[0] == prints[1])

# %% [markdown]
# A result of one device can be checked bit by bit on eight of its kind. (Other `lanes`, and another kind of processor,
# may change the last bits: they change how one client's own arithmetic is compiled.)
#
# ## Where to go from here
#
# * **One seed is no result.** Repeat with `jax.random.key(1)`, `key(2)`, ... before you believe a small difference;
#   the curves above move by a few points from seed to seed, and the tiny cohort's by ten.
# * Other data: `population.csv_sites` and `population.leaf` read your files, `population.digits_partition` gives every
#   image to one client, `population.generated` makes clients from their ids, a billion if you like.
# * Other algorithms: `algorithms.fedprox`, `fednova`, `fedadam`, ...; each docstring cites its paper and names the
#   tests of what it guarantees.
# * Who takes part: `sampling` has Poisson, weighted and cyclic cohorts, and wrappers for clients who drop out.
# * Long runs: `run(..., directory="runs/first")` keeps a log and checkpoints, and `resume=True` continues with the
#   bits of a run that was never interrupted.
# * The command `fedjax-sim --help` runs experiments from configuration files.

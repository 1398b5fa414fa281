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
# # How many clients must take part?
#
# A round invites some of the clients and averages what they send. The cohort is random, so the average is random too.
# This notebook compares its variance from three sources: **enumeration** of all cohorts, a **closed form**, and the
# **simulator**.
#
# 1. five clients, all cohorts, by hand
# 2. the finite population correction, and a mistake that is often made with it
# 3. the study: measured variances with intervals, theory as lines
# 4. how many clients a tolerance requires
# 5. weights: why the mean by examples is biased
#
# You need to know what a variance is; [the first notebook](01_first_federation.ipynb) shows how a federation is built.

# %%
# %matplotlib inline
import itertools
import os

import numpy as np

from fedjax_sim import sampling, study, theory
from fedjax_sim.study.page import table

FAST = os.environ.get("FEDJAX_SIM_NOTEBOOK_FAST") == "1"  # the tests run small sizes

# %% [markdown]
# ## 1. Five clients, by hand
#
# Each client holds one number. A cohort of two is one of ten pairs, all equally likely.

# %%
values = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
means = [np.mean(pair) for pair in itertools.combinations(values, 2)]
variance = theory.population_variance(values)
print(f"all ten pairs: mean {np.mean(means):.4f}, variance {np.var(means):.4f}")
print(f"closed form:   mean {values.mean():.4f}, variance {theory.cohort_mean_variance(variance, 5, 2):.4f}")

# %% [markdown]
# The closed form is $\frac{\sigma^2}{m}\cdot\frac{N-m}{N-1}$, with $\sigma^2$ of divisor $N$. Its second factor is the
# **finite population correction**: who is in the cohort cannot be drawn again.
#
# ## 2. A mistake that is often made
#
# "The population is huge, so the correction is about 1." It is not: for a hundred clients and more it is about
# $1 - m/N$, and depends on the participation **rate**. At ten percent it is 0.9, whether there are a hundred clients or
# a million. With few clients the exact $1 - (m - 1)/(N - 1)$ matters: with one client of ten it is exactly 1.

# %%
for size in (10, 100, 10_000, 1_000_000):
    row = [theory.finite_population_correction(size, max(1, round(rate * size))) for rate in (0.1, 0.15, 0.5, 1.0)]
    print(f"N = {size:>9,}:  " + "  ".join(f"{x:.4f}" for x in row))

# %% [markdown]
# What saves a cross-device federation is not the correction but the absolute size of the cohort: a thousand clients are
# enough, and a small share of a million.
#
# ## 3. The study
#
# `study.participation` runs real rounds of the simulator, thousands of them under one `vmap`, and compares the variance
# of their aggregates with the closed form of that sampler and that aggregator. All intervals together hold with 99 %.

# %%
small = {"population_sizes": (10,), "rates": (0.5, 1.0), "num_rounds": 300, "compare_samplers": False}
large = {"population_sizes": (10, 100, 10_000), "rates": (0.01, 0.1, 0.5, 0.9, 1.0), "num_rounds": 2000}
options = (small if FAST else large) | {"model_clients": 0}
found = study.participation(**options)
print(found.verdict())

# %%
found.draw()

# %%
columns, rows = table(found)
for line in [columns, *rows]:
    print("  ".join(f"{cell:>18.18}" for cell in line[1:]))

# %% [markdown]
# What the study concludes, and whether it holds for these numbers:

# %%
for claim in found.claims:
    print(claim, end="\n\n")

# %% [markdown]
# ## 4. How many clients a tolerance requires
#
# Say the standard deviation of the cohort's mean may be at most $\alpha$ times the length of the mean. With
# $r = \sigma^2 / (\alpha \|g\|)^2$ the smallest cohort is $\lceil rN / (N - 1 + r) \rceil$, an exact integer.

# %%
for size in (10, 100, 10_000, 1_000_000):
    needed = theory.required_cohort_size(size, 1600)
    print(f"N = {size:>9,}: {needed:>5,} clients, {needed / size:7.2%}")

# %% [markdown]
# Ten hospitals must all take part. Ten thousand phones need 14 %, a million need 0.16 %.
#
# ## 5. Weights
#
# Clients hold different numbers of examples, and the usual average weighs by them **within the cohort**. That is a
# ratio of two random sums, and its mean is not the population's weighted mean. Two clients show it: one with a single
# example and the value 0, one with nine and the value 1.

# %%
one_of_two = sampling.uniform(2, 1).design
for estimator in ("mean", "horvitz_thompson"):
    law = theory.design_variance(one_of_two, [0.0, 1.0], [1, 9], estimator=estimator)
    print(f"{estimator:>17}: on average {law.mean[0]:.2f}, should be {law.target[0]:.2f}, variance {law.variance:.2f}")

# %% [markdown]
# Horvitz and Thompson's estimate is unbiased, and pays with variance. Neither is right for every purpose: say which one
# you use.
#
# The seed decides every random number, so a study can be repeated bit for bit.

# %%
first, again = (study.participation(**small, model_clients=0).rows() for _ in range(2))
print("same bits:", first == again)

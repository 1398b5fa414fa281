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
# # Where does training converge to?
#
# With a constant step size, federated training does not reach the optimum. Its mean converges to a fixed point beside
# it, around which the model keeps fluctuating. The excess loss that is left is the **error floor**. It is a sum of
# parts, and each part has a cause that can be reduced, at a price.
#
# 1. one number and one client: the floor by hand
# 2. the budget: drift, client sampling, minibatches, quantisation, privacy noise
# 3. the study: the simulator against the budget
# 4. speed against the floor
# 5. what an error floor is not

# %%
# %matplotlib inline
import os

import matplotlib.pyplot as plt
import numpy as np

from fedjax_sim import sampling, study, theory
from fedjax_sim.study.page import table

FAST = os.environ.get("FEDJAX_SIM_NOTEBOOK_FAST") == "1"  # the tests run small sizes

# %% [markdown]
# ## 1. The floor by hand
#
# Gradient descent on $h w^2 / 2$ with noisy gradients, $w \leftarrow w - \eta (h w + \xi)$. The variance of $w$
# converges to the value at which a step removes as much as it adds: $\eta \sigma^2 / (h (2 - \eta h))$. Simulate it.

# %%
rng = np.random.default_rng(0)
curvature, noise = 2.0, 1.5
w = np.zeros(20_000)
for step in range(200):
    w -= 0.3 * (curvature * w + noise * rng.normal(size=w.size))
print(f"simulated variance {w.var():.4f}, closed form {theory.sgd_floor(curvature, noise**2, step_size=0.3):.4f}")

# %% [markdown]
# ## 2. The budget
#
# For clients with quadratic risks $f_i(w) = \frac12 (w - a_i)^T H_i (w - a_i)$ there is a closed form. `theory.budget`
# solves the equation of the stationary second moment exactly, and gives the part of each cause. Here are two clients in
# one dimension that each take five local steps.

# %%
floor = theory.budget([1.0, 10.0], [0.0, 1.0], step_size=0.05, num_steps=5, gradient_noise=1.0)
print(f"optimum {floor.optimum[0]:.4f}, fixed point of FedAvg {floor.fixed_point[0]:.4f}")
print({name: round(loss, 5) for name, loss in floor.losses.items() if loss})

# %% [markdown]
# **Drift** is the bias: local steps pull each client towards its own optimum. No cohort size removes it, smaller steps do.
# The other parts are variances.
#
# ## 3. The study
#
# `study.error_floor` runs the simulator to its floor, thousands of times under one `vmap`, with each cause alone and
# with all of them together, and compares the loss with the budget.

# %%
small = {"num_clients": 10, "dimension": 2, "step_sizes": (0.1,), "cohort_sizes": (4,), "num_steps": (2,), "bits": (4,)}
small |= {"noise_multipliers": (0.01,), "num_runs": 1000}
options = (small if FAST else {"num_runs": 1000}) | {"logistic_clients": 0, "model_clients": 0}
found = study.error_floor(**options)
print(found.verdict())

# %%
found.draw()

# %%
columns, rows = table(found)
for line in [columns, *rows]:
    print("  ".join(f"{cell:>17.17}" for cell in line))

# %%
for claim in found.claims:
    print(claim, end="\n\n")

# %% [markdown]
# ## 4. Speed against the floor
#
# A larger step reaches its floor sooner, and its floor is higher. The budget has the whole expected path in closed
# form, so the trade-off can be drawn without a simulation.

# %%
rng = np.random.default_rng(1)
hessians, centers = rng.uniform(0.5, 1.5, 20), rng.normal(size=20)
design = sampling.uniform(20, 5).design
figure, axes = plt.subplots(figsize=(7, 3.2))
for step_size, line in ((0.4, "-"), (0.1, "--"), (0.025, ":")):
    budget = theory.budget(hessians, centers, step_size=step_size, design=design, gradient_noise=0.25)
    axes.plot(budget.expected_loss(300, start=[3.0]), line, color="black", label=f"step {step_size:g}")
axes.set(yscale="log", xlabel="Round", ylabel="Expected excess loss")
axes.legend()
plt.show()

# %% [markdown]
# ## 5. What an error floor is not
#
# It is not a worse final accuracy. It belongs to **constant** steps: with steps that decay as $1/t$ it vanishes, and
# averaging the last models lowers it. When two methods are compared, compare them at equal cohorts, and say which
# schedule was used.

# %%
steps = 0.6 / (1 + 0.05 * np.arange(2000))
decaying = theory.expected_squared_distance(1.0, 0.25, steps, start=3.0)
constant = theory.expected_squared_distance(1.0, 0.25, np.full(2000, 0.1), start=3.0)
print(f"after 2,000 steps: constant {constant[-1]:.5f}, decaying {decaying[-1]:.5f}")
first, again = (study.error_floor(**small, logistic_clients=0, model_clients=0).rows() for _ in range(2))
print("same bits:", first == again)

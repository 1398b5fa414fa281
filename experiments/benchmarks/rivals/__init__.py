"""Other frameworks on identical arrays; each lives in a virtual environment of its own.

`python -m experiments.benchmarks.rivals.setup` makes the environments, `python -m experiments.benchmarks.rivals` runs
them beside fedjax_sim and writes `results/rivals.json`.
"""

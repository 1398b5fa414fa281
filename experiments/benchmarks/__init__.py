"""Benchmarks of `fedjax_sim` against hand-written loops, the machine's peaks and other frameworks.

A benchmark is a module `pNN_name.py` with `measure(quick=False) -> dict` (see `harness.result`) and, where bars of its
rows would not do, `plot(axes, result)`. Its docstring is its paragraph in README.md.
"""

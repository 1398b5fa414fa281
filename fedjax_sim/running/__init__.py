"""Runs an algorithm: rounds in compiled blocks, with log, checkpoints, privacy ledger, processes and progress.

`fedjax_sim.run` is `running.loop.run`. Nothing is imported here, so that the command line starts without JAX.
"""

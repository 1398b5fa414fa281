"""Runs grids of whole runs, every combination of values with every seed, as few compiled programs."""

from fedjax_sim.sweeps.figure import sweep_figure
from fedjax_sim.sweeps.results import Paired, Sweep
from fedjax_sim.sweeps.sweep import sweep

__all__ = ["Paired", "Sweep", "sweep", "sweep_figure"]

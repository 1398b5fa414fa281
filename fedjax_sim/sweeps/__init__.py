"""Runs grids of whole runs, every combination of values with every seed, as few compiled programs."""

from fedjax_sim.sweeps.figure import sweep_figure as sweep_figure
from fedjax_sim.sweeps.results import Paired as Paired, Sweep as Sweep
from fedjax_sim.sweeps.sweep import sweep as sweep

"""Trains a built experiment in a folder, with everything that `fedjax-sim run` writes there."""

from fedjax_sim.experiment.train import PageNotWritten as PageNotWritten, train as train

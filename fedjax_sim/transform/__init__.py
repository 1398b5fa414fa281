"""The letter: both ends of what an update goes through."""

from fedjax_sim.transform.chain import chain, identity, stateless

__all__ = ["chain", "identity", "stateless"]

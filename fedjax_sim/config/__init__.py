"""A run as a TOML file: document, kinds of values, registry of parts, and the experiment that is built of it."""

from fedjax_sim.config.document import Config, ConfigError, load

__all__ = ["Config", "ConfigError", "load"]

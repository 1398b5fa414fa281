"""A run as a TOML file: the document, the kinds of its values, the registry of its parts, and what is built of them."""

from fedjax_sim.config.document import Config, ConfigError, load

__all__ = ["Config", "ConfigError", "load"]

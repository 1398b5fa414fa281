"""Describes a run by a TOML file: the document, kinds of values, the registry of parts, and the experiment to build."""

from fedjax_sim.config.document import Config as Config, ConfigError as ConfigError, load as load

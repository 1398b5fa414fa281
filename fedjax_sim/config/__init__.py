"""Makes the objects of a run from a TOML file in three passes: `read`, `resolve` and `build`."""

from fedjax_sim.config.document import Config as Config, ConfigError as ConfigError, load as load

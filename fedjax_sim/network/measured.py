"""Devices as somebody measured them: rows of a CSV file, one a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.csv_file import MOST_ROWS, SECONDS, columns, factor, numbers, parted
from fedjax_sim.network.devices import Profile, of_profiles
from fedjax_sim.network.distributions import unit_draws
from fedjax_sim.network.layouts import filled
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, Availability, Devices, FilePath
from fedjax_sim.validate import NonNegativeInt, PopulationSize, Positive

__all__ = ["measured"]

FLOPS = {f"{prefix}flops/s": size for prefix, size in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))}
BYTES = {"bytes/s": 1.0, "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
BYTES |= {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}


@validate.named_arguments
def measured(
    population_size: PopulationSize,
    path: FilePath,
    *,
    layout: str = "plain",
    speed: float | str | None = None,
    bandwidth_down: float | str | None = None,
    bandwidth_up: float | str | None = None,
    latency: float | str | None = None,
    joules_per_flop: float | str = 0.0,
    joules_per_byte: float | str = 0.0,
    compute_watts: float | str = 0.0,
    radio_watts: float | str = 0.0,
    speed_unit: str | None = None,
    reference_flops: Positive | None = None,
    bandwidth_unit: str | None = None,
    latency_unit: str | None = None,
    row_weight: str | None = None,
    sample_rows: int | None = None,
    delimiter: str = "auto",
    missing: Sequence[str] = (),
    assign: Literal["random", "in_turn"] = "random",
    jitter: float = 0.0,
    availability: Availability | None = None,
    ticks_per_second: int = 1000,
    seed: NonNegativeInt = 0,
) -> Devices:
    """Clients whose hardware is a row of a file; what belongs together stays together.

    Args: each number is a column of the file by its name, or one number for all (in seconds, bytes/s, flops/s); None:
      as the layout says.
      population_size: N.
      path: of a CSV file with a header and at most 2^18 rows; columns that are not named are ignored.
      layout: whose columns and units the file has. "plain": speed, bandwidth_down, bandwidth_up in flops/s and bytes/s,
        no latency. "ookla": tiles of Ookla's open data, each as likely as it has devices; "mlab": M-Lab's NDT tests,
        `unified_downloads`; of both, latency is half a round trip, and speed (of NDT also bandwidth_up) is to be given.
        "fedscale": FedScale's device capacities, a row a device; `reference_flops` are those of training its model on
        one example, three times its inference.
      speed: of training; with a unit of time, how long `reference_flops` took.
      bandwidth_down, bandwidth_up: may be the same column.
      latency, joules_per_flop, joules_per_byte, compute_watts, radio_watts: as in `heterogeneous`.
      speed_unit: "flops/s" (k, M, G, T), or "s", "ms", "us"; a number may stand before a unit, as in "2.5e6 flops/s".
      reference_flops: the operations whose time was measured; with a unit of time only.
      bandwidth_unit: "bytes/s" or "B/s" (kB, MB, GB), "bit/s" (k, M, G).
      latency_unit: "s", "ms", "us"; such as "0.5 ms" for a round trip.
      row_weight: column of numbers to which the chances of rows are proportional, for "random"; None: as the layout
        says, equal chances in a plain one.
      sample_rows: of a larger file, so many rows at random, all equally likely, by `seed`; at most 2^18. Weights then
        hold among these rows. None: the whole file.
      delimiter: between values: one character, "space", or "auto", the one of comma, semicolon and tab in the header.
      missing: texts that stand for a missing value, such as "null"; rows that lack a number are left out.
      assign: "random": a client draws its row by its id, all equally likely; "in_turn": client i has row i % rows.
      jitter, availability, ticks_per_second: as in `of_profiles`.
      seed: of the draws.

    Raises: ValueError, TypeError for a file that cannot be read, and for what is not a finite number in range, with
    its row.

    Guarantees: times by hand for a file with other names and units (tests/network/test_measured.py::
    test_columns_and_units) and for published layouts (::test_published_layouts); rows are equally likely, or as likely
    as their weights say, and kept whole (::test_clients_have_rows, ::test_rows_have_weights), in a sample of a large
    file too (::test_samples_of_rows), and rows without a number are left out (::test_rows_that_lack_a_number).

    References: Ookla, Speedtest global fixed and mobile network performance maps (columns avg_d_kbps, avg_u_kbps,
    avg_lat_ms, devices); Measurement Lab, NDT unified views (MeanThroughputMbps, MinRTT); Lai et al. 2022 (FedScale),
    device traces (computation, communication).
    """
    units_of = {"speed_unit": speed_unit, "bandwidth_unit": bandwidth_unit, "latency_unit": latency_unit}
    if row_weight is not None and assign != "random":
        validate.fail("row_weight", f"None where assign is {assign!r}", row_weight)
    numbers_of = {"speed": speed, "bandwidth_down": bandwidth_down, "bandwidth_up": bandwidth_up, "latency": latency}
    chosen = filled(layout, numbers_of | units_of | {"row_weight": row_weight})
    speed_unit, bandwidth_unit, latency_unit, row_weight = (chosen.pop(name) for name in (*units_of, "row_weight"))
    given: dict[str, float | str] = dict(chosen)
    given |= {"joules_per_flop": joules_per_flop, "joules_per_byte": joules_per_byte}
    given |= {"compute_watts": compute_watts, "radio_watts": radio_watts}
    units = {"latency": factor("latency_unit", latency_unit, SECONDS)}
    units |= dict.fromkeys(("bandwidth_down", "bandwidth_up"), factor("bandwidth_unit", bandwidth_unit, BYTES))
    units["speed"] = factor("speed_unit", speed_unit, FLOPS | SECONDS)
    is_time = parted(speed_unit)[1] in SECONDS
    if is_time != (reference_flops is not None):
        rule = "the operations that were timed" if is_time else "None for a speed in flops/s"
        validate.fail("reference_flops", rule, reference_flops, f"speed_unit is {speed_unit!r}.")
    named = {option: name for option, name in given.items() if isinstance(name, str)}
    weighted = assign == "random" and row_weight is not None
    wanted = named | ({"row_weight": row_weight} if weighted else {})
    way_out = f"Take some of them at random: sample_rows = {MOST_ROWS}."
    measurements = columns(
        path, wanted, delimiter=delimiter, missing=missing, sample_rows=sample_rows, seed=seed, way_out=way_out
    )
    table = {}
    for option, value in given.items():
        above = option in ("speed", "bandwidth_down", "bandwidth_up")
        if option in measurements.texts:
            found = numbers(option, measurements, above=above) * units.get(option, 1.0)
            found = reference_flops / found if option == "speed" and is_time else found
        else:
            (validate.positive if above else lambda name, x: validate.in_range(name, x, 0))(option, value)
            found = np.full(1, float(value))
        if not (found.max() <= validate.LARGEST and (found.min() >= validate.SMALLEST or not above)):
            validate.fail(option, "numbers that float32 holds", float(found.max()))
        table[option] = found.astype(np.float32)
    rows = max(map(len, table.values()))

    key = stream(jax.random.key(seed), "measured devices")
    rows = len(measurements.rows) if weighted else rows
    chances = _cumulated(numbers("row_weight", measurements)) if weighted else None

    def row_of(ids: Array) -> Array:
        if assign == "in_turn":
            return ids % rows
        draws = unit_draws(key, ids)
        drawn = draws * rows if chances is None else jnp.searchsorted(jnp.asarray(chances), draws, side="right")
        return jnp.minimum(drawn.astype(jnp.int32), rows - 1)

    def profile(ids: Array) -> Profile:
        row = row_of(ids)
        return Profile(**{name: jnp.asarray(column)[row % len(column)] for name, column in table.items()})

    options = {"jitter": jitter, "availability": availability, "ticks_per_second": ticks_per_second}
    return of_profiles(population_size, profile, **options)


def _cumulated(weights: np.ndarray) -> np.ndarray:
    """[rows] float32 cumulated shares, of which the last with a weight is 1."""
    if not weights.max() > 0:
        validate.fail("row_weight", "a weight above 0", "zeros alone")
    shares = np.cumsum(weights / weights.max())  # whose sum may be past the largest float
    shares /= shares[-1]
    shares[np.flatnonzero(weights)[-1] :] = 1.0
    return shares.astype(np.float32)

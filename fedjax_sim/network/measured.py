"""This module makes devices from measurements: rows of a CSV file, one for each measured device."""

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

# Units -> flops/s and bytes/s.
FLOPS = {f"{prefix}flops/s": size for prefix, size in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))}
BYTES_BY_UNIT = {"bytes/s": 1.0, "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
BYTES_BY_UNIT |= {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}


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
    """Makes clients whose hardware is a row of a file, so that numbers of one device stay together.

    Each of the numbers is a column of the file by its name, or one number for all clients (in seconds, bytes/s,
    flops/s). For None, the layout says what it is.

    Args:
      population_size: N.
      path: of a CSV file with a header and at most 2^18 rows. Columns that are not named are ignored.
      layout: the columns and units of the file. "plain": speed, bandwidth_down and bandwidth_up in flops/s and bytes/s,
        without latency. "ookla": tiles of Ookla's open data, each as likely as its number of devices. "mlab": M-Lab's
        NDT tests, `unified_downloads`. For both, latency is half of a round trip, and speed (for NDT also bandwidth_up)
        has to be given. "fedscale": FedScale's device capacities, one row for each device; `reference_flops` are those
        of training its model on one example, three times its inference.
      speed: of training; None: by the layout. With a unit of time, the time that `reference_flops` took.
      bandwidth_down, bandwidth_up: may be the same column; None: by the layout.
      latency, joules_per_flop, joules_per_byte, compute_watts, radio_watts: as in `heterogeneous`.
      speed_unit: "flops/s" (k, M, G, T), or "s", "ms", "us". A number may stand before a unit, as in "2.5e6 flops/s".
      reference_flops: the operations whose time was measured; None unless the unit of speed is one of time.
      bandwidth_unit: "bytes/s" or "B/s" (kB, MB, GB), "bit/s" (k, M, G); None: as the layout says.
      latency_unit: "s", "ms", "us"; for example "0.5 ms" for a round trip in ms. None: as the layout says.
      row_weight: a column of numbers; the probabilities of rows are proportional to them, for "random". None: as the
        layout says; rows of a plain file are equally likely.
      sample_rows: the size of a random sample of the rows of a larger file, all equally likely, by `seed`; at most
        2^18. Weights then hold among these rows. None: the whole file.
      delimiter: between values: one character, "space", or "auto", which takes comma, semicolon or tab by the header.
      missing: texts that stand for a missing value, such as "null". Rows that lack a number are left out.
      assign: "random": a client draws its row by its id, as likely as `row_weight` says. "in_turn": client i has row
        i % rows.
      jitter, availability, ticks_per_second: as in `of_profiles`.
      seed: of the draws.

    Returns: `Devices`.

    Raises: ValueError, TypeError for a file that cannot be read, and for a value that is not a finite number in range,
    with its row.

    Guarantees: Times follow by hand for a file with other names and units
    (tests/network/test_measured.py::test_columns_and_units) and for published layouts (::test_published_layouts). Rows
    are equally likely, or as likely as their weights say, and are kept whole (::test_clients_have_rows,
    ::test_rows_have_weights). This holds in a sample of a large file too (::test_samples_of_rows). Rows without a
    number are left out (::test_rows_that_lack_a_number).

    References: Ookla, Speedtest global fixed and mobile network performance maps (columns avg_d_kbps, avg_u_kbps,
    avg_lat_ms, devices); Measurement Lab, NDT unified views (MeanThroughputMbps, MinRTT); Lai et al. 2022 (FedScale),
    device traces (computation, communication).
    """
    units_of = {"speed_unit": speed_unit, "bandwidth_unit": bandwidth_unit, "latency_unit": latency_unit}
    if row_weight is not None and assign != "random":
        validate.fail("row_weight", f"None where assign is {assign!r}", row_weight)
    numbers_of = {"speed": speed, "bandwidth_down": bandwidth_down, "bandwidth_up": bandwidth_up, "latency": latency}
    from_layout = filled(layout, numbers_of | units_of | {"row_weight": row_weight})
    speed_unit, bandwidth_unit, latency_unit, row_weight = (from_layout.pop(name) for name in (*units_of, "row_weight"))
    assert speed_unit is not None and bandwidth_unit is not None and latency_unit is not None, "every layout has units"
    numbers_by_name: dict[str, float | str] = dict(from_layout)
    numbers_by_name |= {"joules_per_flop": joules_per_flop, "joules_per_byte": joules_per_byte}
    numbers_by_name |= {"compute_watts": compute_watts, "radio_watts": radio_watts}
    units = {"latency": factor("latency_unit", latency_unit, SECONDS)}
    units |= dict.fromkeys(("bandwidth_down", "bandwidth_up"), factor("bandwidth_unit", bandwidth_unit, BYTES_BY_UNIT))
    units["speed"] = factor("speed_unit", speed_unit, FLOPS | SECONDS)
    # A time for `reference_flops` is converted into a speed below.
    is_time = parted(speed_unit)[1] in SECONDS
    if is_time != (reference_flops is not None):
        rule = "the operations that were timed" if is_time else "None for a speed in flops/s"
        validate.fail("reference_flops", rule, reference_flops, f"speed_unit is {speed_unit!r}.")
    columns_to_read = {option: name for option, name in numbers_by_name.items() if isinstance(name, str)}
    if assign == "random" and row_weight is not None:
        columns_to_read["row_weight"] = row_weight
    has_weights = "row_weight" in columns_to_read
    way_out = f"Take some of them at random: sample_rows = {MOST_ROWS}."
    measurements = columns(
        path, columns_to_read, delimiter=delimiter, missing=missing, sample_rows=sample_rows, seed=seed, way_out=way_out
    )
    # A number for all clients is a column of length 1.
    table = {}
    for option, value in numbers_by_name.items():
        must_be_positive = option in ("speed", "bandwidth_down", "bandwidth_up")
        if option in measurements.texts:
            values = numbers(option, measurements, above=must_be_positive) * units.get(option, 1.0)
            values = reference_flops / values if option == "speed" and reference_flops is not None else values
        else:
            (validate.positive if must_be_positive else lambda name, x: validate.in_range(name, x, 0))(option, value)
            values = np.full(1, float(value))
        if not (values.max() <= validate.LARGEST and (values.min() >= validate.SMALLEST or not must_be_positive)):
            validate.fail(option, "numbers that float32 holds", float(values.max()))
        table[option] = values.astype(np.float32)
    num_rows = len(measurements.rows)  # of each column that was read

    key = stream(jax.random.key(seed), "measured devices")
    upper_probabilities = _cumulated(numbers("row_weight", measurements)) if has_weights else None

    def row_of(ids: Array) -> Array:
        if assign == "in_turn":
            return ids % num_rows
        draws = unit_draws(key, ids)
        drawn = (
            draws * num_rows
            if upper_probabilities is None
            else jnp.searchsorted(jnp.asarray(upper_probabilities), draws, side="right")
        )
        # A draw near 1 may be rounded up to the number of rows.
        return jnp.minimum(drawn.astype(jnp.int32), num_rows - 1)

    def profile(ids: Array) -> Profile:
        row = row_of(ids)
        # A column of length 1 holds the number of all clients.
        return Profile(**{name: jnp.asarray(column)[row % len(column)] for name, column in table.items()})

    options = {"jitter": jitter, "availability": availability, "ticks_per_second": ticks_per_second}
    return of_profiles(population_size, profile, **options)


def _cumulated(weights: np.ndarray) -> np.ndarray:
    """Cumulates weights to [rows] float32 probabilities; from the last row with a weight on they are 1."""
    if not weights.max() > 0:
        validate.fail("row_weight", "a weight above 0", "zeros alone")
    # Weights are scaled first, because their sum may exceed the largest float.
    shares = np.cumsum(weights / weights.max())
    shares /= shares[-1]
    shares[np.flatnonzero(weights)[-1] :] = 1.0
    return shares.astype(np.float32)

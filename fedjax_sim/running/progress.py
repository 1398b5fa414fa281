"""Shows the progress bar of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedjax_sim.running import terminal
from fedjax_sim.running.log import visits_of
from fedjax_sim.text.bounds import shown_up


@contextmanager
def progress_bar(shown: bool, first: int, num_rounds: int) -> Iterator[Callable]:
    """Yields a function of (records of a block, its seconds) that advances the bar; it does nothing unless `shown`.

    Args:
      shown: whether there is a bar.
      first: the number of rounds that are done already.
      num_rounds: T, the rounds of the whole run.
    """
    if not shown:
        yield lambda records, seconds: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[quality]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal.console()) as bar:
        task = bar.add_task("rounds", total=num_rounds, completed=first, speed="compiling", quality="")

        def advance(records: list[dict], seconds: float) -> None:
            clients = sum(map(visits_of, records))
            # A block may be faster than the clock's resolution.
            seconds = max(seconds, 1e-9)
            # Between two evaluations the bar keeps showing the last one.
            quality = bar.tasks[0].fields["quality"]
            for record in records:
                judged = next((place for place in ("test", "owner") if f"{place}_loss" in record), None)
                if judged is not None:
                    accuracy = record.get(f"{judged}_accuracy")
                    quality = f"{judged} loss {float(record[f'{judged}_loss']):.3f}"
                    quality += "" if accuracy is None else f" ({float(accuracy):.1%})"
                    quality += f" epsilon {shown_up(record['epsilon'])}" if "epsilon" in record else ""
                elif not quality.startswith(("test", "owner")) and "local_loss" in record:
                    quality = f"local loss {float(record['local_loss']):.3f}"
            speed = f"{len(records) / seconds:,.1f} rounds/s {clients / seconds:,.0f} clients/s"
            bar.update(task, completed=records[-1]["round"], speed=speed, quality=quality)

        yield advance

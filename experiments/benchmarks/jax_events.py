"""`fedjax-sim` as its own module runs it, which also notes when JAX traces, lowers and compiles.

The times go to the file that `EVENTS_FILE` names, as JSON: lists of [kind, start, end] on the clock of
`time.perf_counter`, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

EVENTS_FILE = "FEDJAX_SIM_EVENTS_FILE"
KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",  # or reading what was compiled before
}


def main() -> None:
    started = time.perf_counter()
    import jax

    import fedjax_sim.command.run  # noqa: F401  (what the command imports by itself later)
    from fedjax_sim.command import app

    events = [("import", started, time.perf_counter())]

    def note(name: str, seconds: float, **_) -> None:
        if name in KINDS:
            now = time.perf_counter()
            events.append((KINDS[name], now - seconds, now))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        app.main()
    finally:
        pathlib.Path(os.environ[EVENTS_FILE]).write_text(json.dumps(events))


if __name__ == "__main__":
    main()

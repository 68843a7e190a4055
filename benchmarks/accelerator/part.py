"""One part of a section, in a separate process: `python -m benchmarks.accelerator.part`.

A part that dies or takes too long costs the others nothing, peak memory is that of one contender,
and what JAX reads when it is imported, such as XLA_FLAGS, is set for each part.
"""

import argparse
import json
import os
from typing import Any


def main() -> None:
    """Runs a part, and writes a line of JSON for each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument("name")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--quick", action="store_true")
    settings = parser.parse_args()

    with open(settings.rows, "a", encoding="utf-8") as file:

        def emit(**row: Any) -> None:
            json.dump(row, file)
            file.write("\n")
            file.flush()

        if settings.section == "device":
            describe(emit)
        elif settings.section == "correctness":
            from benchmarks.accelerator import correctness

            correctness.run(emit)
        else:
            from benchmarks.accelerator import figures

            # With none, each contender has one round.
            clock = figures.Clock(0 if settings.quick else settings.seconds)
            run = getattr(figures, settings.section)
            run(emit, settings.name, settings.quick, clock)
    # What libraries do at their exit is not waited for.
    os._exit(0)


def describe(emit: Any) -> None:
    """Emits facts about the machine."""
    import jax

    from benchmarks.report import environment

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    more = {"platform": device.platform, "n_devices": len(jax.devices()), "bytes_limit": limit}
    emit(**environment(), **more)


if __name__ == "__main__":
    main()

"""The idle time of devices, from a trace of JAX's profiler."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

_TRANSFERS = ("MemcpyH2D", "MemcpyD2H")


@dataclasses.dataclass(frozen=True)
class Idle:
    """The time of the first device, from its first operation in the trace to its last."""

    device: str
    seconds: float
    idle: float
    """The fraction without an operation; transfers to and from the host do not count."""
    longest_gap: float
    """Seconds."""
    transfers: float
    """The fraction with a transfer to or from the host, also during operations."""
    n_operations: int


def trace(run: Callable[[], object]) -> Idle:
    """Traces a function that waits for the device, and summarises the trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return summarise(ProfileData.from_file(str(file)))


def summarise(data: Any) -> Idle:
    """Summarises the operations of the first device in a trace.

    Raises:
      ValueError: the trace shows no operation of a device.
    """
    device, lines = _lines(data)
    work, transfers = [], []
    for line in lines:
        for event in line.events:
            if event.duration_ns > 0:
                # On a GPU, a copy within the device is work.
                kind = transfers if event.name.startswith(_TRANSFERS) else work
                kind.append((event.start_ns, event.start_ns + event.duration_ns))
    if not work:
        raise ValueError("The trace shows no operation of a device.")
    busy = _union(work)
    begin, end = busy[0][0], busy[-1][1]
    inside = [(max(a, begin), min(b, end)) for a, b in transfers if a < end and b > begin]
    gaps = [b[0] - a[1] for a, b in zip(busy, busy[1:], strict=False)]
    return Idle(
        device,
        (end - begin) / 1e9,
        sum(gaps) / (end - begin),
        max(gaps, default=0) / 1e9,
        sum(b - a for a, b in _union(inside)) / (end - begin),
        len(work),
    )


def _lines(data: Any) -> tuple[str, list[Any]]:
    """Returns the first device and its lines of operations: a GPU's streams, a TPU's "XLA Ops"."""
    planes = {plane.name: [*plane.lines] for plane in data.planes}
    for name in sorted(name for name in planes if name.startswith("/device:")):
        streams = [line for line in planes[name] if line.name.startswith("Stream")]
        lines = streams or [line for line in planes[name] if line.name == "XLA Ops"]
        if lines:
            return name, lines
    # A CPU is not a device of its own there: the threads that execute its programs.
    names = ("tf_XLAExecute", "tf_XLAPjRtCpuClient")
    lines = [line for line in planes.get("/host:CPU", []) if line.name.startswith(names)]
    return "/host:CPU", lines


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges intervals that touch or overlap, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged

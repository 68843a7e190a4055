"""MemoryReport: reports the memory in use on the devices and in the process."""

import resource
import sys
from pathlib import Path
from typing import ClassVar

import jax

from flaxfit.state import Checkpoint

_GB = 1e9


class MemoryReport:
    """Adds to each checkpoint the memory in use, in GB (1e9 bytes).

    `host_memory_gb` is the resident memory of this process. `device_memory_gb` and
    `device_memory_peak_gb` are the current and the peak memory of the fullest local device, if the
    backend reports them (the CPU does not).

    >>> report = MemoryReport()
    >>> checkpoint = report(Checkpoint(step=1, state=None, metrics={}))
    >>> checkpoint.metrics["host_memory_gb"] > 0
    True
    """

    borrows = True
    adds: ClassVar[dict[str, str | None]] = dict.fromkeys(
        ("host_memory_gb", "device_memory_gb", "device_memory_peak_gb"), "min"
    )
    """The metrics that it adds to a checkpoint."""

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds the memory in use to the metrics."""
        found = {"host_memory_gb": resident_bytes() / _GB}
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        names = {"device_memory_gb": "bytes_in_use", "device_memory_peak_gb": "peak_bytes_in_use"}
        for name, field in names.items():
            values = [each[field] for each in stats if field in each]
            if values:
                found[name] = max(values) / _GB
        return checkpoint.with_metrics(found)


def resident_bytes() -> int:
    """Returns the resident memory of this process, or its peak on systems without /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""MemoryReport, against memory that the tests take."""

import mmap

import jax

from flaxfit.callbacks import MemoryReport


def test_memory_that_is_taken_is_reported(checkpoint_at):
    report = MemoryReport()
    n_bytes = 64 << 20
    before = report(checkpoint_at(1, loss=1.0)).metrics["host_memory_gb"]
    # From the system: an allocator may give again what the process holds already.
    with mmap.mmap(-1, n_bytes) as taken:
        taken.write(b"1" * n_bytes)
        after = report(checkpoint_at(2, loss=1.0)).metrics["host_memory_gb"]
    assert after - before > 0.9 * n_bytes / 1e9
    assert after < 1e3


def test_memory_of_devices_is_that_of_the_fullest(checkpoint_at, monkeypatch):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    stats = [{"bytes_in_use": 2e9, "peak_bytes_in_use": 5e9}, {"bytes_in_use": 3e9}, None]
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(each) for each in stats])
    metrics = MemoryReport()(checkpoint_at(1, loss=1.0)).metrics
    assert metrics["device_memory_gb"] == 3 and metrics["device_memory_peak_gb"] == 5

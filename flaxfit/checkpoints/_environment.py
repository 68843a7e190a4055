"""The versions and machine facts that the bits of a run depend on."""

import contextlib
import functools
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from flaxfit.tree import Json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "flaxfit")
_NO_ARITHMETIC = frozenset({"orbax-checkpoint"})
_COUNT_OF_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+\s*")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that a run depends on."""
    found: dict[str, str] = dict.fromkeys(_PACKAGES, "not installed")
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment() -> dict[str, Json]:
    """Returns facts, besides versions, that the bits of a result may depend on.

    On the CPU, XLA divides the work by the number of its threads, and so the order of sums.
    """
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpu": _cpu(),
        "cpu threads": _threads(),
        "XLA_FLAGS": _COUNT_OF_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).strip(),
        **{
            name: getattr(jax.config, name, None)
            for name in (
                "jax_enable_x64",
                "jax_default_matmul_precision",
                "jax_default_prng_impl",
                "jax_threefry_partitionable",
            )
        },
    }


def changes(record: Mapping[str, Json]) -> list[str]:
    """Lists the differences between the environment in a record and the current one.

    With virtual replicas the bits do not depend on the numbers of devices and processes.
    """
    now = {**versions(), **environment()}
    then = {**record.get("versions", {}), **record.get("environment", {})}
    if now["platform"] == then.get("platform") != "cpu":
        now.pop("cpu")
        now.pop("cpu threads")
    if (record["running"] or {}).get("virtual_replicas"):
        now.pop("devices")
        now.pop("processes")
    return [
        f"{name} {value} -> {now[name]}"
        for name, value in then.items()
        if name in now and name not in _NO_ARITHMETIC and value != now[name]
    ]


def _threads() -> int:
    """Returns the size of XLA's thread pool: NPROC or the usable cores.

    On the CPU it has at least one thread for each simulated device.
    """
    given = os.environ.get("NPROC", "")
    if given.isdigit():
        n = int(given)
    else:
        affinity = getattr(os, "sched_getaffinity", None)
        n = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(n, jax.local_device_count()) if jax.default_backend() == "cpu" else n


@functools.cache
def _cpu() -> str:
    """Returns the name of the processor, whose vector instructions matter."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}".strip()

"""What besides the program decides the bits of a run: the versions and the machine beneath it."""

import functools
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from flaxfit.tree._types import Json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "flaxfit")
_NO_ARITHMETIC = frozenset({"orbax-checkpoint"})
_COUNT_OF_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+\s*")


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions of the packages that a run rests on."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {name: installed(name) for name in _PACKAGES}


def environment() -> dict[str, Any]:
    """The facts besides versions on which the bits of a result may depend.

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
            name: _option(name)
            for name in (
                "jax_enable_x64",
                "jax_default_matmul_precision",
                "jax_default_prng_impl",
                "jax_threefry_partitionable",
            )
        },
    }


def changes(record: Mapping[str, Json]) -> list[str]:
    """What differs between the environment that a record tells of and the present one.

    With virtual replicas the numbers of devices and processes are no difference: the bits do not
    depend on them.

    >>> changes({"versions": {"jax": "0.1"}, "environment": environment() | {"devices": 64}})
    ['jax 0.1 -> ...', 'devices 64 -> ...']
    """
    now = {**versions(), **environment()}
    then = {**record.get("versions", {}), **record.get("environment", {})}
    if now["platform"] == then.get("platform") != "cpu":
        now.pop("cpu")
        now.pop("cpu threads")
    if (record.get("running") or {}).get("virtual_replicas"):
        now.pop("devices")
        now.pop("processes")
    return [
        f"{name} {value} -> {now[name]}"
        for name, value in then.items()
        if name in now and name not in _NO_ARITHMETIC and value != now[name]
    ]


def _option(name: str) -> Any:
    value = getattr(jax.config, name, None)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _threads() -> int:
    """The size of XLA's pool of threads on the CPU.

    It is NPROC, or as many as may be used; but at least one for each simulated device.
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
    """The name of the processor: others have other vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} {platform.processor()}".strip()

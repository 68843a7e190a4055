"""Prints a notice, once per process, if a GPU may not reproduce results bit for bit."""

import os
from collections.abc import Callable

_EXACT = "xla_gpu_deterministic_ops"
_unsaid = [
    "the GPU may not repeat a run bit for bit: set XLA_FLAGS=--xla_gpu_deterministic_ops=true "
    "before JAX is imported, in this run and in those that resume it"
]
# Together they are as exact: no kernels that add in any order, no choice of kernels by timing.
_PARTS = {"xla_gpu_exclude_nondeterministic_ops": "true", "xla_gpu_autotune_level": "0"}


def say_if_inexact(say: Callable[[str], None], platform: str) -> None:
    """Prints which flag makes runs reproducible, if the platform needs one that is not set."""
    if is_inexact(platform, os.environ.get("XLA_FLAGS", "")):
        while _unsaid:
            say(_unsaid.pop())


def is_inexact(platform: str, flags: str) -> bool:
    """Returns whether two runs of the same programs may differ in their bits.

    >>> is_inexact("gpu", ""), is_inexact("gpu", "--xla_gpu_deterministic_ops=true")
    (True, False)
    >>> is_inexact("cpu", "")
    False

    Args:
      platform: the platform of the devices, as JAX names it.
      flags: the value of `XLA_FLAGS`; of a flag that is given twice, the last one counts.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return False
    given = dict(_value(flag) for flag in flags.split())
    is_exact = given.get(_EXACT) == "true"
    return not (is_exact or all(given.get(name) == value for name, value in _PARTS.items()))


def _value(flag: str) -> tuple[str, str]:
    """Splits `--name=value`; booleans become "true" or "false"."""
    name, is_given, value = flag.removeprefix("--").partition("=")
    value = value.lower() if is_given else "true"
    if name != "xla_gpu_autotune_level":
        value = {"1": "true", "0": "false"}.get(value, value)
    return name, value

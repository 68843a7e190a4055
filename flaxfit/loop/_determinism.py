"""Prints a notice, once per process, if a GPU may not reproduce results bit for bit."""

import os
from collections.abc import Callable

_EXACT = "--xla_gpu_deterministic_ops"
_unsaid = [
    "the GPU may not repeat a run bit for bit: set XLA_FLAGS=--xla_gpu_deterministic_ops=true "
    "before JAX is imported, in this run and in those that resume it"
]


def say_if_inexact(say: Callable[[str], None], platform: str) -> None:
    """Prints which flag makes runs reproducible, if the platform needs one that is not set."""
    if is_inexact(platform, os.environ.get("XLA_FLAGS", "")):
        while _unsaid:
            say(_unsaid.pop())


def is_inexact(platform: str, flags: str) -> bool:
    """Whether two runs of the same programs may differ in their bits.

    >>> is_inexact("gpu", ""), is_inexact("gpu", "--xla_gpu_deterministic_ops=true")
    (True, False)
    >>> is_inexact("cpu", "")
    False

    Args:
      platform: the platform of the devices, as JAX names it.
      flags: the value of `XLA_FLAGS`; of a flag that is given twice, the last one counts.
    """
    given = [value for name, _, value in map(_parted, flags.split()) if name == _EXACT]
    return platform in ("gpu", "cuda", "rocm") and given[-1:] not in (["true"], ["1"])


def _parted(flag: str) -> tuple[str, str, str]:
    return (flag.lower() if "=" in flag else f"{flag}=true").partition("=")

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
    given = [flag.partition("=")[2] for flag in flags.lower().split() if flag.startswith(_EXACT)]
    is_exact = given[-1:] in (["true"], ["1"], [""])
    return platform in ("gpu", "cuda", "rocm") and not is_exact

"""Checks of arguments that several rooms take: counts, local paths, functions."""

import operator
import os
import re
import sys
from pathlib import Path
from typing import Any

# "gs://bucket", and "gs:/bucket" as pathlib writes it.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def whole_number(name: str, value: Any, *, least: int = 1, other: str = "") -> int:
    """The value of an argument as an `int`.

    >>> whole_number("n_steps", 3.0)
    Traceback (most recent call last):
    TypeError: n_steps must be a whole number, got 3.0.

    Args:
      name: of the argument, for messages.
      value: what was given.
      least: the smallest number that it may be.
      other: what else the caller takes, for messages.

    Raises:
      TypeError: it is none.
      ValueError: it is less than the least.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        kinds = f"a whole number or {other!r}" if other else "a whole number"
        raise TypeError(f"{name} must be {kinds}, got {value!r:.60}.")
    if number < least:
        raise ValueError(f"{name} must be {least} or more, got {number}.")
    return number


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path with the user's home in the place of "~".

    >>> local_path("gs://bucket/run")
    Traceback (most recent call last):
    ValueError: Cannot use the URL 'gs://bucket/run': a path on this machine is needed. Mount ...

    Raises:
      ValueError: it is a URL.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ValueError(
            f"Cannot use the URL {text!r}: a path on this machine is needed. Mount the store, or "
            "write to a local folder and copy it."
        )
    return Path(path).expanduser()


def check_is_function(owner: str, given: Any, name: str, *, train: bool = True) -> None:
    """Checks that no module was given in place of its `init` or `apply`.

    >>> check_is_function("TrainTask", len, "apply")

    Args:
      owner: what takes the function.
      given: the function.
      name: "init" or "apply".
      train: whether it is the function of training that is needed.

    Raises:
      TypeError: it says how to get the function.
    """
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    if _is_nnx(given):
        advice = (
            f"pass {name} of `init, apply = flaxfit.modules.from_nnx(module, train={train})`, "
            "or give the module to Model(module, ...)"
        )
    elif hasattr(given, name):
        advice = f"pass module.{name}"
    else:
        return
    article = "an" if name[0] in "ai" else "a"
    raise TypeError(f"{owner} needs {article} {name} function, got a module, {kind}: {advice}.")


def _is_nnx(given: Any) -> bool:
    # A user of nnx has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(given, nnx.Module) or (
        isinstance(given, type) and issubclass(given, nnx.Module)
    )

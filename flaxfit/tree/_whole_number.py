"""Arguments that count something: whole numbers, from some least one on."""

import operator
from typing import Any


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

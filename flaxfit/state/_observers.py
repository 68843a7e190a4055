"""Observers: functions that a loop calls while it trains, besides its callbacks."""

import dataclasses
from collections.abc import Callable

Observer = Callable[[int], None]


@dataclasses.dataclass
class Observers:
    """Functions that a loop calls between two dispatches; they must not read the device.

    >>> observers = Observers()
    >>> observers.after_step.append(print)
    >>> len(observers.after_step)
    1
    """

    before_span: list[Observer] = dataclasses.field(default_factory=list)
    """Called with the step before the first step after each checkpoint."""
    before_step: list[Observer] = dataclasses.field(default_factory=list)
    """Called with the step before each dispatch."""
    after_step: list[Observer] = dataclasses.field(default_factory=list)
    """Called with the step after each dispatch, of one step if `steps_per_call="auto"`."""
    after_dispatch: list[Observer] = dataclasses.field(default_factory=list)
    """Like `after_step`, but does not force dispatches of one step."""
    before_validation: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Called without arguments before each validation."""

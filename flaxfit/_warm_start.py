"""WarmStart: an `init` that gives weights read from somewhere, instead of random ones."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A linen-style `init` whose variables go through a function that puts weights in.

    >>> warm = WarmStart(lambda rngs, x: {"params": {"w": 0.0}}, lambda v: {"params": {"w": 2.0}})
    >>> warm({}, 1.0)
    {'params': {'w': 2.0}}
    """

    fresh: Callable[..., Any]
    """The `init` of the model, which says what variables there are."""
    load: Callable[[Any], Any]
    """Puts weights into variables."""
    gives_weights: bool = True
    """Not to be traced: the weights would be constants of a program."""

    def __call__(self, rngs: Any, *inputs: Any, **named: Any) -> Any:
        """The variables with the weights in them."""
        variables = dict(self.fresh(rngs, *inputs, **named))
        for name in ("intermediates", "losses"):
            variables.pop(name, None)
        return self.load(variables)

"""FitCall: what a loop knows of the call of `fit` that drives it."""

import dataclasses
from collections.abc import Callable

from flaxfit.tree import ApplyFn


@dataclasses.dataclass(frozen=True)
class FitCall:
    """A call of `fit`, which counts epochs."""

    first_epoch: int
    """The number of the first epoch, from 0."""
    epoch: Callable[[], int]
    """Returns the number of the present epoch."""
    n_steps: int | None
    """The steps of the call, before it was resumed, too; None: unknown."""
    eval_apply: Callable[[], ApplyFn]
    """Returns the model in evaluation mode."""

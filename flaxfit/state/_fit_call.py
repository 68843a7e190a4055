"""FitCall: the facts that a loop has about the call of `fit` that drives it."""

import dataclasses
from collections.abc import Callable

from flaxfit.tree import ApplyFn


@dataclasses.dataclass(frozen=True)
class FitCall:
    """A call of `fit`, which counts epochs."""

    first_epoch: int
    """The index of the first epoch, from 0."""
    epoch: Callable[[], int]
    """Returns the index of the current epoch."""
    n_steps: int | None
    """The steps of the call, including those before a resume; None: unknown."""
    eval_apply: Callable[[], ApplyFn]
    """Returns the model in evaluation mode."""

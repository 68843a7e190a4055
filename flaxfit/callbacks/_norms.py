"""Norms: watches the sizes of parameters and gradients, group by group."""

from typing import Any

from flaxfit.state._checkpoint import Checkpoint


class Norms:
    """Reports the norms of gradients and parameters by group of parameters.

    They are measured inside the training step, in every step: `metrics["grad_norm/<pattern>"]` and
    `metrics["param_norm/<pattern>"]` are means over the steps since the previous checkpoint.

    >>> Norms("encoder/.*", "head/.*").patterns
    ('encoder/.*', 'head/.*')

    Args:
      *patterns: each matches the whole paths of the parameters of a group.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns

    def attach(self, loop: Any) -> None:
        """Makes the loop measure them.

        Raises:
          ValueError: a pattern matches no parameter.
        """
        loop.norms = tuple(dict.fromkeys((*loop.norms, *self.patterns)))

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint, which holds the norms already."""
        return checkpoint

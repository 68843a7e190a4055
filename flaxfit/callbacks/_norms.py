"""Norms: reports the norms of parameters and gradients by group."""

from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint


class Norms:
    """Reports the norms of gradients and parameters by group of parameters.

    They are measured inside the training step, in every step: `metrics["grad_norm/<pattern>"]` and
    `metrics["param_norm/<pattern>"]` are means over the steps since the previous checkpoint.

    >>> Norms("encoder/.*", "head/.*").patterns
    ('encoder/.*', 'head/.*')

    Args:
      *patterns: patterns of whole parameter paths, one for each group.
    """

    borrows = True

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns

    def attach(self, loop: TrainLoop) -> None:
        """Adds the patterns to the loop's.

        Raises:
          ValueError: a pattern matches no parameter.
        """
        loop.norms = tuple(dict.fromkeys((*loop.norms, *self.patterns)))

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

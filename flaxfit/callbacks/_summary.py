"""SummaryLogger: prints a line about each checkpoint."""

from typing import TextIO

from flaxfit.display import count, metric_line, rate, write
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint


class SummaryLogger:
    """Prints the step, the metrics and the speed of each checkpoint, in aligned lines.

    >>> import sys
    >>> log = SummaryLogger(file=sys.stdout)
    >>> checkpoint = Checkpoint(
    ...     step=90, state=None, metrics={"loss": 0.5}, n_completed_steps=90, elapsed_time=0.02
    ... )
    >>> log(checkpoint).loss
    step     90:  loss 0.5000  4,500 steps/s
    0.5

    Args:
      file: a text stream; None: standard error, in a notebook the cell's output.
    """

    borrows = True

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file
        self._width = 6

    def attach(self, loop: TrainLoop) -> None:
        """Aligns the lines for the last step of a loop."""
        self._width = max(self._width, len(count(loop.n_steps or 0)))

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        parts = [f"step {count(checkpoint.step):>{self._width}}:", metric_line(checkpoint.scalars)]
        if checkpoint.n_completed_steps and checkpoint.elapsed_time:
            parts.append(rate(checkpoint.n_completed_steps / checkpoint.elapsed_time))
        write("  ".join(filter(None, parts)), self._file)
        return checkpoint

"""Tally: counts the sums, steps and examples since the latest checkpoint."""

from collections.abc import Callable

import jax
import numpy as np

from flaxfit.state import Checkpoint
from flaxfit.step import compute, metric_totals
from flaxfit.tree import Array, PyTree, structure_of


class Tally:
    """Counts steps and examples, and holds the totals that each compiled step adds its sums to.

    >>> tally = Tally(lambda tree: tree)
    >>> tally.expect({"n": (np.float32(0),)})
    False
    >>> tally.add({"float32": np.array([[3], [0]], np.float32)}, n_steps=1, n_examples=3)
    >>> tally.n_steps, tally.n_examples
    (1, 3)

    Args:
      share: places a tree on the devices; see `Strategy`.
    """

    def __init__(self, share: Callable[[PyTree], PyTree]):
        self._share = share
        self._structure: object = None
        self.totals: dict[str, Array] = {}
        """The totals that the next step adds its sums to, by dtype."""
        self.n_steps = 0
        self.expect({})
        self.begin()

    def expect(self, sums: PyTree) -> bool:
        """Switches to sums of these shapes and dtypes.

        Returns whether they do not fit the present totals, which `begin` must then drop.
        """
        structure = structure_of(sums)
        if structure != self._structure:
            # Placed once, and never donated: every count begins with the same zeros.
            zeros = self._share(metric_totals.zero_totals(sums))
            self._read, self._zeros = metric_totals.reader(sums), zeros
            # Assigned last, so that the next call tries again after an error.
            self._sums, self._structure = sums, structure
        if not self.n_steps:
            self.totals = self._zeros
        return jax.tree.map(np.shape, self._zeros) != jax.tree.map(np.shape, self.totals)

    def begin(self) -> None:
        """Resets the counts and the totals."""
        self.totals = self._zeros
        self.n_steps = 0
        self.n_examples = 0
        self._known_metrics: dict[str, PyTree] = {}

    def add(self, totals: dict[str, Array], n_steps: int, n_examples: int) -> None:
        """Counts steps, and keeps the totals that their program returned."""
        self.totals = totals
        self.n_steps += n_steps
        self.n_examples += n_examples

    def metrics(self, of: PyTree, step: int = 0) -> dict[str, PyTree]:
        """Computes the metrics over all counted steps, see `compute`; waits for the devices.

        Args:
          of: the metrics by name.
          step: the number of the latest step.
        """
        if not self.n_steps:
            return {}
        if not self._sums:
            return self._known_metrics  # Restored: the structure of sums is unknown until a batch.
        where = f" in step {step:,}"
        if self.n_steps > 1:
            where = f" in steps {step - self.n_steps + 1:,} to {step:,}"
        return compute(self._read(self.totals), of, where)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continues the counts of a checkpoint that has `sums`."""
        self.n_steps, self.n_examples = checkpoint.n_completed_steps, checkpoint.n_examples
        self.totals = dict(checkpoint.sums or {})
        self._known_metrics = dict(checkpoint.metrics)

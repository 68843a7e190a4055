"""Tally: the sums, steps and examples since the latest checkpoint."""

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
      share: puts a tree on the devices, see `Strategy`.
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
        """Expects sums of these shapes and dtypes from now on.

        Returns whether the present count does not fit them, so that `begin` must drop it.
        """
        structure = structure_of(sums)
        if structure != self._structure:
            # Placed once, and never donated: every count begins with the same zeros.
            zeros = self._share(metric_totals.zero_totals(sums))
            self._read, self._zeros = metric_totals.reader(sums), zeros
            # Last: after an error the next call tries again.
            self._sums, self._structure = sums, structure
        if not self.n_steps:
            self.totals = self._zeros
        return jax.tree.map(np.shape, self._zeros) != jax.tree.map(np.shape, self.totals)

    def begin(self) -> None:
        """Starts a new count."""
        self.totals = self._zeros
        self.n_steps = 0
        self.n_examples = 0
        self._known_metrics: dict[str, PyTree] = {}

    def add(self, totals: dict[str, Array], n_steps: int, n_examples: int) -> None:
        """Counts steps, and keeps the totals that they returned."""
        self.totals = totals
        self.n_steps += n_steps
        self.n_examples += n_examples

    def metrics(self, of: PyTree, step: int = 0) -> dict[str, PyTree]:
        """The metrics over all counted steps, see `compute`; waits for the devices.

        Args:
          of: the metrics by name.
          step: the latest of the steps.
        """
        if not self.n_steps:
            return {}
        if not self._sums:
            return self._known_metrics  # Restored ones: no batch has shown the sums yet.
        where = f" in step {step:,}"
        if self.n_steps > 1:
            where = f" in steps {step - self.n_steps + 1:,} to {step:,}"
        return compute(self._read(self.totals), of, where)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continues the count of a checkpoint with `sums`."""
        self.n_steps, self.n_examples = checkpoint.n_completed_steps, checkpoint.n_examples
        self.totals = dict(checkpoint.sums or {})
        self._known_metrics = dict(checkpoint.metrics)

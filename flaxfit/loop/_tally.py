"""Tally: the sums, steps and examples since the latest checkpoint."""

from collections.abc import Callable

import jax
import numpy as np

from flaxfit.step import _metric_totals
from flaxfit.step._metric_totals import compute
from flaxfit.step._validate import structure_of
from flaxfit.tree._types import Array, Json, PyTree


class Tally:
    """Counts steps and examples, and holds the totals that each compiled step adds its sums to.

    >>> tally = Tally(lambda tree: tree)
    >>> tally.expect({"n": (np.float32(0),)})
    False
    >>> tally.add({"float32": np.array([[3], [0]], np.float32)}, n_steps=1, n_examples=3)
    >>> tally.n_steps, tally.n_examples, tally.as_json({})["totals"]
    (1, 3, [{'float32': [3.0]}, {'float32': [0.0]}])

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
            zeros = self._share(_metric_totals.zero_totals(sums))
            self._read, self._zeros = _metric_totals.reader(sums), zeros
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

    def as_json(self, metrics: dict[str, PyTree]) -> dict[str, Json]:
        """The count as JSON, with the present metrics, for `resume`."""
        host = {dtype: np.asarray(pair).tolist() for dtype, pair in self.totals.items()}
        totals = [{dtype: pair[i] for dtype, pair in host.items()} for i in (0, 1)]
        return {"n_steps": self.n_steps, "totals": totals, "metrics": metrics}

    def resume(self, count: dict[str, Json]) -> None:
        """Continues the count that `as_json` returned."""
        self.n_steps = count["n_steps"]
        sums, cut_off = count["totals"]
        self.totals = {d: np.asarray([sums[d], cut_off[d]], d) for d in sums}
        self._known_metrics = {
            name: np.asarray(value) if isinstance(value, list) else value
            for name, value in count["metrics"].items()
        }

"""CompiledSteps: the compiled updates of a run, by the signatures of their batches."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from flaxfit.loop._consistency import Consistency
from flaxfit.loop._padding import Portion
from flaxfit.step._error_messages import calls_explained
from flaxfit.tree._types import Function


class CompiledSteps:
    """Compiles updates, keeps them by key, and reports what it compiled and how long that took.

    Args:
      consistency: of the processes of the run.
      say: prints a notice for the user.
    """

    def __init__(self, consistency: Consistency, say: Callable[[str], None]):
        self.compiled: dict[Hashable, Function] = {}
        self.seconds = 0.0
        """How long compilation took."""
        self.is_compiling = False
        self._consistency, self._say = consistency, say
        self._first: Any = None
        """Shapes and dtypes of the first batch that was compiled for."""

    def forget(self) -> None:
        """Forgets the compiled programs."""
        self.compiled = {}

    def compile(
        self,
        key: Hashable,
        build: Callable[[], Function],
        portion: Portion,
        *,
        step: int,
    ) -> Function:
        """Compiles an update, and keeps it by its key.

        Args:
          key: the signature of its batches.
          build: compiles it.
          portion: the first batch that it gets.
          step: the number of that step.
        """
        self._say("compiling…")
        began, self.is_compiling = time.perf_counter(), True
        try:
            batch = portion.batch
            self._consistency.program(step, batch, is_weighted=portion.is_weighted)
            with calls_explained(batch.inputs, batch.targets):
                update = build()
        finally:
            self.is_compiling = False
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._announce(portion, seconds)
        self.compiled[key] = update
        return update

    def _announce(self, portion: Portion, seconds: float) -> None:
        """Reports what was compiled, and what has changed since an earlier compilation."""
        leaves = jax.tree.leaves(portion.batch[:2])
        shapes = [leaf.shape for leaf in leaves]
        if portion.data:  # The batch is gathered from it.
            leaves = jax.tree.leaves(portion.data[0][:2])
            shapes = [shapes[0] + leaf.shape[1:] for leaf in leaves]
        dtypes = [str(leaf.dtype) for leaf in leaves]
        first = self._first = self._first or (shapes, dtypes)
        now, before = ", ".join(map(str, shapes)), ", ".join(map(str, first[0]))
        if now == before and dtypes != first[1]:
            now, before = f"{now} of {', '.join(dtypes)}", ", ".join(first[1])
        again = "again " * bool(self.compiled)
        after = f" (the first were of {before})" if again and now != before else ""
        self._say(
            f"compiled the training step {again}in {seconds:.1f}s, for batches of {now} on "
            f"{len(portion.strategy.devices)} device(s){after}"
        )

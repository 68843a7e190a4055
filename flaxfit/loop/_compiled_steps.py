"""Programs: the compiled updates of a run, by what they were compiled for."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from flaxfit.loop._consistency import Agreement
from flaxfit.loop._padding import Portion
from flaxfit.step._error_messages import calls_explained


class Programs:
    """Compiles updates, keeps them by their keys, tells the user so, and knows how long it took.

    Args:
      agreement: of the processes.
      say: is told what was compiled.
    """

    def __init__(self, agreement: Agreement, say: Callable[[str], None]):
        self.compiled: dict[Hashable, Callable[..., Any]] = {}
        self.seconds = 0.0
        """What compiling took."""
        self.is_compiling = False
        self._agreement, self._say = agreement, say
        self._first: Any = None
        """Shapes and dtypes that the first of all was compiled for."""

    def forget(self) -> None:
        """Forgets the compiled programs."""
        self.compiled = {}

    def compile(
        self,
        key: Hashable,
        build: Callable[[], Callable[..., Any]],
        portion: Portion,
        *,
        step: int,
    ) -> Callable[..., Any]:
        """Compiles an update, and notes it by its key.

        Args:
          key: what it is looked up by.
          build: compiles it.
          portion: a batch that it is to step.
          step: the number of that step.
        """
        self._say("compiling…")
        began, self.is_compiling = time.perf_counter(), True
        try:
            batch = portion.batch
            self._agreement.program(step, batch, is_weighted=portion.is_weighted)
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
        """Says what was compiled, and what has changed where it was compiled before."""
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

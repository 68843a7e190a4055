"""Programs: caches compiled programs and validation results by batch signature."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from flaxfit.display import duration, plural
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._padding import PreparedBatch
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._state_layout import StateLayout
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.step import calls_explained, make_update
from flaxfit.task import TrainTask
from flaxfit.tree import Function, PyTree


class Programs:
    """Caches compiled programs and the results of traces and trials; reports compilations.

    Training, evaluation and prediction have separate instances. `say` prints a notice.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.compiled: dict[Hashable, Function] = {}
        """Programs by batch signature and other static arguments, such as the number of steps."""
        self.found: dict[Hashable, Any] = {}
        """Results of `inspect`, `examine` and `Predictor.check`, by keys of different forms."""
        self.watch = Stopwatch()
        """The time of compilation."""
        self._say = say
        self._first: tuple[list[tuple[int, ...]], list[str]] | None = None
        """Shapes and dtypes of the first compilation."""

    def forget(self) -> None:
        """Clears both caches."""
        self.compiled.clear()
        self.found.clear()

    @contextlib.contextmanager
    def compiling(
        self, consistency: Consistency, prepared: PreparedBatch, step: int
    ) -> Iterator[None]:
        """Times and announces the compilation in a `with` block, for the first batch of a program.

        The processes compare inputs before it and lowered programs after it, since a collective
        between different programs would hang.
        """
        batch, before = prepared.batch, self.watch.seconds
        self._say("compiling…")
        with self.watch, calls_explained(batch.inputs, batch.targets):
            consistency.program(step, batch, is_weighted=prepared.is_weighted)
            yield
            consistency.compiled(step, prepared.strategy.text)
        self._announce(prepared, self.watch.seconds - before)

    def _announce(self, prepared: PreparedBatch, seconds: float) -> None:
        """Reports a compilation, and how shapes or dtypes differ from the first one."""
        leaves = jax.tree.leaves(prepared.batch[:2])
        shapes = [leaf.shape for leaf in leaves]
        if prepared.data:  # The batch holds indices of rows of the data.
            leaves = jax.tree.leaves(prepared.data[0][:2])
            shapes = [shapes[0] + leaf.shape[1:] for leaf in leaves]
        dtypes = [str(leaf.dtype) for leaf in leaves]
        first = self._first = self._first or (shapes, dtypes)
        done = f"compiled the training step in {duration(seconds)}"
        if not self.compiled:
            self._say(done)
            return
        done = done.replace(" in ", " again in ")
        now, before = ", ".join(map(str, shapes)), ", ".join(map(str, first[0]))
        if now == before and dtypes != first[1]:
            now, before = f"{now} of {', '.join(dtypes)}", ", ".join(first[1])
        if now == before:
            self._say(done)
            return
        where = plural(len(prepared.strategy.devices), "device")
        self._say(f"{done}, for batches of {now} on {where} (the first were of {before})")


def build_update(
    task: TrainTask,
    layout: StateLayout,
    companions: PlacedCompanions,
    prepared: PreparedBatch,
    arguments: tuple[PyTree, ...],
    n_steps: int,
    **options: bool,
) -> Function:
    """Compiles `(leaves, totals, *companions, *data, arrays) -> (leaves, totals, grads)`.

    `leaves` is the flat state, which is donated; `arrays` is the flat batch. The options are those
    of `make_update`.
    """
    # The closure must not refer to `prepared`: the cached program would keep its data alive.
    strategy, skip_empty = prepared.strategy, prepared.is_weighted
    structure = jax.tree.structure(prepared.batch)

    def update_leaves(leaves: PyTree, totals: PyTree, *others: PyTree) -> tuple[PyTree, ...]:
        bound, (*data, arrays) = companions.bound(task, others)
        update = make_update(
            bound,
            axis_name=strategy.axis_name,
            virtual_replicas=strategy.virtual_replicas,
            n_steps=n_steps,
            skip_empty=skip_empty,
            **options,
        )
        state = layout.unflatten(leaves)
        batch = structure.unflatten(arrays)
        results = strategy.constrain(update(state, totals, *data, batch), state)
        return layout.flatten(results[0]), *results[1:]

    # Not the totals: every count starts from the same zeros, and `InFlight` waits for old totals.
    return strategy.compile(update_leaves, arguments, n_donated=1)

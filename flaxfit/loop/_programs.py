"""Programs: what was compiled and found out for batches, by their signatures."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from flaxfit.display import duration, plural
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._padding import Portion
from flaxfit.loop._placed_companions import PlacedCompanions
from flaxfit.loop._state_layout import StateLayout
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.step import calls_explained, make_update
from flaxfit.task import TrainTask
from flaxfit.tree import Function, PyTree


class Programs:
    """Keeps compiled programs, and what tracing and trials found out about states and batches.

    Training, evaluation and prediction have one each. It reports what was compiled and how long
    that took.

    Args:
      say: prints a notice for the user.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.compiled: dict[Hashable, Function] = {}
        """Programs by what determines them: the signature of a batch, and what may vary beside."""
        self.found: dict[Hashable, Any] = {}
        """The results of `inspect`, `examine` and their like, each by a key of its own kind."""
        self.watch = Stopwatch()
        """The time of compilation."""
        self._say = say
        self._first: tuple[list[tuple[int, ...]], list[str]] | None = None
        """Shapes and dtypes of the first batch that was compiled for."""

    def forget(self) -> None:
        """Clears the compiled programs, and what was found out."""
        self.compiled.clear()
        self.found.clear()

    @contextlib.contextmanager
    def compiling(self, consistency: Consistency, portion: Portion, step: int) -> Iterator[None]:
        """Times and announces the compilation within its block.

        Args:
          consistency: compares the processes of the run.
          portion: the first of the batches.
          step: the number of their first step.
        """
        batch, before = portion.batch, self.watch.seconds
        self._say("compiling…")
        with self.watch, calls_explained(batch.inputs, batch.targets):
            consistency.program(step, batch, is_weighted=portion.is_weighted)
            yield
            consistency.compiled(step, getattr(portion.strategy, "text", ""))
        self._announce(portion, self.watch.seconds - before)

    def _announce(self, portion: Portion, seconds: float) -> None:
        """Reports what was compiled, and what has changed since an earlier compilation."""
        leaves = jax.tree.leaves(portion.batch[:2])
        shapes = [leaf.shape for leaf in leaves]
        if portion.data:  # The batch is gathered from it.
            leaves = jax.tree.leaves(portion.data[0][:2])
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
        where = plural(len(portion.strategy.devices), "device")
        self._say(f"{done}, for batches of {now} on {where} (the first were of {before})")


def build_update(
    task: TrainTask,
    layout: StateLayout,
    companions: PlacedCompanions,
    portion: Portion,
    arguments: tuple[PyTree, ...],
    n_steps: int,
    **options: bool,
) -> Function:
    """Compiles `(leaves, totals, *data, arrays) -> (leaves, totals, grads)` for such batches.

    State and batch cross the call as flat leaves; those of the state are donated. Companions come
    before the data. The options are those of `make_update`.
    """
    # Not the portion: the compiled update would keep its data.
    strategy, skip_empty = portion.strategy, portion.is_weighted
    structure = jax.tree.structure(portion.batch)

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

    return strategy.compile(update_leaves, arguments, n_donated=1)

"""PlacedCompanions: the variables of companions, placed on the devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flaxfit.loop._state_layout import StateLayout
from flaxfit.state import InferenceState
from flaxfit.step import Task, states_of, with_states
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask, TrainTask
from flaxfit.tree import ArrayLike, PyTree, Variables, flat, path_of


class PlacedCompanions:
    """Holds the variables of a task's companions; places them on first use.

    They are arguments of compiled programs, never donated: new values need no compilation.
    """

    def __init__(self, task: TrainTask | EvalTask, strategy: Strategy):
        self._strategy = strategy
        self._keeps = getattr(task, "save_companions", False)
        self._sources = {n: each.source for n, each in task.companions.items() if each.source}
        self._seen = {name: source.seen for name, source in self._sources.items()}
        self._hold(states_of(task))

    def _hold(self, states: dict[str, InferenceState]) -> None:
        self.states = states = jax.tree.map(_owned, states)
        """The variables by name, as states."""
        self.saved = self.variables if self._keeps else None
        """The variables by name, if checkpoints hold them; else None."""
        self._layout = StateLayout(states)
        self._placed: tuple[list[Any], ...] | None = None if states else ()

    @property
    def arguments(self) -> tuple[list[Any], ...]:
        """The flat variables as one argument of compiled programs; `()` without companions."""
        if self._placed is None:
            self.states = {name: self._share(name, s) for name, s in self.states.items()}
            self._placed = (self._layout.flatten(self.states),)
        return self._placed

    def _share(self, name: str, state: InferenceState) -> InferenceState:
        try:
            return self._strategy.share(state)
        except ValueError as error:
            raise ValueError(f"Cannot place the companion {name!r}. {error}") from error

    def moved(self, strategy: Strategy) -> tuple[list[Any], ...]:
        """Returns the argument for another strategy; copies only arrays that move."""
        layout = self._layout
        return tuple(layout.flatten(strategy.share(layout.unflatten(a))) for a in self.arguments)

    def bound(self, task: Task, arguments: Sequence[PyTree]) -> tuple[Task, Sequence[PyTree]]:
        """Splits the variables from a program's arguments, and binds them to the task."""
        if not self.states:
            return task, arguments
        leaves, *others = arguments
        return with_states(task, self._layout.unflatten(leaves)), others

    @property
    def variables(self) -> dict[str, Variables]:
        """The variables by name."""
        return {name: state.variables for name, state in self.states.items()}

    def restore(self, saved: Mapping[str, Variables] | None) -> None:
        """Continues with the variables of a checkpoint, if it holds any.

        Raises:
          ValueError: they differ in names, shapes or dtypes from those of the task.
        """
        if self.states and saved and saved is not self.saved:
            self._replace(saved, "the checkpoint", "Give the task the companions that were saved.")
            self._seen = {name: source.values() for name, source in self._sources.items()}

    def refresh(self) -> None:
        """Rereads companions that are NNX modules, such as a target network, if they changed.

        Raises:
          ValueError: a variable has another shape or dtype than before.
        """
        for name, source in self._sources.items():
            values, seen = source.values(), self._seen[name]
            if any(now is not before for now, before in zip(values, seen, strict=True)):
                present = {**self.variables, name: source.read()}
                self._replace(
                    present, "the module now", "Build a new task with the changed module."
                )
                self._seen[name] = values

    def _replace(self, variables: Mapping[str, Variables], source: str, advice: str) -> None:
        own = self.variables
        here, there = ({p: _kind(x) for p, x in flat(tree).items()} for tree in (own, variables))
        if here != there:
            _refuse(here, there, source, advice)
        arrays = flat(variables)
        same = jax.tree_util.tree_map_with_path(lambda path, _: arrays[path_of(path)], own)
        states = {}
        for name, state in self.states.items():
            params, others = same[name]["params"], {**same[name]}
            del others["params"]
            states[name] = state.replace(params=params, model_state=others)
        self._hold(states)


def _owned(x: ArrayLike) -> ArrayLike:
    """Copies a NumPy array, whose owner may write to it."""
    is_array = isinstance(x, jax.Array)
    return x if is_array else np.array(x, jax.dtypes.canonicalize_dtype(x.dtype))


def _kind(x: ArrayLike) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _refuse(here: Mapping[str, str], there: Mapping[str, str], source: str, advice: str) -> None:
    paths = [path for path in {**here, **there} if here.get(path) != there.get(path)]
    lines = "".join(
        f"\n  companion {name!r}, {path}: {here.get(full, '-')} in the task, "
        f"{there.get(full, '-')} in {source}"
        for full in paths[:20]
        for name, _, path in [full.partition("/")]
    )
    raise ValueError(
        f"The companions do not match the task; {len(paths)} arrays differ:{lines}\n{advice}"
    )

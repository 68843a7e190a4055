"""Inspection of a first batch: what a step counts, whether batches may be padded, and hints."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from flaxfit.data._batch import Batch
from flaxfit.loop._division import examine
from flaxfit.loop._padding import Portion
from flaxfit.state import TrainState
from flaxfit.step import calls_explained, inspect, inspect_step, make_step, more_sums, trace
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask, for_all_outputs
from flaxfit.tree import Sums, shapes_of


class Inspection:
    """Validates first batches, and remembers what it has said.

    Args:
      task: the task to train.
      strategy: the strategy of the loop.
      found: what was found out before; see `Programs`.
      say: prints a hint for the user.
    """

    def __init__(
        self,
        task: TrainTask,
        strategy: Strategy,
        found: dict[Hashable, Any],
        say: Callable[[str], None],
    ):
        self._strategy, self._bind, self._say = strategy, strategy.bind, say
        self._n_devices = len(strategy.devices)
        self._found = found
        self._said: set[str] = set()
        # XLA has its fast convolutions of a CPU outside of loops only. Virtual replicas and
        # microbatches are loops themselves.
        is_on_cpu = strategy.devices[0].platform == "cpu"
        is_flat = strategy.virtual_replicas is None and task.accumulate == 1
        self._may_be_slow = is_on_cpu and is_flat and not strategy.runs_eagerly
        self.is_slow_in_loops = False
        """Whether several steps in one program would be much slower than one by one."""
        self.work = math.inf
        """An estimate of the arithmetic operations of a step, on all devices together."""
        self.loss_has_weights = False
        """Whether the loss returns weights with its values."""

    def __call__(
        self,
        task: TrainTask,
        state: TrainState,
        batch: Batch,
        data: Batch | None,
        *,
        grad_norm: bool,
        is_resumed: bool,
        may_pad: bool,
    ) -> tuple[Sums, str]:
        """Validates a first batch, or all data if it is available; it may have to be padded.

        Returns the shapes and dtypes of the sums of a step, and why padding is unsafe, or "".
        """
        if task.step is not None:
            traced = inspect_step(task, make_step(task), state, batch, data, self._bind)
            sums, why_not = traced.shapes, "the task has a custom step"
            self.work = traced.n_operations
        else:
            traced = inspect(
                task, state, batch, data, self._bind, self._found, is_resumed=is_resumed
            )
            result = traced.shapes
            self.loss_has_weights = result.weights is not None
            self._say_not_added(result.not_added)
            for hint in () if is_resumed else traced.hints:
                self._say_once(hint, f"warning: {hint}")
            sums = result.sums | more_sums(task, result, grad_norm=grad_norm)
            given = for_all_outputs(task, result.outputs, batch)
            why_not = examine(
                given, self._strategy, state, batch, result, self._found, may_pad=may_pad
            )
            # The gradient takes twice as much again, and an optimizer some for each parameter.
            n_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
            self.work = 3 * traced.n_operations + 20 * n_params * self._n_devices
        self.is_slow_in_loops = self._may_be_slow and traced.has_convolutions
        return sums, why_not

    def inspect_loops(self, task: TrainTask, state: TrainState, portion: Portion) -> None:
        """Finds out whether steps of the user's own on such a batch are slow in a loop."""
        if not self._may_be_slow:
            return
        if portion.signature not in self._found:
            step, batch = self._bind(make_step(task)), portion.batch
            with calls_explained(batch.inputs, batch.targets):
                traced = trace(step, shapes_of(state), shapes_of(batch))
            self._found[portion.signature] = traced.has_convolutions
        self.is_slow_in_loops = self._found[portion.signature]

    def say_slow(self) -> None:
        """Says once that several steps are not taken in one program."""
        self._say_once(
            "slow",
            "steps_per_call has no effect: the model has convolutions, which XLA runs many times "
            "slower within a loop on a CPU",
        )

    def _say_not_added(self, names: Iterable[str]) -> None:
        """Says once what the model returns that may be meant as a term of the loss."""
        new = [name for name in names if f"collection {name}" not in self._said]
        self._said.update(f"collection {name}" for name in new)
        if new:
            self._say(
                f"the model leaves values in {', '.join(new)}, which are not added to the loss. "
                f"If they are terms of it: Model(..., losses={new}) or from_nnx(..., "
                f"losses={new}), or sow them in 'losses'"
            )

    def _say_once(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._say(text)
        self._said.add(topic)

"""Inspection: validates a first batch, decides whether batches may be padded, prints hints."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from flaxfit.data._batch import Batch
from flaxfit.loop._division import examine
from flaxfit.loop._padding import PreparedBatch
from flaxfit.state import TrainState
from flaxfit.step import calls_explained, inspect, inspect_step, make_step, more_sums, trace
from flaxfit.strategies import Strategy
from flaxfit.task import TrainTask, for_all_outputs
from flaxfit.tree import Sums, shapes_of


class Inspection:
    """Validates first batches, and prints each hint once.

    Args:
      task: the task to train.
      strategy: the strategy of the loop.
      found: a cache of earlier results; see `Programs`.
      say: prints a hint.
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
        # On a CPU, XLA uses its fast convolutions only outside of loops. With virtual replicas or
        # microbatches, the step is a loop already, and several steps in one make no difference.
        is_on_cpu = strategy.devices[0].platform == "cpu"
        is_flat = strategy.virtual_replicas is None and task.accumulate == 1
        self._may_be_slow = is_on_cpu and is_flat and not strategy.runs_eagerly
        self.is_slow_in_loops = False
        """Whether several steps in one program would be much slower than single steps."""
        self.work = math.inf
        """The estimated arithmetic operations of a step, over all devices."""
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
        """Validates a first batch, and all data if available.

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
            # The backward pass costs about twice the forward pass; an optimizer, some operations
            # per parameter.
            n_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
            self.work = 3 * traced.n_operations + 20 * n_params * self._n_devices
        self.is_slow_in_loops = self._may_be_slow and traced.has_convolutions
        return sums, why_not

    def inspect_loops(self, task: TrainTask, state: TrainState, prepared: PreparedBatch) -> None:
        """Determines whether custom steps on batches of this signature are slow in a loop."""
        if not self._may_be_slow:
            return
        if prepared.signature not in self._found:
            step, batch = self._bind(make_step(task)), prepared.batch
            with calls_explained(batch.inputs, batch.targets):
                traced = trace(step, shapes_of(state), shapes_of(batch))
            self._found[prepared.signature] = traced.has_convolutions
        self.is_slow_in_loops = self._found[prepared.signature]

    def say_slow(self) -> None:
        """Prints, once, that steps are not grouped into one program."""
        self._say_once(
            "slow",
            "steps_per_call has no effect: the model has convolutions, which XLA runs many times "
            "slower within a loop on a CPU",
        )

    def _say_not_added(self, names: Iterable[str]) -> None:
        """Prints, once per collection, that its values may be meant as terms of the loss."""
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

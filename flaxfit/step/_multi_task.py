"""MultiTask: several training tasks that take turns on one state."""

from collections.abc import Hashable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flaxfit.data import as_stream
from flaxfit.data._batch import Batch, normalize
from flaxfit.data._sample_weights import OTHER_OUTPUTS, of_output
from flaxfit.data._stream import is_shared
from flaxfit.state import TrainState
from flaxfit.step._compare import ForwardPass, weights_of
from flaxfit.step._train_step import make_train_step, more_sums
from flaxfit.step._validate import Traced, inspect
from flaxfit.task import TrainTask
from flaxfit.tree import ArrayLike, Json, PyTree, Sums, shapes_of


def MultiTask(
    tasks: Mapping[str, TrainTask], *, weights: Mapping[str, float] | None = None, seed: int = 0
) -> TrainTask:
    """Combines tasks that take turns on one state: each step trains a single task.

    A task's `apply` uses the parameters that it needs. Each task has its own data, loss and
    metrics, reported as "<task>/<metric>" (`nan` for a task without a step since the last
    checkpoint); "loss" is the mean over the examples of all tasks. Checkpoints hold the position of
    each task in its data. The run ends when the data of any task ends. Parameters that a task does
    not use have zero gradients, but an optimizer with moments still changes them.

    >>> import optax
    >>> x, w = np.ones((8, 1), np.float32), np.zeros(1, np.float32)
    >>> sgd, apply = optax.sgd(0.1), lambda v, x, **_: (v["params"] * x, {})
    >>> up, down = (TrainTask(apply, sgd, "mse", (x, sign * x)) for sign in (1, -1))
    >>> from flaxfit import TrainLoop
    >>> loop = TrainLoop(lambda r, x: {"params": w}, MultiTask({"up": up, "down": down}), 0)
    >>> loop.next_step().metrics["up/loss"], round(loop.next_step().metrics["down/loss"], 2)
    (1.0, 1.44)

    Args:
      tasks: the tasks by name; they share one optimizer object.
      weights: the relative frequency of tasks by name, to draw turns at random. None: round robin.
      seed: the seed of the draws.

    Raises:
      ValueError: the tasks have different optimizers, or `weights` names an unknown task.
    """
    tasks = dict(tasks)
    _check(tasks, weights)
    stream = _Turns(tasks, None if weights is None else dict(weights), seed)
    known: dict[str, dict[Hashable, Traced]] = {name: {} for name in tasks}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Sums]]:
        (turn,) = batch.targets
        sums: dict[str, Sums] = {}
        results = {
            name: inspect(task, shapes_of(state), stream.samples[name], known=known[name]).shapes
            for name, task in tasks.items()
        }
        # Every step returns the sums of all tasks, zeros for the others: totals keep one structure.
        for name, task in tasks.items():
            shapes = _sums_of(task, results[name], stream.samples[name])
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            sums |= {f"{name}/{metric}": zero for metric, zero in zeros.items()}
        weights = batch.weights if turn.weights is None else turn.weights
        batch = batch._replace(targets=turn.targets, weights=weights)
        has_weights = results[turn.name].weights is not None
        train = make_train_step(tasks[turn.name], loss_has_weights=has_weights)
        state, found = train(state, batch)
        found["loss"] = _pair(found["loss"], batch)
        sums |= {f"{turn.name}/{metric}": value for metric, value in found.items()}
        return state, {"loss": found["loss"], **sums}

    return TrainTask(
        step=step,
        optimizer=next(iter(tasks.values())).optimizer,
        data=stream,
        metrics={
            f"{name}/{metric}": each
            for name, task in tasks.items()
            for metric, each in task.metrics.items()
        },
        rngs=tuple(dict.fromkeys(name for task in tasks.values() for name in task.rngs)),
    )


@struct.dataclass
class _Turn:
    """The targets of a batch with the task's name, static: programs are compiled by task."""

    name: str = struct.field(pytree_node=False)
    targets: tuple[PyTree, ...]
    weights: Mapping[str, ArrayLike] | None
    """Weights by output, which custom steps do not support."""


class _Turns:
    """Yields batches of several streams in turns.

    The first batch of every stream is fetched at once, as a sample to validate.
    """

    def __init__(self, tasks: dict[str, TrainTask], weights: dict[str, float] | None, seed: int):
        self._tasks, self._weights, self._seed = tasks, weights, seed
        self._streams: dict[str, Any] = {
            name: as_stream(task.roles.of_data_set(task.data)) for name, task in tasks.items()
        }
        self.shared = any(map(is_shared, self._streams.values()))
        self._names = list(tasks)
        self._n = 0
        self.samples: dict[str, Batch] = {}
        self._held: dict[str, tuple[Batch, Json]] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if not self.samples:
            for name in self._names:
                position = _position(self._streams[name])
                batch = self._next(name)
                self.samples[name], self._held[name] = batch, (batch, position)
        name = self._whose_turn()
        batch = self._held.pop(name)[0] if name in self._held else self._next(name)
        self._n += 1
        if isinstance(batch.weights, Mapping):
            return Batch(batch.inputs, (_Turn(name, batch.targets, batch.weights),))
        return batch._replace(targets=(_Turn(name, batch.targets, None),))

    def _next(self, name: str) -> Batch:
        task = self._tasks[name]
        return normalize(task.roles(next(self._streams[name])), is_whole=task.keeps_whole)

    def get_state(self) -> Json:
        """Returns the number of the turn, and the position in each stream."""
        positions = {name: _position(stream) for name, stream in self._streams.items()}
        positions |= {name: position for name, (_, position) in self._held.items()}
        return {"turn": self._n, "weights": self._weights, "seed": self._seed, "data": positions}

    def set_state(self, state: Json) -> None:
        """Moves to a position that `get_state` returned."""
        own = (self._weights, self._seed, set(self._names))
        if (state["weights"], state["seed"], set(state["data"])) != own:
            raise ValueError(
                "Cannot resume with other tasks, weights or another seed than the position was "
                f"saved with: {list(state['data'])}, {state['weights']}, {state['seed']}; here "
                f"{self._names}, {self._weights}, {self._seed}."
            )
        for name, position in state["data"].items():
            if position is not None:
                self._streams[name].set_state(position)
        self._n = state["turn"]
        self.samples, self._held = {}, {}

    def _whose_turn(self) -> str:
        if self._weights is None:
            return self._names[self._n % len(self._names)]
        weights = np.array([self._weights.get(name, 1.0) for name in self._names])
        # Seeded by the turn, so that a resumed run draws the same turns.
        rng = np.random.default_rng((self._seed, self._n))
        return self._names[rng.choice(len(weights), p=weights / weights.sum())]


def _sums_of(task: TrainTask, result: ForwardPass, sample: Batch) -> dict[str, Sums]:
    """Returns the shapes of the sums of a task's step."""
    sums = result.sums | more_sums(task, result, grad_norm=True)
    return sums | {"loss": jax.eval_shape(_pair, sums["loss"], sample)}


def _pair(loss: Sums, batch: Batch) -> Sums:
    """Returns `(sum, weight)` of a loss; a loss by output counts by its mean per example."""
    if not isinstance(loss, Mapping):
        return loss
    means = (total / jnp.where(weight > 0, weight, 1) for total, weight in loss.values())
    n = jnp.sum(of_output(weights_of(batch), OTHER_OUTPUTS))
    return n * sum(means), n


def _position(stream: Any) -> Json:
    return stream.get_state() if hasattr(stream, "get_state") else None


def _check(tasks: dict[str, TrainTask], weights: Mapping[str, float] | None) -> None:
    if not tasks:
        raise ValueError("MultiTask needs at least one task, by name: {'a': TrainTask(...), ...}.")
    optimizer = next(iter(tasks.values())).optimizer
    wrapped = [name for name, task in tasks.items() if hasattr(task.optimizer, "user")]
    if wrapped or any(task.optimizer is not optimizer for task in tasks.values()):
        if wrapped:
            what = f"Options of the task {wrapped[0]!r} change its optimizer"
        else:
            what = "The tasks have different optimizers"
        raise ValueError(
            f"{what}, but all tasks share one state: give them the same optimizer, without freeze, "
            "clip_norm, ema, skip_above or float16 (optax.chain and MultiOptimizer clip and freeze "
            "for all)."
        )
    owns = [name for name, task in tasks.items() if task.step is not None]
    if owns:
        raise ValueError(
            f"The tasks {', '.join(map(repr, owns))} have custom steps, which MultiTask does not "
            "support."
        )
    if given := [name for name, task in tasks.items() if task.companions]:
        raise ValueError(
            f"The tasks {', '.join(map(repr, given))} have companions, which MultiTask would "
            "compile as constants of the step: train such a task in its own loop."
        )
    if unknown := [name for name in weights or () if name not in tasks]:
        raise ValueError(
            f"weights contains {', '.join(map(repr, unknown))}, but the tasks are "
            f"{', '.join(map(repr, tasks))}."
        )
    if wrong := [name for name, weight in (weights or {}).items() if not weight > 0]:
        raise ValueError(f"The weight of the task {wrong[0]!r} must be greater than 0.")

"""Checkpoint: the record that a training loop yields."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from flaxfit.display import count, duration, html, is_scalar, number, plural, rate
from flaxfit.state._train_state import TrainState
from flaxfit.tree import Json, OptState, Params, PyTree


class Borrowed:
    """A value that `build` makes of arrays, which the loop's next step donates.

    >>> borrowed = Borrowed([1, 2], tuple)
    >>> borrowed.value, borrowed.copied(lambda arrays: [*arrays, 3])
    ((1, 2), (1, 2, 3))
    """

    def __init__(self, arrays: PyTree, build: Callable[[PyTree], PyTree]):
        self._arrays, self._build = arrays, build
        self._value: PyTree = None
        self.is_over = False

    def end(self) -> None:
        """Releases the arrays; reading the value later raises."""
        self._arrays = self._value = None
        self.is_over = True

    @property
    def value(self) -> PyTree:
        """The value, until the arrays are donated to a later step."""
        if self._value is None:
            self._value = self.copied(lambda arrays: arrays)
        return self._value

    def copied(self, copy: Callable[[PyTree], PyTree]) -> PyTree:
        """Builds the value from copies of the arrays."""
        if self.is_over:
            raise RuntimeError(
                "The arrays of this checkpoint were donated to a later training step, because it "
                "only borrowed them. Copy what you need before the next step, with "
                "loop.owned(checkpoint), or train with snapshot='device', which copies them."
            )
        return self._build(copy(self._arrays))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Records what happened up to a step, and everything needed to resume from it.

    Its arrays are unreplicated copies, which stay valid during further training, unless they are
    borrowed from the loop (see `TrainLoop(snapshot=...)`).

    >>> checkpoint = Checkpoint(step=3, state=None, metrics={"loss": 0.5})
    >>> checkpoint.loss
    0.5

    Args:
      step: the number of updates since the start of training.
      state: the training state after that step.
      metrics: means over the examples since the previous checkpoint, and metrics that callbacks
        added.
      modes: "min" or "max" by metric: whether lower or higher values are better, where that is
        known.
      epoch: the number of the epoch, from 0 as in Keras; None outside of `fit`.
      n_completed_steps: the number of updates since the previous checkpoint.
      n_examples: the number of examples trained on since the previous checkpoint.
      elapsed_time: seconds of training since the previous checkpoint, excluding compilation.
      compile_time: seconds of compilation since the previous checkpoint.
      data_state: the position of the data stream, if it has one, as JSON.
      stop: whether the loop ends after this checkpoint; a callback may set it.
      running: the size of the batches, the number of virtual replicas, and the paths of frozen
        parameters, as JSON.
      sums: the sums of the metrics so far, for a checkpoint between two that the loop yields.
      last_grads: the gradients of the last step; see `grads`.
      companions: the variables of the task's companions by name, with
        `TrainTask(save_companions=True)`.
      module_of: a function from a state to its module; see `module`.
    """

    # Not a tuple, so that `redex.combinator.serial` passes it on whole.
    step: int
    state: TrainState
    metrics: Mapping[str, float]
    modes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    epoch: int | None = None
    n_completed_steps: int = 0
    n_examples: int = 0
    elapsed_time: float = 0.0
    compile_time: float = 0.0
    data_state: Json = None
    stop: bool = False
    running: Json = None
    sums: Mapping[str, np.ndarray] | None = None
    last_grads: PyTree = None
    companions: Mapping[str, PyTree] | None = None
    module_of: Callable[[PyTree], PyTree] | None = None

    def replace(self, **changes: PyTree) -> "Checkpoint":
        """Returns a copy with some fields changed.

        >>> checkpoint.replace(stop=True).stop
        True
        """
        if type(self) is not Checkpoint:
            return dataclasses.replace(self, **changes)
        # Not `dataclasses.replace`, which would read borrowed values, and so build them.
        return Checkpoint(**{**self.__dict__, **changes})

    def __getstate__(self) -> dict[str, PyTree]:
        own = {name: getattr(self, name) for name in _BORROWABLE}
        return self.__dict__ | own | {"module_of": None}  # The task cannot be pickled.

    @property
    def is_borrowed(self) -> bool:
        """Whether its arrays belong to the loop, whose next step donates them."""
        return any(isinstance(self.__dict__[name], Borrowed) for name in _BORROWABLE)

    def with_metrics(self, metrics: Mapping[str, float], prefix: str = "") -> "Checkpoint":
        """Returns a copy with metrics added, their names prefixed.

        >>> checkpoint.with_metrics({"accuracy": 0.9}, prefix="val_")
        Checkpoint(step=3, loss=0.5, val_accuracy=0.9)
        """
        added = {f"{prefix}{name}": value for name, value in metrics.items()}
        return self.replace(metrics={**self.metrics, **added})

    def _state_if_readable(self) -> TrainState | None:
        state = self.__dict__["state"]
        return None if isinstance(state, Borrowed) and state.is_over else self.state

    @property
    def scalars(self) -> dict[str, float]:
        """The metrics that are single numbers, unlike confusion matrices."""
        return {name: value for name, value in self.metrics.items() if is_scalar(value)}

    @property
    def loss(self) -> float:
        """The example-weighted mean loss since the previous checkpoint.

        Raises:
          KeyError: there is none, as a custom step may report other metrics.
        """
        if "loss" not in self.metrics:
            raise KeyError(
                f"This checkpoint has no metric 'loss'; it has {', '.join(self.metrics) or 'none'}."
                " A custom step reports one if it returns it: (state, {'loss': value})."
            )
        return self.metrics["loss"]

    @property
    def model_params(self) -> Params:
        """The model's parameters."""
        return self.state.params

    @property
    def model_state(self) -> PyTree:
        """The model's other collections, such as `batch_stats`."""
        return self.state.model_state

    @property
    def optimizer_state(self) -> OptState:
        """The optimizer's state."""
        return self.state.opt_state

    @property
    def grads(self) -> PyTree:
        """The averaged gradients of the last step, with `TrainLoop(keep_grads=True)`."""
        if self.last_grads is None:
            raise ValueError(
                "This checkpoint holds no gradients: build the loop with keep_grads=True, or with "
                "grad_norm=True for their norm alone, metrics['grad_norm']."
            )
        return self.last_grads

    def module(self) -> Any:
        """Returns the trained module, in evaluation mode: an NNX module, or a bound Linen module.

        Its weights are their average where one is kept, and copies in any case.

        >>> import optax
        >>> from flax import linen as nn
        >>> from flaxfit import TrainLoop, TrainTask
        >>> x = np.ones((8, 2), np.float32)
        >>> task = TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (x, x[:, :1]))
        >>> checkpoint = TrainLoop(nn.Dense(1), task, 0, stdout=False).next_checkpoint()
        >>> checkpoint.module()(x).shape
        (8, 1)

        Raises:
          ValueError: the task was made of functions, or the checkpoint does not come from a loop.
        """
        if self.module_of is None:
            raise ValueError(
                "This checkpoint does not come from a loop, so its module is not known: use "
                "flaxfit.modules.update_nnx(module, checkpoint.state.variables), or "
                "module.bind(checkpoint.state.variables) for linen."
            )
        return self.module_of(self.state)

    def __repr__(self) -> str:
        parts = [f"step={self.step}"]
        parts += [f"{name}={value:.4g}" for name, value in self.scalars.items()]
        if self.elapsed_time and self.n_completed_steps:
            parts.append(rate(self.n_completed_steps / self.elapsed_time))
        if (state := self._state_if_readable()) is not None:
            parts.append(f"{count(html.n_numbers(state.params))} params")
        return f"Checkpoint({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Returns the facts, the metrics and the arrays as a notebook shows them."""
        facts = [plural(self.n_completed_steps, "step"), duration(self.elapsed_time)]
        if self.elapsed_time and self.n_completed_steps:
            facts.append(rate(self.n_completed_steps / self.elapsed_time))
        if self.compile_time:
            facts.append(f"compiled in {duration(self.compile_time)}")
        if self.step == self.n_completed_steps == 1:
            facts.append("first_checkpoint=1: one step is trained before the first period")
        rows = [[name, number(value)] for name, value in self.scalars.items()]
        parts = [html.table(rows)] if rows else []
        if (state := self._state_if_readable()) is not None:
            facts.append(f"{count(html.n_numbers(state.params))} params")
            parts.append(html.arrays("params", state.params, state.axes))
        return html.card(f"Checkpoint at step {count(self.step)}", facts, *parts)


def _borrowable(name: str) -> property:
    """Returns a field whose value may be `Borrowed`: reading the field reads that value."""

    def read(checkpoint: Checkpoint) -> PyTree:
        value = checkpoint.__dict__[name]
        return value.value if isinstance(value, Borrowed) else value

    def write(checkpoint: Checkpoint, value: PyTree) -> None:
        checkpoint.__dict__[name] = value

    return property(read, write)


def _refuse(checkpoint: Checkpoint, name: str, value: PyTree) -> NoReturn:
    raise dataclasses.FrozenInstanceError(
        f"cannot assign to field {name!r}: checkpoints are immutable. Return a changed copy, "
        f"checkpoint.replace({name}=...)."
    )


# The dataclass is frozen already; this error says what to do instead.
type.__setattr__(Checkpoint, "__setattr__", _refuse)
_BORROWABLE = ("state", "last_grads")
for _name in _BORROWABLE:
    # Not in the class: a dataclass would take it for the default.
    setattr(Checkpoint, _name, _borrowable(_name))

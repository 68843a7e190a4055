"""TrainTask and EvalTask: what to train and what to measure, as plain descriptions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flaxfit import losses, metrics


@dataclasses.dataclass(frozen=True)
class TrainTask:
    """What to train: a model, an optimizer, a loss and data.

    >>> import optax
    >>> task = TrainTask(lambda v, x, **_: x, optax.sgd(0.1), "mse", [([1.0], [1.0])])
    >>> task.rngs
    ('dropout',)

    Raises:
      TypeError: `apply` is not a function or `optimizer` is not an optax transformation.
      ValueError: the name of a loss or a metric is unknown.
    """

    apply: Callable[..., Any]
    """`apply(variables, *inputs, rngs=, mutable=)`, such as a linen module's `apply`."""
    optimizer: Any
    """An optax transformation; its `update` is given the parameters."""
    loss: Any
    """`loss(*outputs, *targets)` or a name. It returns values `(batch, ...)` (preferred: weights
    and padding are then exact), or `(values, penalty)` with an unweighted scalar penalty, or a
    scalar, the mean over the batch."""
    data: Any = None
    """Anything that `flaxfit.data.as_stream` takes."""
    metrics: Any = dataclasses.field(default_factory=dict)
    """Metrics by name, or a sequence of names; measured on the outputs of the training step."""
    _: dataclasses.KW_ONLY
    rngs: Sequence[str] = ("dropout",)
    """The random streams that `apply` is given, each with a key of its own in every step."""
    mutable: Any = None
    """The collections that a step may change; None: all but the parameters."""
    pad: bool = True
    """Whether a batch may be padded with rows of weight 0; False for a loss that compares the
    examples of a batch with one another."""

    def __post_init__(self) -> None:
        _check_apply("TrainTask", self.apply)
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise TypeError(
                "TrainTask needs an optax transformation as optimizer, such as optax.adam(1e-3), "
                f"got {self.optimizer!r:.80}."
            )
        object.__setattr__(self, "loss", losses.resolve(self.loss))
        object.__setattr__(self, "metrics", metrics.as_metrics(self.metrics))
        object.__setattr__(self, "rngs", _names(self.rngs))


@dataclasses.dataclass(frozen=True)
class EvalTask:
    """What to measure: a model, metrics and data.

    >>> EvalTask(lambda v, x, **_: x, ["mse"], [([1.0], [1.0])]).loss is None
    True
    """

    apply: Callable[..., Any]
    """`apply(variables, *inputs)`, such as the `apply` of a module in evaluation mode."""
    metrics: Any
    """Metrics by name, or a sequence of names."""
    data: Any = None
    """Anything that can be passed over again and again: arrays, a list of batches, a loader."""
    _: dataclasses.KW_ONLY
    loss: Any = None
    """A loss to report as well, or its name."""
    rngs: Sequence[str] = ()
    """The random streams of a stochastic evaluation; none by default."""

    def __post_init__(self) -> None:
        _check_apply("EvalTask", self.apply)
        if self.loss is not None:
            object.__setattr__(self, "loss", losses.resolve(self.loss))
        object.__setattr__(self, "metrics", metrics.as_metrics(self.metrics))
        object.__setattr__(self, "rngs", _names(self.rngs))


def _names(names: Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _check_apply(owner: str, apply: Any) -> None:
    if hasattr(apply, "apply") or not callable(apply):
        hint = "module.apply" if hasattr(apply, "apply") else "apply(variables, *inputs, ...)"
        kind = "a module" if hasattr(apply, "apply") else repr(apply)[:80]
        raise TypeError(f"{owner} needs an apply function, got {kind}: pass {hint}.")

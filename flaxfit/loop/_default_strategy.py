"""The default strategy of a task, and the strategies that a custom step supports."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from flaxfit.strategies import DataParallel, Eager, Sharded, Strategy
from flaxfit.task import TrainTask


def strategy_for(
    task: TrainTask,
    devices: Sequence[Any] | None = None,
    strategy: Strategy | None = None,
    *,
    is_eager: bool = False,
) -> Strategy:
    """Returns the given strategy, or a default under which a custom step sees whole batches."""
    if devices is not None and strategy is not None:
        raise ValueError("Give either devices or a strategy, not both: strategies hold devices.")
    if strategy is not None and not hasattr(type(strategy), "compile"):
        raise TypeError(
            "strategy must be an object such as flaxfit.DataParallel() or flaxfit.Sharded(), got "
            f"{strategy!r}."
        )
    if is_eager:
        return Eager(strategy if devices is None else DataParallel(devices))
    if strategy is not None:
        return strategy
    default = DataParallel(devices)
    if task.step is None or default.n_devices == 1:
        return default
    return Sharded(devices=default.devices)


def check_strategy(task: TrainTask, strategy: Strategy) -> None:
    """Checks that a custom step sees whole batches.

    Raises:
      ValueError: the step would run once per replica, and nothing would reduce its results.
    """
    if task.step is not None and strategy.axis_name is not None and strategy.n_devices > 1:
        is_plain = type(task) is TrainTask
        owner = "The task has a custom step, which" if is_plain else f"A {type(task).__name__}"
        raise ValueError(
            f"{owner} needs whole batches, but {strategy!r} gives each of {strategy.n_devices} "
            "devices a part: use strategy=Sharded(), or one device."
        )


def eagerly(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Disables `jax.jit` within a `with` block, if the strategy runs eagerly."""
    return jax.disable_jit() if strategy.runs_eagerly else contextlib.nullcontext()

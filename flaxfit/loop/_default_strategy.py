"""The strategy of a task where none is given, and which one its own step can run under."""

from collections.abc import Sequence
from typing import Any

from flaxfit.strategies import DataParallel, Sharded, Strategy


def strategy_for(task: Any, devices: Sequence[Any] | None = None) -> Strategy:
    """The strategy of a task where none is given: one under which its step sees whole batches."""
    strategy = DataParallel(devices)
    if task.step is None or strategy.n_devices == 1:
        return strategy
    return Sharded(devices=strategy.devices)


def check_strategy(task: Any, strategy: Strategy) -> None:
    """Checks that a step of the user's own sees whole batches.

    Raises:
      ValueError: it would see the parts of several replicas, which nothing would bring together.
    """
    if task.step is not None and strategy.axis_name is not None and strategy.n_devices > 1:
        raise ValueError(
            f"The task has a step of its own, which sees whole batches, and {strategy!r} hands "
            f"each of {strategy.n_devices} devices a part: use strategy=Sharded(), or one device."
        )

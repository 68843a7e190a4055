"""card_of: the HTML of a training loop in a notebook."""

from typing import Any

from flaxfit.display import arrays, card, count, n_numbers, number, place, plural, table

_FIELDS = ("params", "model_state", "opt_state")


def card_of(loop: Any, last: dict[str, float]) -> str:
    """Returns HTML: the step, the schedule of checkpoints, metrics and arrays of a loop.

    Args:
      loop: a `TrainLoop`.
      last: the metrics of its latest checkpoint.
    """
    schedule, state, devices = loop.schedule, loop.state_in_place, loop.strategy.devices
    first, second = schedule.first, schedule.first + schedule.every
    facts = [
        f"{count(n_numbers(state.params))} params",
        plural(len(devices), f"{devices[0].platform} device"),
        f"checkpoints at step {count(first)}, {count(second)}, … (first_checkpoint={first}, "
        f"n_steps_per_checkpoint={schedule.every})",
    ]
    parts = [table([[name, number(value)] for name, value in last.items()])] if last else []
    parts += [arrays(name, getattr(state, name), state.axes) for name in _FIELDS]
    return card(f"TrainLoop at step {place(loop.step, loop.n_steps).strip()}", facts, *parts)

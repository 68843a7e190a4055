"""Reads and sets the learning rates of a loop, for callbacks."""

from collections.abc import Mapping

from flaxfit.loop import TrainLoop
from flaxfit.optim._hyperparams import group_name, in_group, learning_rates, scheduled


def take_rates(loop: TrainLoop, group: str | int | None, owner: str) -> None:
    """Checks that a callback can set the rates, and makes later changes need no compilation."""
    found = rates_of(loop, group, owner)
    chosen = None if group is None else _group(loop, group)
    if "learning_rate" in scheduled(loop.state_in_place.opt_state, chosen):
        raise ValueError(
            f"{owner} cannot set the learning rate: the optimizer was made with a schedule, which "
            "sets it at each step. Make the optimizer with a number, such as optax.adam(1e-3), or "
            "remove the callback."
        )
    set_rates(loop, found)


def rates_of(loop: TrainLoop, group: str | int | None, owner: str) -> dict[str | None, float]:
    """Returns the learning rates of a loop by group; the key is None without groups."""
    known = loop.hyperparams
    found = learning_rates(known) if group is None else in_group(known, _group(loop, group))
    if not found:
        where = "" if group is None else f" in group {group!r}"
        raise ValueError(
            f"{owner} cannot set the learning rate: the optimizer holds none{where} that can be "
            "set. Make it with flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3), or use "
            "an Optax schedule."
        )
    return found


def set_rates(loop: TrainLoop, rates: Mapping[str | None, float]) -> None:
    """Sets learning rates by group."""
    for group, rate in rates.items():
        loop.set_hyperparams(group=group, learning_rate=rate)


def _group(loop: TrainLoop, group: str | int) -> str:
    """Returns the name of an optimizer's group, given by name or position."""
    return group_name(loop.state_in_place.opt_state, group)

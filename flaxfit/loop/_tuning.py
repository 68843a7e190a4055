"""Reads and changes the optimizer of a run between steps: hyperparameters and `freeze`."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from flaxfit.loop._stepper import Stepper
from flaxfit.optim import hyperparams, set_hyperparams
from flaxfit.optim._extended import generations_of
from flaxfit.optim._generations import Generations, fitting
from flaxfit.optim._hyperparams import learning_rates as rates_of
from flaxfit.optim._plain_rate import live_rate, matched, plain_rate
from flaxfit.state import Checkpoint, TrainState, with_opt_state
from flaxfit.task import with_generations
from flaxfit.tree import ArrayLike, without_mesh


def present_hyperparams(stepper: Stepper) -> dict[str, Any]:
    """Returns the hyperparameters of the optimizer as numbers, by group.

    For a plain Optax optimizer, at most a constant learning rate is known.
    """
    opt_state = stepper.state.opt_state
    if stepper.placed.has_hyperparams or stepper.task.step is not None:
        return _on_host(hyperparams(opt_state))
    rate = plain_rate(stepper.task.optimizer)
    return {} if rate is None else {"learning_rate": rate}


def learning_rates(stepper: Stepper) -> dict[str, float]:
    """Returns the learning rates of the latest step; none for a plain Optax optimizer."""
    rates = rates_of(present_hyperparams(stepper)) if stepper.placed.has_hyperparams else {}
    return {
        "learning_rate" if group is None else f"learning_rate/{group}": rate
        for group, rate in rates.items()
    }


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    fetched = {}
    for name, value in values.items():
        if isinstance(value, dict):
            fetched[name] = _on_host(value)
        else:
            fetched[name] = value.item() if value.ndim == 0 else jax.device_get(value)
    return fetched


@without_mesh()
def tune(stepper: Stepper, group: str | int | None, values: dict[str, ArrayLike]) -> None:
    """Sets hyperparameters without recompilation.

    One exception: the first change of the rate of a plain optimizer, such as `optax.adam(1e-3)`,
    moves the rate into the state, which changes the program.
    """
    task, placed = stepper.task, stepper.placed
    is_plain = not placed.has_hyperparams and task.step is None
    live = live_rate(task.optimizer) if is_plain and values.keys() == {"learning_rate"} else None
    if live is not None:
        _set_optimizer(stepper, live)
    placed.set_hyperparams(group, values)
    stepper.n_tuned += 1


def with_settings(
    stepper: Stepper,
    checkpoint: Checkpoint,
    settings: Iterable[tuple[str | int | None, dict[str, ArrayLike]]],
) -> Checkpoint:
    """Adds hyperparameters set by callbacks to a checkpoint of the present step."""
    if checkpoint.is_borrowed:
        return checkpoint.replace(state=stepper.placed.lend()[0])
    state = match(stepper, checkpoint.state)
    opt_state = state.opt_state
    for group, values in settings:
        opt_state = set_hyperparams(opt_state, group=group, **values)
    return checkpoint.replace(state=state.replace(opt_state=opt_state))


def match(stepper: Stepper, state: TrainState) -> TrainState:
    """Gives state and optimizer a live rate if either has one; returns the state."""
    if stepper.task.step is not None:
        return state
    optimizer, opt_state = matched(stepper.task.optimizer, state.opt_state)
    if optimizer is not stepper.task.optimizer:
        _set_optimizer(stepper, optimizer)
    return state if opt_state is state.opt_state else with_opt_state(state, opt_state)


def freeze(stepper: Stepper, patterns: str | Sequence[str]) -> None:
    """Changes the frozen parameters, and keeps the optimizer state of the others."""
    task = dataclasses.replace(stepper.task, freeze=patterns)
    generations = stepper.placed.set_optimizer(task.optimizer)
    stepper.n_tuned += 1
    stepper.set_task(with_generations(task, generations))


def set_generations(stepper: Stepper, generations: Generations) -> None:
    """Sets which parameters were unfrozen after the first update, as far as the state fits."""
    fits = fitting(generations, stepper.state.opt_state, stepper.state.params)
    if fits != generations_of(stepper.task.optimizer):
        stepper.set_task(with_generations(stepper.task, fits))


def _set_optimizer(stepper: Stepper, optimizer: object) -> None:
    if stepper.placed.leaves:
        stepper.placed.match(optimizer)
    stepper.set_task(dataclasses.replace(stepper.task, optimizer=optimizer))

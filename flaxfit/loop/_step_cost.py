"""The cost of a training step of a run: operations, and memory of a device."""

import math

import jax

from flaxfit.data._batch import Batch
from flaxfit.loop._programs import build_update
from flaxfit.loop._stepper import Stepper
from flaxfit.step import StepCost, cost_of, make_step, memory_of, taking_states
from flaxfit.tree import shapes_of


def step_cost(stepper: Stepper, n: int | None) -> StepCost:
    """The operations of a step on `n` examples, on all devices together; `nan` if eager."""
    if stepper.strategy.runs_eagerly:
        return StepCost(math.nan, recomputes=False)
    batch = shapes_of(_example(stepper, n))  # First, as it inspects the task.
    has_weights = stepper.inspection.loss_has_weights
    step = taking_states(stepper.task, lambda task: make_step(task, loss_has_weights=has_weights))
    arguments = shapes_of(stepper.state), batch, shapes_of(stepper.companions.states)
    return cost_of(stepper.strategy.bind(step), *arguments)


def step_memory(stepper: Stepper, n: int | None) -> int:
    """The bytes of a step on `n` examples, on each device; compiles it, and runs nothing."""
    portion = stepper.feed.as_regular(_example(stepper, n))
    arrays = portion.strategy.split(jax.tree.leaves(portion.batch))
    placed, companions = stepper.placed, stepper.companions
    arguments = (placed.leaves, stepper.tally.totals, *companions.arguments, arrays)
    options = stepper.step_options
    return memory_of(
        build_update(stepper.task, placed.layout, companions, portion, arguments, 1, **options)
    )


def _example(stepper: Stepper, n: int | None) -> Batch:
    """A batch of `n` examples; the time of an inspection of the data does not count as training."""
    if not stepper.feed.is_decided:
        stepper.inspect_first(stepper.first_batch())
    return stepper.feed.example(n)

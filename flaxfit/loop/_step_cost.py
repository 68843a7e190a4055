"""The cost of a training step: floating-point operations, and memory per device."""

import math

import jax

from flaxfit.data._batch import Batch
from flaxfit.loop._programs import build_update
from flaxfit.loop._stepper import Stepper
from flaxfit.step import StepCost, cost_of, make_step, memory_of, taking_states
from flaxfit.tree import shapes_of


def step_cost(stepper: Stepper, n: int | None) -> StepCost:
    """Returns the operations of a step on `n` examples, over all devices; `nan` if eager."""
    if stepper.strategy.runs_eagerly:
        return StepCost(math.nan, recomputes=False)
    batch = shapes_of(_example(stepper, n))  # First: it inspects the task, if that was not done.
    has_weights = stepper.inspection.loss_has_weights
    step = taking_states(stepper.task, lambda task: make_step(task, loss_has_weights=has_weights))
    arguments = shapes_of(stepper.state), batch, shapes_of(stepper.companions.states)
    return cost_of(stepper.strategy.bind(step), *arguments)


def step_memory(stepper: Stepper, n: int | None) -> int:
    """Returns the bytes per device of a step on `n` examples; compiles it, but runs nothing."""
    prepared = stepper.feed.as_regular(_example(stepper, n))
    arrays = prepared.strategy.split(jax.tree.leaves(prepared.batch))
    placed, companions = stepper.placed, stepper.companions
    arguments = (placed.leaves, stepper.tally.totals, *companions.arguments, arrays)
    options = stepper.step_options
    return memory_of(
        build_update(stepper.task, placed.layout, companions, prepared, arguments, 1, **options)
    )


def _example(stepper: Stepper, n: int | None) -> Batch:
    """Returns a batch of `n` examples."""
    if not stepper.feed.is_decided:  # Outside of `stepper.inspecting`: this is no training time.
        stepper.inspect_first(stepper.first_batch())
    return stepper.feed.example(n)

"""What tests read of a loop or a model that users need not see: one place to change with them."""

import jax


def programs_of(loop):
    """The compiled steps of a loop, by the signature of their batch."""
    return loop._stepper.programs.compiled


def companions_of(loop):
    """The companions of a loop in their places."""
    return loop._companions


def totals_of(loop):
    """The sums on the devices that the next step adds to, by dtype."""
    return loop._stepper.tally.totals


def resident_inputs_of(loop):
    """The inputs of the data that a loop keeps on the devices."""
    return loop._stepper.feed.resident.inputs[0]


def batch_of(loaded):
    """What an `Assembler` has loaded, as a batch."""
    return jax.tree.structure(loaded.prepared.batch).unflatten(loaded.arrays)


def is_holding_interrupts(loop):
    """Whether an interrupt would wait."""
    return loop._stepper.interrupts.is_held


def step_a_batch(loop, batch):
    """Takes a step on a batch as a loop does, without a checkpoint of it."""
    loop._stepper.advance(1, batch)


def loop_of_model(model):
    """The loop that the last `fit` drove."""
    return model._trainer.loop


def n_programs_of(model):
    """How many programs `fit`, `evaluate` and `predict` of a model have compiled."""
    trainer = len(programs_of(loop_of_model(model))) if model._trainer.loop else 0
    others = model._evaluator._programs, model._predictor.programs
    return trainer, *(len(each.compiled) for each in others)

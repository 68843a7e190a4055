"""What tests read of a loop or a model that users need not see: one place to change with them."""


def programs_of(loop):
    """The compiled steps of a loop, by the signature of their batch."""
    return loop._stepper.programs.compiled


def loop_of_model(model):
    """The loop that the last `fit` drove."""
    return model._trainer.loop


def n_programs_of(model):
    """How many programs `fit`, `evaluate` and `predict` of a model have compiled."""
    trainer = len(programs_of(loop_of_model(model))) if model._trainer.loop else 0
    return trainer, len(model._evaluator._programs), len(model._predictor._programs)

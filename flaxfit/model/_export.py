"""apply_to_export: the function of a model to export."""

from flaxfit.task import EvalTask
from flaxfit.tree import ApplyFn


def apply_to_export(task: EvalTask) -> ApplyFn:
    """Returns the `apply` of an evaluation task; raises if it draws random numbers."""
    if task.rngs:
        raise ValueError(
            f"Cannot export a model that draws random numbers (eval_rngs={task.rngs}): an exported "
            "program is a function of the inputs alone. Make a Model without eval_rngs, of a "
            "module that draws none in evaluation, and load the weights with load_weights."
        )
    return task.apply

"""The function of a model that is exported."""

from flaxfit.task import EvalTask
from flaxfit.tree import ApplyFn


def apply_to_export(task: EvalTask) -> ApplyFn:
    """Returns the apply function of evaluation; raises if it draws random numbers."""
    if task.rngs:
        raise ValueError(
            f"Cannot export a model that draws random numbers (eval_rngs={task.rngs}): a file is "
            "a function of the inputs alone. Make a Model without eval_rngs, whose module "
            "draws none in evaluation, and load_weights into it."
        )
    return task.apply

"""The export of a model; `flaxfit.export` is imported when it is used."""

import os
from typing import Any

from flaxfit.model._trainer import Trainer
from flaxfit.task._task import EvalTask
from flaxfit.tree._types import ApplyFn, Params, PyTree


def apply_to_export(task: EvalTask) -> ApplyFn:
    """Returns the apply function of evaluation; raises if it draws random numbers."""
    if task.rngs:
        raise ValueError(
            f"Cannot export a model that draws random numbers (eval_rngs={task.rngs}): a file is "
            "a function of the inputs alone. Make a Model without eval_rngs, whose module "
            "draws none in evaluation, and load_weights into it."
        )
    return task.apply


def export_model(
    trainer: Trainer,
    task: EvalTask,
    path: str | os.PathLike[str],
    format: str,
    input_spec: PyTree,
    *,
    params: Params,
    trainable: bool,
    **options: Any,
) -> Any:
    """Writes a model in evaluation mode; see `Model.export`."""
    from flaxfit import export
    from flaxfit.export._spec import example

    apply = apply_to_export(task)
    if input_spec is None:
        if trainer.input_shapes is None:
            raise ValueError(
                "export() needs input_spec= before the first fit, such as "
                "flaxfit.export.InputSpec(('batch', 28, 28))."
            )
        input_spec = export.batch_specs(trainer.input_shapes)
    trainer.begin(lambda: example(input_spec))
    state = trainer.averaged(trainer.state)
    module = export.from_state(state, apply, input_spec, params=params, trainable=trainable)
    return export.write(module, path, format, **options)

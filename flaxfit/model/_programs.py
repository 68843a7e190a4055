"""Programs: holds the tasks and loops of a model, and remakes them if its module changed."""

from flaxfit.loop import EvalLoop, Predictor
from flaxfit.model._tasks import Recipe
from flaxfit.model._trainer import Trainer
from flaxfit.task import EvalTask


class Programs:
    """The part of `Model` that holds its trainer, evaluator and predictor."""

    _recipe: Recipe
    _trainer: Trainer
    _evaluator: EvalLoop
    _predictor: Predictor
    _names: list[str] | None
    """The names of the latest measurement."""

    def _hold(self, eval_task: EvalTask) -> None:
        """Switches evaluation and prediction to a task."""
        self._trainer.lacks = self._recipe.lacks
        self._evaluator = EvalLoop(eval_task, strategy=self._trainer.strategy)
        self._predictor = Predictor(eval_task)
        self._names = None

    def _follow_module(self) -> None:
        """Remakes all tasks and loops if attributes of the NNX instance were changed."""
        instance = self._trainer.instance
        if instance.is_changed():
            frozen = {"freeze": self._trainer.task.freeze}
            recipe = self._recipe.of_module_as_it_is().changed({}, frozen)
            task, eval_task = recipe.tasks()
            self._trainer.follow_module(task, recipe.training.init)
            self._recipe = recipe
            self._hold(eval_task)
        instance.note_changes()

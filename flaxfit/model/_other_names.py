"""Answers names from other libraries with their counterparts in flaxfit."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from flaxfit.display import short_errors
from flaxfit.loop import hook_of
from flaxfit.task import TrainTask

_STEP = (
    "pass Model(..., step=...), a pure function (state, batch) -> (state, sums), or objective=..., "
    "a loss that calls the model, to train with; pass metrics for what evaluate is to measure"
)
_METHODS: Mapping[str, str] = {
    **dict.fromkeys(["train_step", "test_step", "predict_step"], _STEP),
    **dict.fromkeys(["training_step", "validation_step", "prediction_step"], _STEP),
    **dict.fromkeys([f"make_{each}_function" for each in ("train", "test", "predict")], _STEP),
    "call": "write a Flax module, and pass it: Model(module, ...)",
    "compute_loss": (
        "pass a loss, (*outputs, *targets) -> values, or Model(..., objective=...), which calls "
        "the model by itself"
    ),
    "configure_optimizers": "pass an optimizer, such as optax.adam(schedule)",
}
"""The methods that models of other libraries override."""

_GROUPS = {
    "layers get_layer": (
        "its module is model.module, summary(x) prints the layers, and layers are frozen by path, "
        "such as model.freeze = ['encoder/.*']"
    ),
    "weights variables params parameters state_dict trainable_variables trainable_weights "
    "non_trainable_variables non_trainable_weights": (
        "the parameters are model.state.params, other variables model.state.model_state, and "
        "get_weights() lists all as arrays"
    ),
    "input inputs output outputs input_shape output_shape": (
        "let the module return what you need; summary(x) prints the shapes"
    ),
    "to_json get_config from_config": (
        "the code of the module is the architecture; save(folder) and save_weights(path) keep "
        "arrays"
    ),
    "train eval": "fit, evaluate and predict switch the module between training and evaluation",
    "fit_generator evaluate_generator predict_generator": (
        "fit, evaluate and predict take generators and loaders"
    ),
    "losses add_loss": "the module adds to the loss by self.sow('losses', name, value)",
    "built compiled": "build(x) or the first data makes the parameters, and compile is not needed",
    "lr learning_rate": (
        "model.compile(optimizer=optax.adam(0.01)) sets it and keeps the state of the optimizer; "
        "while fit runs, callbacks.LearningRateScheduler does"
    ),
}
_OPTIONS = {field.name for field in dataclasses.fields(TrainTask) if field.kw_only}

_ADVICE: Mapping[str, str] = {
    **{name: f"model.compile({name}=...) sets it" for name in _OPTIONS - {"freeze", "step"}},
    **{name: f"pass Model(..., {name}=...)" for name in ("eval_rngs", "snapshot")},
    **{name: f"pass it to fit, {name}=..." for name in ("callbacks", "class_weight")},
    **{name: advice for names, advice in _GROUPS.items() for name in names.split()},
    **_METHODS,
    "call": "use predict(x), or trained()(x), which can be differentiated",
    "jit_compile": "steps are always compiled, unless Model(..., run_eagerly=True) is given",
    "add_metric": "pass metrics to Model or compile",
    "predict_classes": "use predict(x).argmax(-1)",
    "predict_proba": "use jax.nn.softmax(predict(x)), as models return logits",
    "reset_metrics": "fit resets the metrics at the start of each epoch",
    "run_eagerly": "pass Model(..., run_eagerly=True)",
    "score": "use evaluate(x, y)",
    "stop_training": "a callback ends training by returning checkpoint.replace(stop=True)",
}
_SET_ELSEWHERE = _OPTIONS | {"callbacks", "class_weight", "lr", "learning_rate"}


class AnswersOtherNames:
    """Raises errors for names from other libraries that name their counterparts."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        never = f"{cls.__name__} defines {{}}, which a Model never calls: {{}}."
        for name in _METHODS:
            if hasattr(cls, name):
                raise TypeError(never.format(name, _METHODS[name]))
        if event := hook_of(cls):
            raise TypeError(never.format("a hook", f"pass callbacks=[{event}] to fit"))

    def __call__(self, *inputs: Any, **options: Any) -> NoReturn:
        raise TypeError(
            "A Model cannot be called: use model.predict(x), or model.trained()(x), which can be "
            "differentiated and compiled."
        )


@short_errors
def _refuse(self: object, name: str) -> NoReturn:
    owner = type(self).__name__
    words = f"{owner!r} object has no attribute {name!r}"
    if name in _ADVICE:
        words = f"{owner} has no {name!r}: {_ADVICE[name]}"  # Python may add ". Did you mean: ...?"
    raise AttributeError(words, name=name, obj=self)


def _set(self: object, name: str, value: Any) -> None:
    # A user's subclass may store its own arguments under these names.
    may_keep = name in _SET_ELSEWHERE and not type(self).__module__.startswith("flaxfit.")
    if name in _ADVICE and not hasattr(type(self), name) and not may_keep:
        _refuse(self, name)
    object.__setattr__(self, name, value)


# Set from outside, since methods in the class would let type checkers accept any attribute.
setattr(AnswersOtherNames, "__getattr__", _refuse)  # noqa: B010
setattr(AnswersOtherNames, "__setattr__", _set)  # noqa: B010

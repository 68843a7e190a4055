"""TrainTask and EvalTask: what to train and what to measure, as plain descriptions."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxfit.data._roles import Names, Roles
from flaxfit.modules._switch import as_apply, check_streams, handle_of, inputs_of
from flaxfit.optim._averaged import averaged, has_average, has_ema
from flaxfit.task._companions import as_companions
from flaxfit.task._multi_output import as_loss
from flaxfit.task._options import (
    check_across,
    check_objective,
    check_reports_penalty,
    names_of,
    resolved,
)
from flaxfit.task._output_metrics import as_metrics
from flaxfit.task._precision import check_precision
from flaxfit.task._repr import describe
from flaxfit.tree._types import Data, Function, PyTree, Variables


@dataclasses.dataclass(frozen=True, repr=False)
class TrainTask:
    """What to train: a model, an optimizer, a loss and data; or a step of your own, and data.

    >>> import optax
    >>> task = TrainTask(lambda v, x, **_: x, optax.sgd(0.1), "mse", [([1.0], [1.0])])
    >>> task.rngs
    ('dropout',)

    Raises:
      TypeError: `apply` is not a function or `optimizer` is not an optax transformation.
      ValueError: the name of a loss or a metric is unknown.
    """

    apply: Any = None
    """`apply(variables, *inputs, rngs=, mutable=)`, or a linen or nnx module, whose switches are
    set for training."""
    optimizer: Any = None
    """An optax transformation, whose `update` is given the parameters, or an `Optimizer`, whose
    definition is taken. Clipping, freezing, averaging
    and loss scaling are put around it here: the states are those of `task.optimizer`."""
    loss: Any = None
    """`loss(*outputs, *targets)` or a name. It returns values `(batch, ...)` (preferred: weights
    and padding are then exact), `(values, weights)`, or these with an unweighted scalar penalty
    as the last, or a scalar. Scalars are computed over the batch of all devices. A model with
    several outputs has one for each, by name or in their order: their weighted sum is trained, and
    each is reported as "<name>_loss". None: what the model adds by itself is the loss."""
    data: Data = None
    """Anything that `flaxfit.data.as_stream` takes."""
    metrics: Any = dataclasses.field(default_factory=dict)
    """Metrics by name, or a sequence of names; measured on the outputs of the training step.
    Under the name of one of several outputs: those of that output."""
    _: dataclasses.KW_ONLY
    loss_weights: Any = None
    """The weights of the losses of several outputs, by name or in their order; 1 where none is.
    A number multiplies the only loss, or those of all outputs."""
    inputs: Names = None
    """The columns of a batch that the model is called with, for batches that are mappings: a name,
    several in the order of the call, or `{name in the call: column}`. None: those that the call
    takes. The columns without a role are passed by."""
    targets: Names = None
    """The columns that are targets, in order, or by the names of outputs; `()` for none. None: the
    one with a usual name, such as "label"."""
    weights: str | Mapping[str, str] | None = None
    """The column that weighs examples or tokens, or such columns by the names of outputs."""
    rngs: Sequence[str] = ("dropout",)
    """The random streams that `apply` is given, each with a key of its own in every step."""
    mutable: Any = None
    """The collections that a step may change; None: all but the parameters."""
    pad: bool = True
    """Whether a batch may be padded with rows of weight 0; False for a loss that compares the
    examples of a batch with one another, which is then given the batch of all devices. With weights
    such a loss of targets needs `across="batch"`, as targets of weight 0 are replaced otherwise."""
    objective: Function | None = None
    """A loss that calls the model by itself, in place of `loss`: `f(apply, batch, rngs)`, where
    `apply(*inputs)` is the model in training, to be called as often as needed, and `rngs` are the
    keys of the first call, which `apply(*inputs, rngs=rngs)` repeats. It returns values `(batch,
    ...)`, `(values, aux)`, `(values, weights)` or `(values, weights, aux)`; aux has by name what is
    reported, too: values by example, with the weights of the objective's, or pairs `(sum,
    weight)`. It takes the place of `loss`, `metrics` and `across`; all other options apply. An
    objective with a parameter `ema` is given the model with the average that the option `ema`
    keeps: it is called like `apply`, and gives no gradient, of its inputs neither. In evaluation,
    where one set of weights is measured, it is the model with these."""
    companions: Any = None
    """Frozen models that the objective is given by keyword, as functions `(*inputs) -> outputs` in
    evaluation mode: `{"teacher": (apply, variables)}`, `(linen module, variables)` or an nnx
    module. The strategy places their variables like parameters, once; they are no constants of the
    compiled step, and nothing trains, averages or counts them. Gradients pass through their inputs
    only."""
    save_companions: bool = False
    """Whether checkpoints hold the variables of the companions. A loop that resumes from one takes
    these; from any other, those of the task."""
    across: str | None = None
    """"batch" for a loss that compares the examples of a batch with one another, such as a
    contrastive one: it sees the outputs and targets of all devices and of all `accumulate` parts
    at once, with a gradient to each. Implies `pad=False`."""
    penalty_in_loss: bool = False
    """Whether the reported loss includes the penalty, that of the loss or of what the model adds,
    as in Keras. The penalty is trained, and reported as "penalty", in any case."""
    check_finite: bool = True
    """Whether NaN and infinite values among inputs and targets are refused; False where they stand
    for something, such as a missing label, and the model, the loss and metrics leave them out."""
    freeze: Any = ()
    """Patterns of the paths of parameters that are not trained, or NNX filters, such as
    `nnx.Not(nnx.LoRAParam)`. No gradient is computed for them, and the optimizer never sees
    them."""
    accumulate: int = 1
    """The number of parts that each batch is computed in, one after the other. The result is
    that of the whole batch; the activations of only one part are in memory. The loss must be one
    value per example, which depends on that example alone; any other needs `across="batch"`, which
    then computes the outputs twice."""
    precision: str | None = None
    """What the model computes in: "bfloat16", or "float16" with dynamic loss scaling. Parameters,
    loss and metrics stay float32."""
    clip_norm: float | None = None
    """The largest global norm that gradients may have; longer ones are scaled down to it."""
    ema: float | None = None
    """The decay of an exponential moving average of the parameters, kept beside them: after each
    step `average = ema * average + (1 - ema) * params`. See `flaxfit.optim.swap_ema`."""
    ema_overwrite_frequency: int | None = None
    """With `ema`: after how many steps each time the parameters are set to their average."""
    skip_nonfinite: bool = False
    """Whether a step whose loss or gradients are not finite leaves the whole state as it was, and
    is counted in `metrics["skipped_steps"]`. Always so with float16."""
    skip_above: float | None = None
    """How many standard deviations the loss of a step, or the norm of its gradient, may lie above
    the mean of the last 128 steps, such as 6.0. A step beyond leaves the state as it was, and so
    does one that is not finite; both are counted in `metrics["skipped_steps"]`."""
    grads_hook: Function | None = None
    """A pure function `(grads, state, sums) -> grads` between the gradient of the whole batch and
    the optimizer, for a clipping, noise or projection of your own. Frozen parameters are left out
    of `grads` and of `state.params`; `sums` are those of the loss and the metrics. The norm of what
    it returns is reported as "hooked_grad_norm"."""
    example_grads_hook: Function | None = None
    """A pure function `grads -> grads` on the gradient of each example, before their weighted mean
    is taken, such as the clipping of DP-SGD. It is that of the mean of the example's values; the
    gradients of as many examples as one part of a batch on one device has are in memory."""
    norms: Any = ()
    """Patterns of paths of parameters, or NNX filters. The norms of their gradients and values in
    each step are reported as "grad_norm/<pattern>" and "param_norm/<pattern>"."""

    step: Function | None = None
    """A pure function `(state, batch) -> (state, sums)` in the place of the step that is made of
    model, loss and optimizer. It sees the whole `Batch`, as on one device; sums are numbers by name
    (their mean over the steps is reported), pairs `(sum, weight)`, or what a metric of that name
    computes with. The optimizer, if any, is what new states are made for. In the idiom of NNX:
    `flaxfit.modules.nnx_step`."""

    def __post_init__(self) -> None:
        self.__dict__.update(resolved(self))
        self.roles.check("TrainTask")

    def __repr__(self) -> str:
        return describe(self)

    @property
    def keeps_whole(self) -> bool:
        """Whether a batch is neither padded nor divided into parts, and so may be any pytree."""
        is_unpadded = self.step is not None or not self.pad
        return is_unpadded and self.accumulate == 1 and self.across is None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, where these have losses of their own or none."""
        return _outputs_of(self.loss)

    @functools.cached_property
    def roles(self) -> Roles:
        """The roles of the columns of a batch that is a mapping."""
        is_called = self.step is None and self.objective is None
        return _roles_of(self, is_called)


@dataclasses.dataclass(frozen=True, repr=False)
class EvalTask:
    """What to measure: a model, metrics and data.

    >>> EvalTask(lambda v, x, **_: x, ["mse"], [([1.0], [1.0])]).loss is None
    True
    """

    apply: Any
    """`apply(variables, *inputs)`, or a linen or nnx module, whose switches are set for
    evaluation."""
    metrics: Any
    """Metrics by name, or a sequence of names."""
    data: Data = None
    """Anything that can be passed over again and again: arrays, a list of batches, a loader."""
    _: dataclasses.KW_ONLY
    loss: Any = None
    """A loss to report as well, or its name; of several outputs one for each."""
    loss_weights: Any = None
    """The weights of the losses of several outputs, as of a `TrainTask`."""
    inputs: Names = None
    """The columns that the model is called with, as of a `TrainTask`."""
    targets: Names = None
    """The columns that are targets, as of a `TrainTask`."""
    weights: str | Mapping[str, str] | None = None
    """The column of weights, as of a `TrainTask`."""
    objective: Function | None = None
    """An objective to report, as of a `TrainTask`; it calls the model in evaluation."""
    companions: Any = None
    """The frozen models that the objective calls, as of a `TrainTask`. An `EvalLoop` among the
    callbacks of a loop shares the arrays of that loop if its task was given the same ones."""
    rngs: Sequence[str] = ()
    """The random streams of a stochastic evaluation; none by default."""
    precision: str | None = None
    """What the model computes in, as of a `TrainTask`."""
    pad: bool = True
    """Whether a batch may be padded with rows of weight 0, as of a `TrainTask`."""
    across: str | None = None
    """"batch" for a loss that compares the examples of a batch, as of a `TrainTask`."""
    penalty_in_loss: bool = False
    """Whether the reported loss includes the penalty, as of a `TrainTask`. What a function adds is
    measured if it takes `mutable`, as in training."""
    check_finite: bool = True
    """Whether NaN and infinite values are refused, as of a `TrainTask`."""

    def __post_init__(self) -> None:
        apply = as_apply("EvalTask", self.apply, train=False)
        check_precision("EvalTask", self.precision)
        if self.objective is not None:
            check_objective(self)
        companions = as_companions("EvalTask", self)
        loss = None if self.loss is None else as_loss(self.loss, self.loss_weights)
        metrics, rngs = as_metrics(self.metrics, loss), names_of(self.rngs)
        check_streams("EvalTask", rngs, apply)
        check_across(self.across)
        check_reports_penalty(self.penalty_in_loss)
        pad = self.pad and self.across is None
        self.__dict__.update(apply=apply, loss=loss, metrics=metrics, rngs=rngs, pad=pad)
        self.__dict__["companions"] = companions
        self.roles.check("EvalTask")

    def __repr__(self) -> str:
        return describe(self)

    @property
    def keeps_whole(self) -> bool:
        """Whether a batch is not padded, and so may be any pytree."""
        return not self.pad

    @functools.cached_property
    def roles(self) -> Roles:
        """The roles of the columns of a batch that is a mapping."""
        return _roles_of(self, self.objective is None)


def _roles_of(task: TrainTask | EvalTask, is_called: bool) -> Roles:
    """The roles of a task; where a function of the user's own calls the model, of any inputs."""
    call = inputs_of(task.apply) if is_called else None
    return Roles(task.inputs, task.targets, task.weights, call, _outputs_of(task.loss))


def _outputs_of(loss: object) -> tuple[str, ...]:
    return tuple(getattr(loss, "names", ()))


def module_of(task: TrainTask, state: PyTree) -> Any:
    """Returns the module of a task with copies of the weights of a state, in evaluation mode.

    The weights are their average where one is kept.

    Raises:
      ValueError: the task was made of functions, not of a module.
    """
    return module_with(task, jax.tree.map(jnp.copy, averaged_by(task, state).variables))


def module_with(task: TrainTask, variables: Variables) -> Any:
    """Returns the module of a task with these variables, in evaluation mode."""
    handle = handle_of(task.apply)
    if handle is None:
        raise ValueError(
            "The task was made of functions, so there is no module to return: give it a linen or "
            "nnx module, or use the weights in state.variables."
        )
    return handle.merged(variables)


def averaged_by(task: TrainTask, state: PyTree) -> PyTree:
    """Returns a state with the average of its parameters, if the task keeps one."""
    if not hasattr(state, "opt_state"):  # A state for inference.
        return state
    is_other = task.ema is None and has_ema(state)  # Of a run with other options.
    return averaged(state) if has_average(state) and not is_other else state


def with_collections(task: TrainTask, collections: PyTree, mutable: Any) -> TrainTask:
    """Returns a task with the `collections` and `mutable_collections` of a loop."""
    if not isinstance(task, TrainTask):
        raise TypeError(
            "A loop needs a task, flaxfit.TrainTask(apply, optimizer, loss, data), got "
            f"{type(task).__name__}."
        )
    changes = {}
    if collections is not None:
        if tuple(task.rngs) != ("dropout",):
            raise ValueError(f"Give either collections or the task's rngs ({task.rngs}), not both.")
        names = collections.get("apply", ()) if isinstance(collections, dict) else collections
        changes["rngs"] = tuple(names)
    if mutable is not None:
        if task.mutable is not None:
            raise ValueError("Give either mutable_collections or the task's mutable, not both.")
        changes["mutable"] = mutable
    return dataclasses.replace(task, **changes) if changes else task

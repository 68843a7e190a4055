"""TrainTask and EvalTask: what to train and what to measure, as plain descriptions."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flaxfit.data._roles import Names, Roles
from flaxfit.display import short_errors
from flaxfit.modules._switch import handle_of, inputs_of
from flaxfit.optim._averaged import averaged, has_average, has_ema
from flaxfit.task._options import resolved, resolved_for_evaluation
from flaxfit.task._repr import describe
from flaxfit.tree import Data, Function, PyTree, Variables, copied


class _Task:
    """The part that `TrainTask` and `EvalTask` have in common."""

    apply: Any
    loss: Any
    inputs: Names
    targets: Names
    weights: str | Mapping[str, str] | None
    objective: Function | None

    def __repr__(self) -> str:
        return describe(self)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, if losses are given by output; else empty."""
        return tuple(getattr(self.loss, "names", ()))

    @functools.cached_property
    def roles(self) -> Roles:
        """The roles of the columns of a batch that is a mapping."""
        # An objective or a custom step calls the model itself.
        is_called = self.objective is None and getattr(self, "step", None) is None
        call = inputs_of(self.apply) if is_called else None
        return Roles(self.inputs, self.targets, self.weights, call, self.outputs)


@dataclasses.dataclass(frozen=True, repr=False)
class TrainTask(_Task):
    """Describes what to train: a model, an optimizer, a loss and data, or a custom step and data.

    >>> import optax
    >>> task = TrainTask(lambda v, x, **_: x, optax.sgd(0.1), "mse", [([1.0], [1.0])])
    >>> task.rngs
    ('dropout',)

    Args:
      apply: `apply(variables, *inputs, rngs=, mutable=)`, or a Linen or NNX module, whose
        train/eval flags are set for training.
      optimizer: an Optax transformation, whose `update` receives the parameters, or an `Optimizer`,
        whose definition is taken. Clipping, freezing, averaging and loss scaling are wrapped around
        it; the states are those of `task.optimizer`.
      loss: `loss(*outputs, *targets)` or a name. It returns values of shape `(batch, ...)`
        (preferred: weights and padding are then exact), `(values, weights)`, either of these with
        an unweighted scalar penalty appended, or a scalar. Scalars are computed over the batch of
        all devices. A model with several outputs has one loss for each, by name or in their order:
        their weighted sum is trained, and each is reported as "<name>_loss". None: the model adds
        its own loss.
      data: anything that `flaxfit.data.as_stream` takes.
      metrics: metrics by name, or a sequence of names; measured on the outputs of the training
        step. For several outputs, a mapping from the name of an output to its metrics.
      loss_weights: the weights of the losses of several outputs, by name or in their order; 1 by
        default. A number multiplies every loss.
      inputs: the columns that the model is called with, for batches that are mappings: a name,
        several in the order of the call, or `{argument: column}`. None: the arguments of the call.
        Columns without a role are ignored.
      targets: the columns that are targets, in order, or by the names of outputs; `()` for none.
        None: the column with a usual name, such as "label".
      weights: the column of example or token weights, or a mapping from outputs to such columns.
      rngs: the random streams that `apply` receives, each with its own key in every step.
      mutable: the collections that a step may change; None: all but the parameters.
      pad: whether a batch may be padded with rows of weight 0. False for a loss that compares the
        examples of a batch with one another; it then receives the batch of all devices. If such a
        loss takes weights and targets, it needs `across="batch"`, as targets of weight 0 are
        otherwise replaced.
      objective: a loss that calls the model itself, in place of `loss`: `f(apply, batch, rngs)`,
        where `apply(*inputs)` is the model in training mode, which may be called any number of
        times, and `rngs` are the keys of the first call, which `apply(*inputs, rngs=rngs)` repeats.
        It returns values of shape `(batch, ...)`, `(values, aux)`, `(values, weights)` or `(values,
        weights, aux)`, where aux maps names to further numbers to report: values by example, with
        the weights of the objective, or pairs `(sum, weight)`. It replaces `loss`, `metrics` and
        `across`; all other options apply. An objective with a parameter `ema` receives the model
        with the average that the option `ema` keeps: it is called like `apply`, and no gradient
        flows through it, not even to its inputs. In evaluation, which measures one set of weights,
        it is the model with these.
      companions: frozen models that the objective receives by keyword, as functions `(*inputs) ->
        outputs` in evaluation mode: `{"teacher": (apply, variables)}`, `(Linen module, variables)`
        or an NNX module. The strategy places their variables once, like parameters; they are not
        constants of the compiled step, and are not trained, averaged or counted. What you write
        into an NNX module takes effect at the next checkpoint. Gradients flow through their inputs
        only.
      save_companions: whether checkpoints hold the variables of the companions. A loop that resumes
        from such a checkpoint takes these variables, else those of the task.
      across: "batch" for a loss that compares the examples of a batch with one another, such as a
        contrastive one: it sees the outputs and targets of all devices and of all `accumulate`
        parts at once, with a gradient to each. Implies `pad=False`.
      penalty_in_loss: whether the reported loss includes the penalty of the loss or of the model,
        as in Keras. The penalty is trained, and reported as "penalty", in any case.
      check_finite: whether NaN and infinite inputs and targets raise an error. False where they
        have a meaning, such as a missing label, that the model, the loss and the metrics handle.
      freeze: patterns of the paths of parameters that are not trained, or NNX filters, such as
        `nnx.Not(nnx.LoRAParam)`. No gradient is computed for them, and the optimizer never sees
        them.
      accumulate: the number of parts that each batch is computed in, one after another. The result
        is that of the whole batch, with the activations of only one part in memory. The loss must
        be one value per example that depends on that example alone; any other loss needs
        `across="batch"`, which computes the outputs twice.
      precision: the dtype that the model computes in: "bfloat16", or "float16" with dynamic loss
        scaling. Parameters, loss and metrics stay float32.
      clip_norm: the largest global norm of the gradients; larger gradients are scaled down to it.
      ema: the decay of an exponential moving average of the parameters, kept beside them in float32
        or better: after each step `average = ema * average + (1 - ema) * params`. So are batch
        statistics, the collection "batch_stats". See `flaxfit.optim.swap_ema`.
      ema_overwrite_frequency: with `ema`: set the parameters to their average every this many
        steps.
      skip_nonfinite: whether a step with a loss or gradients that are not finite leaves the whole
        state unchanged, and is counted in `metrics["skipped_steps"]`. Always so with float16.
      skip_above: how many standard deviations the loss of a step, or the norm of its gradients, may
        exceed the mean of the last 128 steps, such as 6.0. A step above this, or one that is not
        finite, leaves the state unchanged and is counted in `metrics["skipped_steps"]`.
      grads_hook: a pure function `(grads, state, sums) -> grads` between the gradients of the whole
        batch and the optimizer, for custom clipping, noise or projection. `grads` and
        `state.params` leave out frozen parameters; `sums` are those of the loss and the metrics.
        The norm of the result is reported as "hooked_grad_norm".
      example_grads_hook: a pure function `grads -> grads` on the gradient of each example, before
        their weighted mean is taken, such as the clipping of DP-SGD. The gradient of an example is
        that of the mean of its values. The gradients of all examples in one part of a batch on a
        device are in memory at once.
      norms: patterns of the paths of parameters, or NNX filters. The norms of their gradients and
        values in each step are reported as "grad_norm/<pattern>" and "param_norm/<pattern>".
      step: a pure function `(state, batch) -> (state, sums)` that replaces the step made of model,
        loss and optimizer. It sees the whole `Batch`, as on one device. `sums` maps names to
        numbers (their mean over the steps is reported), to pairs `(sum, weight)`, or to what a
        metric of that name computes with. The optimizer, if any, is what new states are made for.
        For NNX: `flaxfit.modules.nnx_step`.

    Raises:
      TypeError: `apply` is not a function or `optimizer` is not an optax transformation.
      ValueError: the name of a loss or a metric is unknown.
    """

    apply: Any = None
    optimizer: Any = None
    loss: Any = None
    data: Data = None
    metrics: Any = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    loss_weights: Any = None
    inputs: Names = None
    targets: Names = None
    weights: str | Mapping[str, str] | None = None
    rngs: Sequence[str] = ("dropout",)
    mutable: Any = None
    pad: bool = True
    objective: Function | None = None
    companions: Any = None
    save_companions: bool = False
    across: str | None = None
    penalty_in_loss: bool = False
    check_finite: bool = True
    freeze: Any = ()
    accumulate: int = 1
    precision: str | None = None
    clip_norm: float | None = None
    ema: float | None = None
    ema_overwrite_frequency: int | None = None
    skip_nonfinite: bool = False
    skip_above: float | None = None
    grads_hook: Function | None = None
    example_grads_hook: Function | None = None
    norms: Any = ()
    step: Function | None = None

    @short_errors
    def __post_init__(self) -> None:
        self.__dict__.update(resolved(self))
        self.roles.check("TrainTask")

    @property
    def keeps_whole(self) -> bool:
        """Whether a batch is neither padded nor divided into parts, and so may be any pytree."""
        is_unpadded = self.step is not None or not self.pad
        return is_unpadded and self.accumulate == 1 and self.across is None


@dataclasses.dataclass(frozen=True, repr=False)
class EvalTask(_Task):
    """Describes what to measure: a model, metrics and data.

    >>> EvalTask(lambda v, x, **_: x, ["mse"], [([1.0], [1.0])]).loss is None
    True

    Args:
      apply: `apply(variables, *inputs)`, or a Linen or NNX module, whose train/eval flags are set
        for evaluation.
      metrics: metrics by name, or a sequence of names.
      data: anything that can be iterated over repeatedly: arrays, a list of batches, a loader.
      loss: a loss to report as well, or its name; for several outputs, one for each.
      loss_weights: the weights of the losses of several outputs, as in `TrainTask`.
      inputs: the columns that the model is called with, as in `TrainTask`.
      targets: the columns that are targets, as in `TrainTask`.
      weights: the column of weights, as in `TrainTask`.
      objective: an objective to report, as in `TrainTask`; it calls the model in evaluation mode.
      companions: the frozen models that the objective calls, as in `TrainTask`. An `EvalLoop` among
        the callbacks of a loop shares the arrays of that loop if both tasks have the same
        companions.
      rngs: the random streams of a stochastic evaluation; none by default.
      precision: the dtype that the model computes in, as in `TrainTask`.
      pad: whether a batch may be padded with rows of weight 0, as in `TrainTask`.
      across: "batch" for a loss that compares the examples of a batch, as in `TrainTask`.
      penalty_in_loss: whether the reported loss includes the penalty, as in `TrainTask`. What a
        function adds is measured if it takes `mutable`, as in training.
      check_finite: whether NaN and infinite values raise an error, as in `TrainTask`.
    """

    apply: Any
    metrics: Any
    data: Data = None
    _: dataclasses.KW_ONLY
    loss: Any = None
    loss_weights: Any = None
    inputs: Names = None
    targets: Names = None
    weights: str | Mapping[str, str] | None = None
    objective: Function | None = None
    companions: Any = None
    rngs: Sequence[str] = ()
    precision: str | None = None
    pad: bool = True
    across: str | None = None
    penalty_in_loss: bool = False
    check_finite: bool = True

    def __post_init__(self) -> None:
        self.__dict__.update(resolved_for_evaluation(self))
        self.roles.check("EvalTask")

    @property
    def keeps_whole(self) -> bool:
        """Whether a batch is not padded, and so may be any pytree."""
        return not self.pad


def module_of(task: TrainTask, state: PyTree) -> Any:
    """Returns the module of a task with copies of the weights of a state, in evaluation mode.

    The weights are their average where one is kept.
    """
    return module_with(task, copied(averaged_by(task, state).variables))


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
    is_other = task.ema is None and has_ema(state)  # The average is of a run with other options.
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

"""The pure steps without a gradient: evaluation and prediction."""

from collections.abc import Callable, Sequence

from flaxfit.data._batch import Batch, call, checked_batch
from flaxfit.step._forward import forward_eval
from flaxfit.step._model_call import as_outputs
from flaxfit.step._random import eval_key, rngs_of
from flaxfit.step._replicas import replicas_of
from flaxfit.task import EvalTask, in_precision
from flaxfit.tree import ArrayLike, Function, PyTree, Sums


def make_eval_step(
    task: EvalTask, *, axis_name: str | None = None, virtual_replicas: int | None = None
) -> Callable[..., dict[str, Sums]]:
    """Makes the pure evaluation step: `(state, batch, position=0) -> sums`.

    With `rngs`, the keys depend on the position of the batch in the data. A collected metric
    returns its rows of the batch instead of sums.

    >>> import numpy as np
    >>> from flaxfit import Batch, EvalTask, InferenceState
    >>> task = EvalTask(lambda v, x: v["params"] * x, ["mse"])
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> batch = Batch((np.ones(4, np.float32),), (np.zeros(4, np.float32),))
    >>> sums = make_eval_step(task)(state, batch)
    >>> task.metrics["mse"].compute(sums["mse"])
    9.0

    Args:
      task: an `EvalTask`.
      axis_name: the mapped axis to reduce over, if the step runs once per replica.
      virtual_replicas: as in `make_train_step`.
    """

    collecting = [name for name, metric in task.metrics.items() if metric.max_rows is not None]

    def eval_step(state: PyTree, batch: Batch, position: ArrayLike = 0) -> dict[str, Sums]:
        checked_batch(batch)
        replicas = replicas_of(axis_name, virtual_replicas, state.step)

        def sums_of(replica: ArrayLike, part: Batch) -> dict[str, Sums]:
            key = eval_key(state, position, replica) if task.rngs else None
            return forward_eval(task, state, part, key, replicas).sums

        found = replicas.each(sums_of)(batch)
        rows = {name: found.pop(name) for name in collecting}
        return (replicas.sum(found) if found else {}) | replicas.joined(rows)

    return eval_step


def make_predict_step(
    apply: Function,
    *,
    precision: str | None = None,
    rngs: Sequence[str] = (),
    axis_name: str | None = None,
    virtual_replicas: int | None = None,
) -> Function:
    """Makes the pure prediction step: `(state, batch, position=0) -> outputs`.

    >>> import numpy as np
    >>> from flaxfit import Batch, InferenceState
    >>> state = InferenceState(np.int32(0), np.float32(3), {})
    >>> float(make_predict_step(lambda v, x: v["params"] * x)(state, Batch((np.float32(2),))))
    6.0

    Args:
      apply: `apply(variables, *inputs)`, such as the `apply` of a module in evaluation mode.
      precision: the dtype to compute in, as in `TrainTask`.
      rngs: the random streams to supply, as in `EvalTask`.
      axis_name: the mapped axis, if the step runs once per replica; only `rngs` depend on it.
      virtual_replicas: as in `make_train_step`; only `rngs` depend on it.
    """
    apply = in_precision(apply, precision)

    def predict_step(state: PyTree, batch: Batch, position: ArrayLike = 0) -> PyTree:
        checked_batch(batch)

        def outputs_of(replica: ArrayLike, inputs: PyTree) -> PyTree:
            options = {"rngs": rngs_of(rngs, eval_key(state, position, replica))} if rngs else {}
            outputs = call(apply, state.variables, inputs, **options)
            as_outputs(outputs)
            return outputs

        if not rngs:
            return outputs_of(0, batch.inputs)
        replicas = replicas_of(axis_name, virtual_replicas, state.step)
        outputs = replicas.each(outputs_of)(batch.inputs)
        return replicas.joined(outputs)

    return predict_step


def evaluated(state: PyTree, rngs: Sequence[str], owner: str) -> PyTree:
    """Returns the part of a state that evaluation needs, with the random key if there are streams.

    Raises:
      ValueError: there are streams, and the state has no key.
    """
    if not rngs:
        return state.for_inference() if hasattr(state, "for_inference") else state
    if not hasattr(state, "key"):
        raise ValueError(
            f"{owner} needs the random key of a TrainState, got an {type(state).__name__}: pass "
            "the training state, or leave the random streams out."
        )
    return state.replace(opt_state=())

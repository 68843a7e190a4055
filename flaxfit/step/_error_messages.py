"""Explains JAX's errors in terms of a training run; the original error stays as the cause."""

import contextlib
import functools
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.errors import ScopeParamShapeError

from flaxfit.data._batch import n_examples
from flaxfit.display import count, plural, size
from flaxfit.tree import Function, PyTree, explain_debugging

_PACKAGE = Path(__file__).parents[1]

_ASKED_FOR_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_TRACED = (
    "needs a concrete value, but the step is being traced. Return the array instead of "
    "float(array) or np.asarray(array), use jax.numpy instead of numpy and jnp.where instead of "
    "`if`. To see values, use jax.debug.print, or print in debug mode (TrainLoop(..., debug=True), "
    "Model(..., run_eagerly=True))."
)

_IN_THE_GRADIENT = (
    "needs the concrete value of an array that is being differentiated. Pass "
    "jax.lax.stop_gradient(array) to float or np.asarray; print(array) shows the value."
)

_OF_AN_EXAMPLE = (
    "needs the concrete value of an array of one example, but example_grads_hook computes the "
    "gradients of all examples at once. To see it, use jax.debug.print. Use jax.numpy instead of "
    "numpy, and jnp.where instead of `if`."
)

_OTHER_ARGUMENTS = "positional argument|unexpected keyword argument"

_NO_SWITCH = 'Parameter "(deterministic|use_running_average)" must be passed'
_SWITCH = (
    "A layer of the model needs {0}=, because it behaves differently in training and evaluation. "
    "Add an argument `train` to the call and pass {0}=not train to the layer; flaxfit sets `train`."
)

_OUT_OF_MEMORY = """\
The training step ran out of memory by step {step}, with batches of {examples}, and {size} of \
parameters and optimizer state. To save memory:
  a smaller batch, such as batch_size={half} (Model.find_batch_size finds the largest that fits)
  accumulate=2: the same update, computed in two halves of each batch
  precision='bfloat16'
  rematerialization of the large layers: nn.remat(Layer), nnx.remat, jax.checkpoint
  strategy=Sharded.fsdp(): parameters and optimizer state divided between the devices
On a GPU, JAX uses three quarters of the memory; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 raises that."""


@contextlib.contextmanager
def tracers_explained() -> Iterator[None]:
    """Explains errors of user code that needs the concrete value of a tracer."""
    try:
        yield
    except TypeError as error:
        explanation = _of_tracers(error, _TRACED)
        if explanation is None:
            raise
        raise TypeError(explanation) from error


@contextlib.contextmanager
def calls_explained(inputs: PyTree, targets: PyTree = ()) -> Iterator[None]:
    """Explains errors of a model, a loss or a metric by the arguments of their calls.

    `inputs` and `targets` are those of a batch, or their shapes and dtypes.

    Raises:
      ValueError: the parameters do not fit the shape of the inputs, or a layer lacks its train/eval
        flag.
      TypeError: a function was called with the wrong arguments. Any other error of user code gets a
        note with the shapes.
    """
    try:
        yield
    except ScopeParamShapeError as error:
        raise ValueError(
            f"The model cannot take inputs of {_shapes(inputs)}: its parameters expect other "
            "shapes. Pass inputs of the original shape, or create a new model. "
            + (
                "To pass a single example, make a batch of it: x[None]. "
                if any(x.ndim == 1 for x in jax.tree.leaves(inputs))
                else ""
            )
            + re.sub(r" \(https?:\S*\)$", "", str(error))
        ) from error
    except Exception as error:
        if (field := re.match(_NO_SWITCH, str(error))) is not None:
            raise ValueError(_SWITCH.format(field[1])) from error
        called = (
            f"The model is called with the inputs, of {_shapes(inputs)} (a tuple or a list of "
            "arrays holds several inputs)"
        )
        if isinstance(inputs, Mapping):
            called = (
                f"The model is called with the inputs by name, {', '.join(inputs)}, of "
                f"{_shapes(inputs)} (targets are the y of a batch {{'x': .., 'y': ..}} or (x, y); "
                "of other mappings name them, inputs=.., targets=.. of the task or Model)"
            )
        if targets:
            called += f"; the loss and metrics with outputs and targets, of {_shapes(targets)}"
            called += ", outputs first"
        is_call = isinstance(error, TypeError) and re.search(_OTHER_ARGUMENTS, str(error))
        if is_call and error.__cause__ is None:
            raise TypeError(
                f"The model, the loss or a metric was called with the wrong arguments: {error}. "
                f"{called}."
            ) from error
        if not _is_from_flaxfit(error) and not _is_of_a_name(error):
            error.add_note(f"{called}.")
        raise


def _is_of_a_name(error: Exception) -> bool:
    """Returns whether a name is missing for reasons that have nothing to do with the arguments."""
    given = getattr(error, "obj", None)  # None: unknown, as in errors of tracers.
    is_other = not hasattr(given, "shape") and not isinstance(given, Mapping | Sequence)
    return isinstance(error, NameError) or (given is not None and is_other)


def explained(method: Function) -> Function:
    """Wraps a method of a stepper to explain tracing and memory errors."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            explain(error, self)
            raise

    return call


def explain(error: Exception, stepper: Any) -> None:
    """Raises an explanation of an error, if there is one.

    Raises:
      TypeError: user code kept a tracer, or read its value.
      MemoryError: the devices ran out of memory; lists ways to save memory.
      RuntimeError: the step used a deleted array.
    """
    explain_debugging(error)
    if isinstance(error, TypeError):
        explanation = _of_tracers(error, _advice_on_values(stepper))
        if explanation is not None:
            raise TypeError(explanation) from error
    elif isinstance(error, jax.errors.JaxRuntimeError) and re.search(
        "RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE
    ):
        raise MemoryError(_advice(stepper)) from error
    elif isinstance(error, RuntimeError) and "has been deleted" in str(error):
        raise RuntimeError(
            "An array that the step needs was deleted. If an exception interrupted an earlier "
            "step, for example in a signal handler or for lack of memory, the training state was "
            "lost: continue from a checkpoint, loop.restore(checkpoint). Otherwise your code "
            "deleted or donated an array of the data."
        ) from error


def _advice_on_values(stepper: Any) -> str:
    """Returns advice for a step that needs the value of a tracer."""
    if not stepper.strategy.runs_eagerly:
        return _TRACED
    return _IN_THE_GRADIENT if stepper.task.example_grads_hook is None else _OF_AN_EXAMPLE


def _of_tracers(error: TypeError, advice: str) -> str | None:
    """Explains a tracing error; None for other errors."""
    who = f"The model, the loss or a metric{_place(error)}"
    # If JAX has made a constant of the kept tracer, the compiled call complains of its inputs.
    if isinstance(error, jax.errors.UnexpectedTracerError) or re.match(
        r"Computation compiled for \d+ inputs but called with", str(error)
    ):
        return (
            f"{who} kept an array of an earlier call, in an attribute, a list or a global. Traced "
            "arrays are invalid after the step has been traced. Return it instead: a metric "
            "returns one value per example, a loss returns (values, penalty), a module keeps "
            "state in a variable (self.variable, nnx.Variable)."
        )
    if isinstance(error, _ASKED_FOR_A_VALUE):
        return f"{who} {advice}"
    return None


def _shapes(tree: PyTree) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in jax.tree.leaves(tree)]
    return f"shape{'s' * (len(shapes) != 1)} {', '.join(shapes)}"


def _advice(stepper: Any) -> str:
    shapes = stepper.feed.shapes  # None before the first batch.
    n = 0 if shapes is None else n_examples(shapes)
    state = jax.tree.leaves((stepper.state.params, stepper.state.opt_state))
    n_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in state)
    devices = plural(len(stepper.strategy.devices), "device")
    return _OUT_OF_MEMORY.format(
        step=count(max(stepper.step, 1)),
        examples=f"{plural(n, 'example')} on {devices}",
        size=size(n_bytes),
        half=max(n // 2, 1),
    )


def _is_from_flaxfit(error: BaseException) -> bool:
    """Returns whether flaxfit itself raised an error, which then needs no note."""
    *_, last = None, *traceback.walk_tb(error.__traceback__)
    return last is None or Path(last[0].f_code.co_filename).is_relative_to(_PACKAGE)


def _place(error: BaseException) -> str:
    """Returns the innermost line of user code that raised an error, outside of packages."""
    library = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]
    own = str(_PACKAGE)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*library, own, "<")):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""

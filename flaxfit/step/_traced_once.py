"""TracedOnce: a model whose Python code runs once for all programs that call it alike."""

import contextlib
import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType

from flaxfit.modules._handle import with_handle
from flaxfit.modules._switch import handle_of
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._types import Function, PyTree

_NO_MESH = jax.sharding.AbstractMesh((), ())

Task = TypeVar("Task", bound=TrainTask | EvalTask)


class TracedOnce:
    """Calls the model of a task by what its code was traced to, where that is known.

    Inspection traces the model, and so does each program. The first of them runs the code of the
    model; the others repeat its operations, and differentiate or map these as they would the code.

    Code that keeps a traced array runs each time: a loss may read the array in the same pass, and
    where the code itself reads it in a later one, JAX finds that out. So does the code that an
    objective calls, which may change between two calls what that code reads.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def forget(self) -> None:
        """Forgets what was traced."""
        self._known = []

    def __call__(self, task: Task) -> Task:
        """Returns a task with such a model, or the task itself where its code runs each time."""
        function = task.apply
        if function is None or task.objective is not None:
            return task

        @functools.wraps(function)
        def apply(*inputs: PyTree, **named: PyTree) -> PyTree:
            return self._call(function, inputs, named)

        if (handle := handle_of(function)) is not None:
            with_handle(apply, handle)
        bound = copy.copy(task)  # `dataclasses.replace` would resolve all fields again.
        bound.__dict__["apply"] = apply
        return bound

    def _call(self, function: Function, inputs: PyTree, named: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten((inputs, named))
        arrays = [leaf for leaf in leaves if isinstance(leaf, Tracer)]
        others = [None if isinstance(leaf, Tracer) else leaf for leaf in leaves]
        # The code may read the values of arrays that are not traced, or are run eagerly.
        has_values = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in others)
        if has_values or not arrays or jax.config.jax_disable_jit:
            return function(*inputs, **named)
        with _without_replicas(arrays) as shapes:
            traced = self._traced(_Kind(function, structure, others), shapes)
        if traced is None:
            return function(*inputs, **named)
        results = jaxpr_as_fun(traced.jaxpr)(*arrays)
        result = jax.tree.unflatten(jax.tree.structure(traced.out_info), results)
        return jax.tree.map(_unwrapped, result, is_leaf=lambda each: isinstance(each, _Other))

    def _traced(self, kind: "_Kind", shapes: list[Any]) -> Any:
        """Returns the traced program of a kind of call; None if its code must run each time.

        JAX keeps the programs by shapes and context.
        """
        known = next((known for known in self._known if known.kind == kind), None)
        if known is None:
            known = _Known(kind, jax.jit(_flat(kind)))
            self._known.append(known)
        if known.flat is None:
            return None
        with _watched() as kept:  # The code runs again for other shapes.
            traced = known.flat.trace(*shapes)
        # A loss may read what is kept; what the code closes over may be of the program around it.
        if kept or len(traced.jaxpr.in_avals) != len(shapes):
            known.flat = None
            return None
        return traced


@dataclasses.dataclass
class _Kind:
    """The common properties of calls that one trace serves."""

    function: Function
    structure: Any
    """The structure of its arguments."""
    others: list[Any]
    """The arguments that are not arrays; None for each array."""
    text: str = dataclasses.field(init=False)
    """Tells 1, True and 1.0 apart, and 0.0 and -0.0, which are equal; also within objects."""

    def __post_init__(self) -> None:
        self.text = f"{self.others} {self.structure}"


@dataclasses.dataclass(eq=False)
class _Known:
    """A kind of call that was seen before."""

    kind: _Kind
    flat: Any
    """The jitted function of the arrays alone; None if its code must run each time."""


class _Other:
    """A part of a result that is not an array, as a part of its structure."""

    def __init__(self, value: Any):
        self.value = value


jax.tree_util.register_pytree_node(_Other, lambda each: ((), each.value), lambda x, _: _Other(x))


def _unwrapped(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Other) else leaf


def _flat(kind: _Kind) -> Function:
    """The function of its traced arrays alone."""

    def flat(*arrays: jax.Array) -> PyTree:
        left = iter(arrays)
        leaves = [next(left) if other is None else other for other in kind.others]
        inputs, named = jax.tree.unflatten(kind.structure, leaves)
        result = kind.function(*inputs, **named)
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _Other(x), result)

    return flat


@contextlib.contextmanager
def _without_replicas(arrays: list[Any]) -> Iterator[list[Any]]:
    """Leaves the mesh of a program for each replica, and yields what the arrays are outside.

    Only names of axes mean something there, and these stay. An inspection has no such mesh.
    """
    kinds = {*jax.sharding.get_abstract_mesh().axis_types}
    if AxisType.Explicit in kinds:  # The types of arrays say how they are divided.
        yield arrays
        return
    is_plain = kinds <= {AxisType.Manual}
    with jax.sharding.use_abstract_mesh(_NO_MESH) if is_plain else contextlib.nullcontext():
        yield [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in arrays]


@contextlib.contextmanager
def _watched() -> Iterator[list[Tracer]]:
    """Yields a list which, after the block, holds the traced arrays of the block that are kept."""
    kept: list[Tracer] = []
    was_enabled = gc.isenabled()
    # Without collections within the block, its objects, and no others, are the youngest.
    gc.disable()
    gc.collect(0)
    try:
        yield kept
        young = gc.get_objects(generation=0)
        traced = [weakref.ref(each) for each in young if isinstance(each, Tracer)]
        del young
        gc.collect(0)  # Modules and their scopes refer to one another.
        kept += [each for ref in traced if (each := ref()) is not None]
    finally:
        if was_enabled:
            gc.enable()

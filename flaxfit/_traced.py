"""Traced: a model that Python runs once for inputs of like shapes, for however many programs."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


class Traced:
    """Calls a pure function of arrays, and repeats what it did wherever like ones are given.

    For the Python of a large model takes seconds, and the model stands in what looks at the first
    batch, in the training step, and again in one that takes several steps at once. What it did is
    known as a jaxpr, whose operations JAX traces anew wherever it is repeated: nothing but the
    Python is left out.

    A mapped axis that the function names must be as large wherever it is called.

    >>> seen = []
    >>> double = Traced(lambda x: seen.append(x) or 2 * x)
    >>> jax.jit(double)(1.0), jax.jit(jax.grad(double))(3.0), len(seen)
    (Array(2., dtype=float32, weak_type=True), Array(2., dtype=float32, weak_type=True), 1)

    Args:
      function: of trees of arrays, and of other arguments, which are part of what it did.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._known: dict[Hashable, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the function returns, of arrays."""
        leaves, structure = jax.tree.flatten((arguments, options))
        is_array = [hasattr(leaf, "dtype") for leaf in leaves]
        arrays = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]
        others = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if not is_one]
        kinds = [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, arrays)]
        key = (structure, *is_array, *others, *kinds)
        try:
            known = self._known.get(key)
        except TypeError:  # Some of the others have no hash.
            return self._function(*arguments, **options)
        if known is None:

            def call(*arrays: Any) -> Any:
                own = {True: iter(arrays), False: iter(others)}
                arguments, options = structure.unflatten([next(own[is_one]) for is_one in is_array])
                return self._function(*arguments, **options)

            shapes = [jax.ShapeDtypeStruct(*kind[:2], weak_type=kind[2]) for kind in kinds]
            jaxpr, result = jax.make_jaxpr(call, return_shape=True)(*shapes)
            known = self._known[key] = jaxpr_as_fun(jaxpr), jax.tree.structure(result)
        repeat, form = known
        return form.unflatten(repeat(*arrays))


def with_traced_model(task: Any) -> Any:
    """The task with a model that is traced once.

    Loss and metrics are traced for each program: one that keeps an array of an earlier call, which
    can be of no use to it, is found out by that.
    """
    return task if task.apply is None else dataclasses.replace(task, apply=Traced(task.apply))


def takes_whole_batches(strategy: Any) -> bool:
    """Whether the programs of a strategy see each batch whole, as what looks at the first one."""
    return strategy.axis_name is None and getattr(strategy, "virtual_replicas", None) is None

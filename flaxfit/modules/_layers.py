"""Finds the layers that a call of a Linen or NNX module runs, and their output shapes."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from flaxfit.tree import Function, PyTree, shapes_of


class Layer(NamedTuple):
    """A layer of a module."""

    path: str
    """The path in the module, as for parameters; "" for the module itself."""
    kind: str
    """The name of its class."""
    output: PyTree
    """The shapes and dtypes of the outputs of its first call."""


def layers_of(module: Any, call: Function, *shapes: PyTree) -> tuple[list[Layer], PyTree]:
    """Returns the layers that a call runs, in the order in which they begin, and its outputs.

    `call(*shapes)` calls the Linen or NNX module; it is traced, not run.
    """
    found: dict[str, Layer] = {}

    def watched(path: str | None, kind: str, function: Callable[[], PyTree]) -> PyTree:
        if path is None or path in found:
            return function()
        found[path] = Layer(path, kind, ())  # Layers are in the order in which they begin.
        output = function()
        found[path] = Layer(path, kind, shapes_of(output))
        return output

    watch = _watching_linen if isinstance(module, nn.Module) else _watching_nnx
    with watch(module, watched):
        output = jax.eval_shape(call, *shapes)
    return list(found.values()), output


@contextlib.contextmanager
def _watching_linen(module: nn.Module, watched: Function) -> Iterator[None]:
    def intercept(function: Function, given: tuple, named: dict, context: Any) -> PyTree:
        one = context.module
        path = "/".join(one.path) if context.method_name == "__call__" else None
        return watched(path, type(one).__name__, lambda: function(*given, **named))

    with nn.intercept_methods(intercept):
        yield


@contextlib.contextmanager
def _watching_nnx(module: Any, watched: Function) -> Iterator[None]:
    """Replaces `__call__` of the layers' classes, as each call merges new instances."""
    from flax import nnx

    from flaxfit.modules._nnx_factory import abstract_of
    from flaxfit.modules._nnx_modes import copied

    paths: dict[int, str] = {}

    def watching(function: Function) -> Function:
        @functools.wraps(function)
        def call(self: Any, *given: PyTree, **named: PyTree) -> PyTree:
            # Find the paths at the outermost call: `apply` merges new instances each time.
            is_outermost = not paths
            if is_outermost:
                for path, one in nnx.iter_modules(self):
                    paths.setdefault(id(one), "/".join(map(str, path)))
            try:
                path, kind = paths.get(id(self)), type(self).__name__
                return watched(path, kind, lambda: function(self, *given, **named))
            finally:
                if is_outermost:
                    paths.clear()

        return call

    kinds = {type(part) for part in copied(abstract_of(module))}
    owners = {owner for kind in kinds for owner in kind.__mro__ if "__call__" in vars(owner)}
    owners -= {owner for owner in owners if not issubclass(owner, nnx.Module)}
    originals = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, function in originals.items():
            type.__setattr__(owner, "__call__", watching(function))
        yield
    finally:
        for owner, function in originals.items():
            type.__setattr__(owner, "__call__", function)

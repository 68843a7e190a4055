"""NNX models: instances and factories, and the modules that factories make."""

import functools
import inspect
import sys
from typing import Any

from flaxfit.tree import Function, Rngs, parameters


def is_nnx(model: object) -> bool:
    """Returns whether a model is an NNX module, or possibly a factory: a function of only rngs."""
    # A user of NNX has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or isinstance(model, nnx.Module):
        return nnx is not None
    maker = _maker(model)
    found = parameters(maker)
    required = {
        p.name
        for p in found.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    takes_rngs_alone = required <= {"rngs"} if "rngs" in found else len(required) == 1
    return maker is not None and takes_rngs_alone


def is_factory(given: object) -> bool:
    """Returns whether this makes an NNX module, and cannot be an `init` or an `apply`.

    A factory is a `functools.partial` of a class, or a function with the only argument `rngs`.
    """
    if not is_nnx(given):
        return False
    if isinstance(given, functools.partial):
        return isinstance(given.func, type)
    return inspect.isfunction(given) and [*parameters(given)] == ["rngs"]


def make(model: Any, rngs: Rngs) -> Any:
    """Calls a factory with `nnx.Rngs`; returns an instance unchanged."""
    from flax import nnx

    from flaxfit.modules import _nnx_state as states

    made = model
    if is_nnx(model) and not isinstance(model, nnx.Module):
        is_named = "rngs" in parameters(_maker(model))
        # A strategy shards by names of dimensions later; NNX would ask for a mesh now.
        with nnx.use_eager_sharding(False):
            made = model(rngs=rngs) if is_named else model(rngs)
    if isinstance(made, nnx.Module):
        states.mark_arrays(made)
        return made
    raise TypeError(
        "from_nnx needs an instance of an NNX module, or a function that makes one of its rngs "
        f"alone, got {model!r:.60}: pass `lambda rngs: Module(..., rngs=rngs)`."
    )


def _maker(model: object) -> Function | None:
    """Returns a function with a factory's signature, which a module's metaclass hides."""
    from flax import nnx

    if isinstance(model, functools.partial):
        maker = _maker(model.func)
        return maker and functools.partial(maker, *model.args, **model.keywords)
    if isinstance(model, type):
        initializer: Any = model.__init__
        return functools.partial(initializer, None) if issubclass(model, nnx.Module) else None
    return model if inspect.isroutine(model) else None


def abstract_of(model: Any) -> Any:
    """Returns an instance unchanged, or the shapes of the module that a factory makes."""
    from flax import nnx

    is_instance = isinstance(model, nnx.Module)
    return model if is_instance else nnx.eval_shape(lambda: make(model, nnx.Rngs(0)))

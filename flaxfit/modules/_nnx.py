"""from_nnx: an nnx module as `(init, apply)`, its variables as plain dicts of arrays."""

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.scope import CollectionFilter, in_filter

from flaxfit.modules._flags import call_defaults, call_flags, check_switches, parameters, switches
from flaxfit.modules._functions import GivenInit, ModelFunctions, Names, check_losses
from flaxfit.modules._handle import ModuleHandle, module_in, with_handle
from flaxfit.tree._types import Function, PyTree, Rngs, Variables


def from_nnx(
    model: Any,
    *,
    train: bool | None = None,
    call: Function | None = None,
    losses: Names = (),
    **modes: Any,
) -> ModelFunctions:
    """Makes a model of an nnx module, or of a factory `(rngs) -> module`.

    Its variables become `{"params": ..., "batch_stats": ..., ...}`, one collection per type of
    variable. A shared variable is held once; arrays that are not variables are "constants". Random
    states are not among them: every call gets its keys by `rngs`, and each stream of each layer
    draws its own numbers. A call that has an argument `rngs` is given an `nnx.Rngs` of these keys,
    and None where there are none, as in evaluation. Names of axes (`nnx.with_partitioning`) become
    collections `params_axes` and so on, which `init_state` splits off.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> init, apply = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> variables = init(jax.random.key(0), jnp.ones((1, 2)))
    >>> apply(variables, jnp.ones((1, 2))).shape
    (1, 3)

    Args:
      model: an instance, whose present weights `init` returns, or a factory.
      train: True or False sets the switches named `train`, `training`, `is_training`,
        `deterministic` or `use_running_average`: those of layers, attributes of your own modules
        that are a bool or None, and an argument of the model's call.
      call: `(module, *inputs) -> outputs`, to call instead of the module itself.
      losses: types of variables, or their names, whose values are terms of the loss, besides
        the type named "losses".
      **modes: further switches to set in the layers, such as `decode`.

    Raises:
      TypeError: it is neither an nnx module nor a function that makes one of its rngs alone.
      ValueError: no part of the module has a mode. When `apply` is called: the model draws random
        numbers without a key, or leaves no values of a type in `losses`.
      TypeError: the call takes `rngs` by position alone. When `apply` is called: it returns a
        module.
    """
    from flax import nnx

    from flaxfit.modules import _nnx_state as states

    is_instance = isinstance(model, nnx.Module)
    abstract = model if is_instance else nnx.eval_shape(lambda: make(model, nnx.Rngs(0)))
    if unknown := states.unknown_modes(abstract, modes):
        raise ValueError(
            f"No layer of the model has {', '.join(unknown)}: a mode is an attribute that is a "
            "bool or None, or an argument of a layer's set_view."
        )
    takes_rngs = _takes_rngs(abstract.__call__ if call is None else call)
    given, arguments = modes, {}
    if train is not None:
        defaults = call_defaults(abstract.__call__) if call is None else {}
        found = {**states.attributes_of(abstract), **defaults}
        check_switches({n: found[n] for n in found if n not in modes}, type(abstract).__name__)
        modes = {**switches(train), **modes}
        arguments = {} if call else call_flags(abstract.__call__, train)
    names = states.names_of(losses)
    graph, random, template = states.split(abstract, modes, names)
    axes = states.axes_of(abstract, names)

    def variables_of(module: nnx.Module) -> Variables:
        return {**states.persistent(states.variables_of(module, names)), **axes}

    def init(rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        return variables_of(make(model, _rngs(rngs)))

    def apply(
        variables: Variables,
        *inputs: PyTree,
        rngs: Rngs = None,
        mutable: CollectionFilter = False,
        **named: PyTree,
    ) -> PyTree:
        def run(streams: nnx.State) -> tuple[PyTree, nnx.Module]:
            module = nnx.merge(graph, streams, states.filled(template, variables, names))
            function = module if call is None else functools.partial(call, module)
            keys = {"rngs": states.rngs_of_call(rngs)} if takes_rngs else {}
            return function(*inputs, **{**keys, **arguments, **named}), module

        streams = states.keyed(random, rngs)
        unused = states.counts(streams)
        outputs, module = run(streams)
        used = states.counts(module)
        drawn = [stream for stream in used if used[stream] is not unused.get(stream)]
        is_keyless = rngs is None or (isinstance(rngs, Mapping) and not rngs)
        if is_keyless and drawn:
            if not modes.get("deterministic"):
                raise ValueError(
                    f"The model draws random numbers (from {', '.join(drawn)}), but the call was "
                    "given no key: pass rngs={'dropout': key}, or make it by "
                    "from_nnx(..., train=False)."
                )
            # `nnx.scan` and `nnx.split_rngs` change the states without any effect on the outputs.
            _check_unused(states.streams_used(lambda each: run(each)[0], streams))
        if module_in(outputs) is not None:
            raise TypeError(
                f"The call of {type(module).__name__} returned a module: return the outputs alone. "
                "What the call changes in the module is kept."
            )
        if mutable is False:
            return outputs
        updates = states.variables_of(module, names)
        if in_filter(mutable, "losses"):
            check_losses(names, states.collections_of(module))
        return outputs, {name: tree for name, tree in updates.items() if in_filter(mutable, name)}

    def merged(variables: Variables) -> nnx.Module:
        evaluation = {**switches(train=False), **given}
        graph, random, template = states.split(abstract, evaluation, names)
        streams = states.keyed(random, jax.random.key(0))
        return nnx.merge(graph, streams, states.filled(template, variables, names))

    starts = GivenInit(lambda: variables_of(model)) if is_instance else init
    handle = ModuleHandle(
        model,
        starts,
        merged,
        functools.partial(states.assign, model, losses=names) if is_instance else None,
        functools.partial(states.selected, abstract),
        None if takes_rngs else states.names_of_streams(random),
    )
    return ModelFunctions(starts, with_handle(apply, handle))


def update_nnx(model: Any, variables: PyTree, *, losses: Names = ()) -> None:
    """Writes copies of trained variables into an nnx instance, such as the one that you trained.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> update_nnx(layer, {"params": {"kernel": jnp.ones((1, 1)), "bias": jnp.ones(1)}})
    >>> float(layer(jnp.ones(1))[0])
    2.0

    Args:
      model: the instance that `from_nnx` was given.
      variables: such as `model.state.variables`.
      losses: as passed to `from_nnx`; such variables are not changed.

    Raises:
      TypeError: the model is not an instance of an nnx module; the variables are no mapping.
      ValueError: the variables do not fit the model, which is not changed then.
    """
    from flax import nnx

    from flaxfit.modules import _nnx_state as states

    if not isinstance(model, nnx.Module):
        raise TypeError(f"update_nnx needs an instance of an nnx module, got {model!r:.60}.")
    if not isinstance(variables, Mapping):
        raise TypeError(
            "update_nnx needs variables by collection, such as model.state.variables, got "
            f"{type(variables).__name__}."
        )
    states.assign(model, jax.tree.map(jnp.copy, variables), states.names_of(losses))


def is_nnx(model: object) -> bool:
    """Whether a model is an nnx module or may be a factory of one, a function of its rngs alone."""
    # A user of nnx has imported it; nobody else should pay for its import.
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


def make(model: Any, rngs: Rngs) -> Any:
    """The module that a factory makes of these `nnx.Rngs`, or the instance itself."""
    from flax import nnx

    from flaxfit.modules import _nnx_state as states

    made = model
    if is_nnx(model) and not isinstance(model, nnx.Module):
        is_named = "rngs" in parameters(_maker(model))
        # A strategy shards by names of dimensions later; nnx would ask for a mesh now.
        with nnx.use_eager_sharding(False):
            made = model(rngs=rngs) if is_named else model(rngs)
    if isinstance(made, nnx.Module):
        states.mark_arrays(made)
        return made
    raise TypeError(
        "from_nnx needs an instance of an nnx module, or a function that makes one of its rngs "
        f"alone, got {model!r:.60}: pass `lambda rngs: Module(..., rngs=rngs)`."
    )


def _maker(model: object) -> Function | None:
    """A function with the signature of a factory, which the metaclass of a module hides."""
    from flax import nnx

    if isinstance(model, functools.partial):
        maker = _maker(model.func)
        return maker and functools.partial(maker, *model.args, **model.keywords)
    if isinstance(model, type):
        initializer: Any = model.__init__
        return functools.partial(initializer, None) if issubclass(model, nnx.Module) else None
    return model if inspect.isroutine(model) else None


def _takes_rngs(function: Function) -> bool:
    """Whether a call has an argument `rngs`."""
    found = parameters(function).get("rngs")
    if found is not None and found.kind == found.POSITIONAL_ONLY:
        raise TypeError("The call takes rngs by position alone: remove the '/' behind it.")
    return found is not None


def _rngs(rngs: Rngs) -> Rngs:
    from flax import nnx

    rngs = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    if "params" in rngs and "default" not in rngs:
        # As `nnx.Rngs(key)` does it: one stream, so that no two draws of weights are alike.
        rngs["default"] = rngs.pop("params")
    return nnx.Rngs(**rngs)


def _check_unused(used: dict[str, str]) -> None:
    if used:
        names = tuple(dict.fromkeys(used.values()))
        raise ValueError(
            f"The model draws random numbers in evaluation (from {', '.join(used)}), but the call "
            f"was given no key. Name the stream: Model(..., eval_rngs={names}) or EvalTask(..., "
            f"rngs={names}). Or have the module draw in training alone: an attribute "
            "`self.training = True` is set for it."
        )

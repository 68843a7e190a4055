"""from_nnx: an NNX module as `(init, apply)`, its variables as plain dicts of arrays."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.core.scope import CollectionFilter, in_filter

from flaxfit.modules._flags import call_defaults, call_flags, check_switches, input_names, switches
from flaxfit.modules._functions import WRITTEN, GivenInit, ModelFunctions, Names, check_losses
from flaxfit.modules._handle import ModuleHandle, with_handle
from flaxfit.modules._nnx_factory import abstract_of, make
from flaxfit.tree import Function, PyTree, Rngs, Variables, copied, parameters, without_mesh


def from_nnx(
    model: Any,
    *,
    train: bool | None = None,
    call: Function | None = None,
    losses: Names = (),
    **modes: Any,
) -> ModelFunctions:
    """Makes a model of an NNX module, or of a factory `(rngs) -> module`.

    Its variables become `{"params": ..., "batch_stats": ..., ...}`, one collection per type of
    variable. A shared variable is held once; arrays that are not variables are "constants". Random
    states are not included: every call receives its keys by `rngs`, and each stream of each layer
    draws its own numbers. A call with an argument `rngs` receives an `nnx.Rngs` of these keys, or
    None without keys, as in evaluation. Axis names (`nnx.with_partitioning`) become collections
    such as `params_axes`, which `init_state` splits off.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> init, apply = from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    >>> variables = init(jax.random.key(0), jnp.ones((1, 2)))
    >>> apply(variables, jnp.ones((1, 2))).shape
    (1, 3)

    Args:
      model: an instance, whose current weights `init` returns, or a factory. Other attributes of an
        instance are read at this call: unlike a Model, a loop does not follow later changes.
      train: True or False sets the flags named `train`, `training`, `is_training`, `deterministic`
        or `use_running_average`: in layers, in attributes of your own modules that are a bool or
        None, and as an argument of the model's call.
      call: `(module, *inputs) -> outputs`, to call instead of the module itself.
      losses: types of variables, or their names, whose values are terms of the loss, besides
        the type named "losses".
      **modes: more flags to set in the layers, such as `decode`.

    Raises:
      TypeError: it is neither an NNX module nor a function that makes one of its rngs alone; its
        variables are references; its call takes `rngs` as the first or a positional-only argument.
        When `apply` is called: the call returns a module.
      ValueError: no part of the module has a mode. When `apply` is called: the model draws random
        numbers without a key, or leaves no values of a type in `losses`.
    """
    from flax import nnx

    from flaxfit.modules import _nnx_effects as effects
    from flaxfit.modules import _nnx_modes
    from flaxfit.modules import _nnx_state as states
    from flaxfit.modules._nnx_errors import call_explained

    is_instance = isinstance(model, nnx.Module)
    abstract = abstract_of(model)
    parts = _nnx_modes.copied(abstract)
    if unknown := _nnx_modes.unknown_modes(parts, modes):
        raise ValueError(
            f"No layer of the model has {', '.join(unknown)}: a mode is an attribute that is a "
            "bool or None, or an argument of a layer's set_view."
        )
    if call is None:
        _check_callable(abstract)
    position = _position_of_rngs(abstract if call is None else call)
    given, arguments, quiet = modes, {}, {}
    if train is not None:
        defaults = call_defaults(abstract.__call__) if call is None else {}
        attributes = {name: x for part in parts for name, x in vars(part).items()}
        found = {**attributes, **defaults}
        check_switches({n: found[n] for n in found if n not in modes}, type(abstract).__name__)
        modes = {**switches(train), **modes}
        if call is None:
            arguments, quiet = (call_flags(abstract.__call__, each) for each in (train, False))
    names = states.names_of(losses)
    _nnx_modes.set_modes(parts, modes)
    graph, random, template = states.split(parts[-1], names)
    axes = states.axes_of(template, names)

    # A weak reference: JAX caches traced functions, and would keep the instance alive.
    given_module = weakref.ref(model) if is_instance else lambda: model

    def variables_of(module: nnx.Module) -> Variables:
        return {**states.persistent(states.variables_of(module, names)), **axes}

    def init(rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        return variables_of(make(given_module(), _rngs(rngs)))

    def apply(
        variables: Variables,
        *inputs: PyTree,
        rngs: Rngs = None,
        mutable: CollectionFilter = False,
        **named: PyTree,
    ) -> PyTree:
        def filled(streams: nnx.State, params: PyTree = None, *, copy: bool = True) -> nnx.Module:
            given = variables if params is None else {**variables, "params": params}
            values = states.filled(template, given, names)
            return nnx.merge(graph, streams, values, copy=copy)

        def run(module: nnx.Module, flags: Mapping[str, Any] = arguments) -> PyTree:
            function = module if call is None else functools.partial(call, module)
            keys = {} if position is None else {"rngs": states.rngs_of_call(rngs)}
            with call_explained(module, inputs, named, position, not is_keyless):
                return function(*inputs, **{**keys, **flags, **named})

        def evaluated(module: nnx.Module) -> PyTree:
            view = _nnx_modes.viewed(module, {**switches(train=False), **given})
            return run(view, quiet)

        is_keyless = rngs is None or (isinstance(rngs, Mapping) and not rngs)
        streams = states.keyed(random, rngs)
        unused = states.counts(streams)
        module = filled(streams, copy=False)
        facts = effects.facts_of(module)
        outputs = run(module)
        used = states.counts(module)
        drawn = [stream for stream in used if used[stream] is not unused.get(stream)]
        if is_keyless and drawn:
            if not modes.get("deterministic"):
                raise _without_key(drawn)
            # `nnx.scan` and `nnx.split_rngs` advance streams even if no output depends on them.
            _check_unused(states.streams_used(lambda each: run(filled(each)), streams))
        effects.check_outputs(outputs)
        updates = {} if mutable is False else states.variables_of(module, names)
        fresh = functools.partial(filled, streams)
        if in_filter(mutable, WRITTEN):
            before, after = (tree.get("params", {}) for tree in (variables, updates))
            new = effects.written(module, before, after, fresh, run)
            updates |= {WRITTEN: new} if new else {}
        if train is not False and in_filter(mutable, "losses"):
            check_losses(names, states.variables_of(module))
        effects.check_repeats(facts, module, fresh, run, evaluated if train else None, names)
        if mutable is False:
            return outputs
        return outputs, {name: tree for name, tree in updates.items() if in_filter(mutable, name)}

    def merged(variables: Variables) -> nnx.Module:
        evaluation = {**switches(train=False), **given}
        view = _nnx_modes.viewed(nnx.merge(graph, random, template), evaluation)
        own_graph, own_random, own_template = states.split(view, names)
        with without_mesh():
            key = jax.random.key(0)
        streams = states.keyed(own_random, key)
        return nnx.merge(own_graph, streams, states.filled(own_template, variables, names))

    def init_of(module: Any) -> Function:
        return GivenInit(lambda: variables_of(module)) if is_instance else init

    def assign(variables: Variables) -> list[jax.Array]:
        module = given_module()
        return [] if module is None else states.assign(module, variables, names)

    inputs = input_names(abstract if call is None else functools.partial(call, None))
    handle = ModuleHandle(
        module=given_module,
        init=init_of,
        merged=merged,
        inputs=lambda: inputs,
        evaluated=lambda: (
            from_nnx(
                nnx.merge(graph, random, template), call=call, train=False, losses=losses, **given
            ).apply
        ),
        assign=assign if is_instance else None,
        paths=lambda filter: states.selected(nnx.merge(graph, random, template), filter),
        streams=None if position is not None else states.names_of_streams(random),
    )
    return ModelFunctions(init_of(model), with_handle(apply, handle))


def update_nnx(model: Any, variables: PyTree, *, losses: Names = ()) -> None:
    """Writes copies of trained variables into an NNX instance.

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
      TypeError: the model is not an instance of an NNX module; the variables are not a mapping.
      ValueError: the variables do not match the model, which is not changed then.
    """
    from flax import nnx

    from flaxfit.modules import _nnx_state as states

    if not isinstance(model, nnx.Module):
        raise TypeError(f"update_nnx needs an instance of an NNX module, got {model!r:.60}.")
    if not isinstance(variables, Mapping):
        raise TypeError(
            "update_nnx needs variables by collection, such as model.state.variables, got "
            f"{type(variables).__name__}."
        )
    states.assign(model, copied(variables), states.names_of(losses))


def _check_callable(module: object) -> None:
    if not callable(module):
        name = type(module).__name__
        raise TypeError(
            f"{name} has no __call__: rename the method to call, or name it: from_nnx(module, "
            f"call={name}.forward, train=True) for training and train=False for evaluation."
        )


def _without_key(drawn: Sequence[str]) -> ValueError:
    return ValueError(
        f"The model draws random numbers (from {', '.join(drawn)}), but the call was given no key: "
        "pass rngs={'dropout': key}, or make it by from_nnx(..., train=False)."
    )


def _position_of_rngs(function: Any) -> int | None:
    """Returns the position of a call's argument `rngs` (last if keyword-only), or None.

    Raises:
      TypeError: it is the first argument, or positional-only.
    """
    from flax import nnx

    names = [*parameters(function)]
    if isinstance(function, nnx.Sequential):  # Hands it on to the layers that take it.
        return len(names)
    if "rngs" not in names:
        return None
    found, position = parameters(function)["rngs"], names.index("rngs")
    if found.kind == found.POSITIONAL_ONLY:
        raise TypeError("The call has rngs as a positional-only argument: remove the '/' after it.")
    if found.kind == found.KEYWORD_ONLY:
        return len(names)
    if position == 0:
        raise TypeError("The call has rngs as its first argument: put it after the inputs.")
    return position


def _rngs(rngs: Rngs) -> Rngs:
    from flax import nnx

    rngs = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    if "params" in rngs and "default" not in rngs:
        # Like `nnx.Rngs(key)`: a single stream, so that no two weights draw the same numbers.
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

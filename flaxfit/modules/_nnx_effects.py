"""Checks the side effects of a call of an NNX module: written parameters, other attributes."""
# This imports NNX: import it only where a model is an NNX module.

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from flaxfit.modules import _nnx_state as states
from flaxfit.modules._nnx_attributes import divider, is_of_nnx
from flaxfit.tree import Function, PyTree, flat

_ABSENT = object()


def check_outputs(outputs: PyTree) -> None:
    """Checks that a call returned no module."""

    def is_module(x: object) -> bool:
        return isinstance(x, nnx.Module)

    for each in jax.tree.leaves(outputs, is_leaf=is_module):
        if is_module(each):
            raise TypeError(
                f"The call returned a module, {type(each).__name__}: return only the outputs. What "
                "the call changes in its module is kept."
            )


def facts_of(module: nnx.Module) -> dict[str, Any]:
    """Returns the types of a module's parts and its other attributes, by name."""
    facts: dict[str, Any] = {}
    left, seen = [("self", module)], set[int]()
    while left:
        name, part = left.pop()
        kind = type(part)
        facts[name] = part if (divide := _divider(kind)) is None else kind
        if divide is not None and id(part) not in seen:
            seen.add(id(part))
            parts = divide(part).items()
            left += [(f"{name}.{key}", x) for key, x in parts if not is_of_nnx(key)]
    return facts


@functools.cache
def _divider(kind: type) -> Function | None:
    """Returns a function from objects of a type to their parts by name; None if opaque.

    Cached, since NNX computes `issubclass` in Python; `nnx.iter_graph` would take 30 times as long.
    """
    is_array = issubclass(kind, nnx.Variable | jax.Array | np.ndarray)
    return (lambda part: {}) if is_array else divider(kind)


def check_repeats(
    before: Mapping[str, Any],
    module: nnx.Module,
    fresh: Callable[[], nnx.Module],
    run: Function,
    evaluated: Function | None = None,
    losses: Sequence[str] = (),
) -> None:
    """Checks that a second call of a module would compute the same as a call of a fresh one.

    Every step repeats the program of the first call, of a `fresh` module with the facts `before`.
    Attributes that calls set but do not read, such as a call counter, are harmless. The second call
    is `run`, or, if possible, `evaluated`.
    """
    after = facts_of(module)
    changes = {
        name: (old, new)
        for name in {**before, **after}
        if not _are_equal(old := before.get(name, _ABSENT), new := after.get(name, _ABSENT))
        and not (_is_a(new, nnx.Variable) and states.is_transient(new, losses))
    }
    if not changes:
        return
    created = [n for n, (old, new) in changes.items() if old is _ABSENT and _is_a(new, nnx.Param)]
    is_replaced = any(_is_a(old, nnx.Variable) for old, _ in changes.values())
    called = f"The call of {type(module).__name__}"
    if created:
        raise ValueError(
            f"{called} creates the parameters {', '.join(created[:5])}, which no optimizer would "
            "train: create them in __init__, or call the module once before you pass it."
        )
    runs = [run] if evaluated is None or not _can_be(evaluated, fresh) else [run, evaluated]
    if is_replaced or not all(_computes_the_same(module, fresh, each, losses) for each in runs):
        said = (_in_words(name, old, new) for name, (old, new) in [*changes.items()][:5])
        raise ValueError(
            f"{called} {', '.join(said)}, which its next call would see, but every step repeats "
            "the first call. Keep changing values in an nnx.Variable that __init__ creates, and "
            "use jnp.where instead of `if`. If only the first call differs, call the module once "
            "before you pass it."
        )


def written(
    module: nnx.Module, before: PyTree, after: PyTree, fresh: Function, run: Function
) -> dict[str, jax.Array]:
    """Returns the parameters that a call has written, by path; `fresh(params)` makes the module.

    The parameters that `nnx.SpectralNorm` and `nnx.WeightNorm` overwrite do not count: they are
    trained unchanged, as in Linen.
    """
    given, new = flat(before), flat(after)
    places = [path for path, leaf in given.items() if new.get(path, leaf) is not leaf]
    wrappers = tuple(
        "/".join((*map(str, path), ""))
        for path, part in (nnx.iter_modules(module) if places else ())
        if isinstance(part, nnx.SpectralNorm | nnx.WeightNorm)
    )
    places = [path for path in places if not path.startswith(wrappers)]
    if not places:
        return {}

    def results(*values: jax.Array) -> list[jax.Array]:
        leaves = given | dict(zip(places, values, strict=True))
        run(one := fresh(jax.tree.unflatten(jax.tree.structure(before), [*leaves.values()])))
        found = flat(states.variables_of(one)["params"])
        return [found[path] for path in places]

    # Identity is not enough: `nnx.remat` and `nnx.jit` return new arrays of unchanged parameters.
    with jax.disable_jit(disable=False):
        program = jax.make_jaxpr(results)(*(given[path] for path in places)).jaxpr
    sources = _sources(program, places)
    return {p: new[p] for p, source in zip(places, sources, strict=True) if source != p}


def _sources(program: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Returns for each result of a jaxpr the named input that it equals; None if computed."""
    known = dict(zip(program.invars, inputs, strict=True))

    def source(variable: Any) -> Any:
        return None if isinstance(variable, Literal) else known.get(variable)

    for equation in program.eqns:
        found = _sources_of(equation, [*map(source, equation.invars)])
        known.update(zip(equation.outvars, found, strict=True))
    return [*map(source, program.outvars)]


def _sources_of(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Like `_sources`, for a call, a scan or branches."""
    parts = jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    bodies = [getattr(part, "jaxpr", part) for part in parts if hasattr(part, "eqns")]
    inputs = inputs[equation.primitive.name == "cond" :]
    if not bodies or any(len(body.invars) != len(inputs) for body in bodies):
        return [None] * len(equation.outvars)
    start, n = (equation.params.get(name, 0) for name in ("num_consts", "num_carry"))
    while True:  # Iterate to a fixed point: a scan's carry keeps its source if no pass changes it.
        passes = [_sources(body, inputs) for body in bodies]
        found = [xs[0] if len({*xs}) == 1 else None for xs in zip(*passes, strict=True)]
        carried = [a if a == b else None for a, b in zip(inputs[start:], found[:n], strict=False)]
        if inputs[start : start + n] == carried:
            return found
        inputs = [*inputs[:start], *carried, *inputs[start + n :]]


def _computes_the_same(
    module: nnx.Module, fresh: Callable[[], nnx.Module], run: Function, losses: Sequence[str]
) -> bool:
    """Returns whether calls of the changed and of a fresh module are the same program."""
    given = dict(nnx.to_flat_state(nnx.state(fresh())))
    kept = [*flat(states.persistent(states.variables_of(fresh(), losses)))]

    def program(make: Callable[[], nnx.Module]) -> Any:
        def results() -> list[PyTree]:
            outputs = run(one := make())
            variables = states.variables_of(one, losses)
            values = flat(variables)
            left = outputs, variables.get("losses"), [values[path] for path in kept]
            return jax.tree.leaves(left)

        return jax.make_jaxpr(results)()

    try:
        states.mark_arrays(module)
        nnx.pop(module, lambda path, x: path not in given and states.is_transient(type(x), losses))
        graph, state = nnx.split(module)
        # With the values of the fresh module, only structure and attributes can differ.
        leaves = [(path, given.get(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
        one = program(fresh)
        two = program(lambda: nnx.merge(graph, nnx.from_flat_state(leaves), copy=True))
    except Exception:  # The second call may fail, such as at a condition on a stored array.
        return False
    is_same = str(one.jaxpr) == str(two.jaxpr) and len(one.consts) == len(two.consts)
    return is_same and all(map(_are_equal, one.consts, two.consts))


def _can_be(run: Function, fresh: Callable[[], nnx.Module]) -> bool:
    try:
        jax.eval_shape(lambda: jax.tree.leaves(run(fresh())))
    except Exception:  # A module may reject a mode.
        return False
    return True


def _are_equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or isinstance(one, Tracer):
        return one is other
    try:
        return bool(np.all(one == other))
    except Exception:  # Objects without comparison.
        return False


def _is_a(fact: Any, kind: type) -> bool:
    return isinstance(fact, type) and issubclass(fact, kind)


def _in_words(name: str, old: Any, new: Any) -> str:
    if new is _ABSENT:
        return f"removes {name}"
    value = new.__name__ if isinstance(new, type) else f"{new!r:.60}"
    return f"{'creates' if old is _ABSENT else 'sets'} {name} ({value})"

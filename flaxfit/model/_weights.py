"""WarmStart: an `init` that returns weights read from files instead of random ones."""

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import meta

from flaxfit import checkpoints
from flaxfit.checkpoints._tree import is_key
from flaxfit.optim._averaged import averaged, has_average
from flaxfit.optim._freeze import check_matches, merge
from flaxfit.state import TrainState
from flaxfit.tree import ArrayLike, InitFn, PyTree, Rngs, Variables, flat, path_of

Load = Callable[[PyTree], PyTree]
"""Puts weights into variables, or into a state."""


class WarmStart:
    """An `init` that calls the one of the model, then functions that put weights into variables."""

    gives_weights = True
    """It is not traced: the weights would be constants of a program."""

    def __init__(self, fresh: InitFn, *loads: Load, loaded: TrainState | None = None):
        self.fresh = fresh
        """The `init` of the model."""
        self.loaded = loaded
        """The state that the last file holds, if that is known without the model."""
        self._loads = loads
        self._misfit: Load | None = None

    def then(self, load: Load, loaded: TrainState | None) -> "WarmStart":
        """Adds further weights, which replace those that were found not to fit."""
        kept = [each for each in self._loads if each is not self._misfit]
        return WarmStart(self.fresh, *kept, load, loaded=loaded)

    def __call__(self, rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        """Returns the variables with the weights."""
        variables = dict(self.fresh(rngs, *inputs, **named))
        for name in ("intermediates", "losses"):
            variables.pop(name, None)
        # Files have no names of axes: these stay as they are.
        axes = {name: variables.pop(name) for name in list(variables) if name.endswith("_axes")}
        return {**meta.replace_boxed(variables, self.load(meta.unbox(variables))), **axes}

    def load(self, variables: Variables) -> Variables:
        """Returns variables with the weights, placed where those that they replace are."""
        for load in self._loads:
            self._misfit = load
            variables = load(variables)
        self._misfit = None
        return variables


def open_weights(
    path: str | os.PathLike[str],
    *,
    partial: str | Sequence[str] | None = None,
    translator: Any = None,
    prefix: str = "",
    **opts: Any,
) -> tuple[Load, bool]:
    """Opens a file of weights, with the arguments of `Model.load_weights`.

    The function that it returns raises a ValueError if the weights do not fit the variables. Also
    returns whether all variables of the file are taken, by names of the model: see `state_alone`.
    """
    from flaxfit import importers  # Not before it is used: `import flaxfit` stays quick.
    from flaxfit.importers._fill import fill_from
    from flaxfit.importers._translator import Translation

    if opts and translator is None:
        raise TypeError(f"Without a translator, nothing takes the options {', '.join(opts)}.")
    source = _of_run(path) if checkpoints.list_steps(path) else importers.load(path)
    if translator is None:
        translation = Translation(source, {}, [], [], {})
    else:
        translation = translator.translate(source, **opts)
    is_plain = translator is None and not prefix and os.fspath(path).endswith(".safetensors")

    def put(target: PyTree) -> PyTree:
        is_state = hasattr(target, "params")
        variables = target.variables if is_state else target
        values = translation.values
        is_of_all = any(name.partition("/")[0] in variables for name in values)
        if is_of_all and is_plain:
            return checkpoints.load_weights(path, target, partial=partial)
        within = _check_prefix(prefix, variables)
        patterns = _check_patterns(partial, variables)
        if is_of_all:
            places = {name: name.replace("/", f"/{within}", 1) for name in values}
            collections = set(variables)
        else:
            places = _places(values, variables, within)
            collections = {"params", *(place.partition("/")[0] for place in places.values())}

        def is_taken(name: str, leaf: ArrayLike) -> bool:
            collection, _, rest = name.partition("/")
            is_of_file = collection in collections and rest.startswith(within)
            is_wanted = any(re.fullmatch(pattern, rest) for pattern in patterns)
            return is_of_file and is_wanted and not is_key(leaf)

        taken = jax.tree_util.tree_map_with_path(
            lambda at, leaf: leaf if is_taken(path_of(at), leaf) else optax.MaskedNode(), variables
        )
        new = dataclasses.replace(
            translation,
            values={place: values[name] for name, place in places.items()},
            sources={p: translation.sources.get(name, name) for name, p in places.items()},
        )
        strict = partial is None
        filled = fill_from(new, taken, strict=strict, partial=False, dtype=None, lazy=False)
        merged = merge(filled, variables)
        if not is_state:
            return merged
        return target.replace(params=merged.pop("params"), model_state=merged)

    return put, is_plain and partial is None


def _of_run(folder: str | os.PathLike[str]) -> dict[str, ArrayLike]:
    """Returns the weights in the newest checkpoint of a run, as `save_weights` would save them."""
    state = checkpoints.restore(folder)
    variables = (averaged(state) if has_average(state) else state).variables
    return {name: leaf for name, leaf in flat(variables).items() if not is_key(leaf)}


def state_alone(path: str | os.PathLike[str], seed: int) -> TrainState | None:
    """Returns the state in a file of `save_weights`, without an optimizer's; None: no parameters.

    It is not compared with a model.
    """
    variables = checkpoints.load_weights(path)
    if "params" not in variables:
        return None
    step, key = jnp.int32(0), jax.random.key(seed)
    return TrainState(step, variables.pop("params"), (), variables, key)


def _places(names: Collection[str], variables: Mapping[str, PyTree], within: str) -> dict[str, str]:
    """Returns the paths in the variables that names without a collection stand for.

    They are parameters, or as in `nnx.state` variables of all kinds. Orbax writes that as
    "layer/kernel/value". Random streams, "dropout/rngs/key" and "dropout/rngs/count", are left out.
    """
    suffix = "/value" if all(name.endswith("/value") for name in names) else ""
    own = [path.partition("/") for path in flat(variables)]
    collections = {rest: collection for collection, _, rest in own if collection != "params"}
    collections |= {rest: collection for collection, _, rest in own if collection == "params"}
    places = {}
    for name in names:
        path = f"{within}{name.removesuffix(suffix)}"
        stream, _, part = name.removesuffix(suffix).rpartition("/")
        of_stream = {f"{stream}/{each}{suffix}" for each in ("key", "count")}
        if path in collections or part not in ("key", "count") or not of_stream <= {*names}:
            places[name] = f"{collections.get(path, 'params')}/{path}"
    return places


def _check_prefix(prefix: str, variables: Mapping[str, PyTree]) -> str:
    """Returns the prefix of the paths of a part of the model."""
    within = f"{prefix.strip('/')}/" if prefix else ""
    if not any(path.startswith(within) for path in flat(variables["params"])):
        raise ValueError(
            f"prefix={prefix!r} is not a part of the model, whose parts are "
            f"{', '.join(sorted(variables['params']))}."
        )
    return within


def _check_patterns(
    partial: str | Sequence[str] | None, variables: Mapping[str, PyTree]
) -> Sequence[str]:
    if partial is None:
        return [".*"]
    patterns = [partial] if isinstance(partial, str) else list(partial)
    in_model = {name.partition("/")[2]: None for name in flat(variables)}
    for pattern in patterns:
        check_matches("partial", pattern, dict.fromkeys(in_model, 0))
    return patterns

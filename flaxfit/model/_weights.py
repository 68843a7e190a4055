"""WarmStart: an `init` that replaces random weights by weights of files."""

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
from flaxfit.optim._averaged import averaged, has_average
from flaxfit.optim._freeze import check_matches, merge
from flaxfit.state import TrainState
from flaxfit.tree import ArrayLike, InitFn, PyTree, Rngs, Variables, flat, is_key, path_of

Load = Callable[[PyTree], PyTree]
"""A function that replaces weights in variables, or in a state."""


class WarmStart:
    """An `init` that calls the model's `init`, then loads weights into the variables."""

    gives_weights = True
    """It is not traced: the weights would be constants of a program."""

    def __init__(self, fresh: InitFn, *loads: Load, loaded: TrainState | None = None):
        self.fresh = fresh
        """The `init` of the model."""
        self.loaded = loaded
        """The state in the last file, if it holds all variables by the model's names."""
        self._loads = loads
        self._misfit: Load | None = None

    def then(self, load: Load, loaded: TrainState | None) -> "WarmStart":
        """Returns a copy that also loads these weights, without a load that has failed."""
        kept = [each for each in self._loads if each is not self._misfit]
        return WarmStart(self.fresh, *kept, load, loaded=loaded)

    def __call__(self, rngs: Rngs, *inputs: PyTree, **named: PyTree) -> Variables:
        """Returns the variables with the weights."""
        variables = dict(self.fresh(rngs, *inputs, **named))
        for name in ("intermediates", "losses"):
            variables.pop(name, None)
        # Files hold no axis names: those of the model stay.
        axes = {name: variables.pop(name) for name in list(variables) if name.endswith("_axes")}
        return {**meta.replace_boxed(variables, self.load(meta.unbox(variables))), **axes}

    def load(self, variables: Variables) -> Variables:
        """Loads the weights into variables, with the shardings of the arrays they replace."""
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
    """Opens a file of weights; the arguments are those of `Model.load_weights`.

    The returned `Load` raises a ValueError if the weights do not fit. Also returns whether it
    loads all variables of the file by the model's names; see `state_alone`.
    """
    from flaxfit import importers  # Imported on use, to keep `import flaxfit` quick.
    from flaxfit.importers._fill import fill_from
    from flaxfit.importers._translator import Translation

    if opts and translator is None:
        raise TypeError(f"The options {', '.join(opts)} need a translator.")
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
    """Returns the weights in the newest checkpoint of a run, as `save_weights` saves them."""
    state = checkpoints.restore(folder)
    variables = (averaged(state) if has_average(state) else state).variables
    return {name: leaf for name, leaf in flat(variables).items() if not is_key(leaf)}


def state_alone(path: str | os.PathLike[str], seed: int) -> TrainState | None:
    """Returns a file of `save_weights` as a state without an optimizer; None: no parameters."""
    variables = checkpoints.load_weights(path)
    if "params" not in variables:
        return None
    step, key = jnp.int32(0), jax.random.key(seed)
    return TrainState(step, variables.pop("params"), (), variables, key)


def _places(names: Collection[str], variables: Mapping[str, PyTree], within: str) -> dict[str, str]:
    """Maps names without a collection to paths of variables.

    Names may address parameters only, or all kinds of variables, as in `nnx.state`, which Orbax
    writes as "layer/kernel/value". Random streams ("dropout/rngs/key", "/count") are left out.
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
    """Converts the path of a part of the model to a prefix of paths."""
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

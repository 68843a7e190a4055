"""A state as plain named arrays, what describes them, and the way back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.state._train_state import TrainState
from flaxfit.tree._paths import flat, path_of
from flaxfit.tree._put import put
from flaxfit.tree._types import ArrayLike, PyTree

Description = Mapping[str, Any]
"""What a file says about one leaf: shape and dtype, and for a random key how it is kept."""


def leaves_of(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path; anything that is not on a device as a NumPy array.

    Raises:
      ValueError: two leaves have the same path.
    """
    leaves = {path: _as_array(leaf) for path, leaf in flat(tree).items()}
    if len(leaves) < len(jax.tree.leaves(tree)):
        paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"Cannot name every array: these paths occur twice: {', '.join(twice)}.")
    return leaves


def describe(leaf: ArrayLike) -> dict[str, Any]:
    """Shape and dtype of a leaf, as a file keeps them.

    >>> describe(np.zeros((2, 3), np.float32))
    {'shape': [2, 3], 'dtype': 'float32'}
    """
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def is_key(leaf: ArrayLike) -> bool:
    """Whether a leaf is a typed random key, or describes one."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_description(key: jax.Array) -> dict[str, Any]:
    """What it takes to make a typed random key from its words again."""
    return {
        "random_bits": str(jax.random.key_impl(key)),
        "words": list(jax.random.key_data(key).shape),
    }


def like(array: ArrayLike, template: PyTree) -> PyTree:
    """A restored array, or key, as the kind of leaf that it takes the place of.

    A leaf without a place of its own gives an uncommitted array that nothing else refers to.
    """
    if template is None or isinstance(template, jax.ShapeDtypeStruct | jax.Array):
        sharding = sharding_of(template)
        array = array if isinstance(array, jax.Array) else jnp.array(array)
        return array if sharding is None else put(array, sharding)
    return array if hasattr(template, "dtype") else array.item()


def sharding_of(template: PyTree) -> jax.sharding.Sharding | None:
    """Where a template wants its array to be; None: wherever arrays go by default."""
    if isinstance(template, jax.Array):
        return template.sharding if template.committed else None
    return getattr(template, "sharding", None)


def unflatten(arrays: Mapping[str, PyTree], template: PyTree) -> PyTree:
    """The template with the arrays in the places that they name."""

    def replaced(path: Any, leaf: ArrayLike) -> Any:
        name = path_of(path)
        return like(arrays[name], leaf) if name in arrays else leaf

    return jax.tree_util.tree_map_with_path(replaced, template)


def nested(arrays: Mapping[str, PyTree]) -> dict[str, Any]:
    """Nested dicts, as the paths say.

    >>> nested({"a/b": 1, "a/c": 2})
    {'a': {'b': 1, 'c': 2}}

    Raises:
      ValueError: a path goes on where another one ends.
    """
    tree: dict[str, PyTree] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict) or name in place:
            raise ValueError(
                f"Cannot make nested dicts of the names of these arrays: {path} goes on where "
                "another one ends. Pass a target."
            )
        place[name] = array
    return tree


def as_plain_state(arrays: Mapping[str, PyTree]) -> TrainState:
    """A state made without a template: nested dicts, as the paths say."""
    fields = {"params": {}, "opt_state": {}, "model_state": {}, **nested(arrays)}
    known = {field.name for field in dataclasses.fields(TrainState)}
    return TrainState(**{name: value for name, value in fields.items() if name in known})


def on_device(array: ArrayLike) -> Any:
    """The array in JAX; in NumPy where JAX would cut its 64 bits to 32."""
    if isinstance(array, jax.Array) or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jnp.array(array)


def _as_array(leaf: ArrayLike) -> Any:
    """The leaf itself where it has a dtype, else (a Python number) a NumPy array."""
    is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return leaf if is_array else np.asarray(leaf)

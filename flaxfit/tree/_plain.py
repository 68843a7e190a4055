"""Converts trees to plain nested dicts, for interchange, and back."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from flaxfit.tree._dtypes import is_key
from flaxfit.tree._put import put_like
from flaxfit.tree._types import ArrayLike, PyTree

Path = tuple[str, ...]
T = TypeVar("T")


def state_dict(state: PyTree) -> dict[str, PyTree]:
    """Returns a state in T5X's layout, with `flax_mutables` only if it has model state."""
    layout = _layout(state)
    mutables = as_plain(layout["flax_mutables"])
    return {
        "target": as_plain(layout["target"]),
        "state": {name: as_plain(tree) for name, tree in layout["state"].items()},
        **({"flax_mutables": mutables} if mutables else {}),
    }


def restore_state(state: PyTree, plain: Mapping[str, PyTree]) -> PyTree:
    """Replaces the arrays of a state by a `state_dict`."""
    layout = _layout(state)
    given = dict(plain)
    if "param_states" not in layout["state"] and isinstance(given.get("state"), Mapping):
        given["state"] = {n: x for n, x in given["state"].items() if n != "param_states"}
    new = restore(layout, given)
    fields = {"step": new["state"]["step"], "params": new["target"]}
    if "param_states" in new["state"]:
        fields["opt_state"] = new["state"]["param_states"]
    return state.replace(model_state=new["flax_mutables"], **fields)


def as_plain(tree: PyTree) -> PyTree:
    """Converts a tree to nested dicts, keyed by field names, keys and indices as strings.

    Random keys become their words (uint32). Nodes without arrays are left out.

    >>> as_plain({"layers": ({"w": 1.0}, {"w": 2.0}), "none": ()})
    {'layers': {'0': {'w': 1.0}, '1': {'w': 2.0}}}
    """
    leaves = _leaves(tree)
    if leaves.keys() == {()}:
        return _plain(leaves[()])
    return unflatten_dict({path: _plain(leaf) for path, leaf in leaves.items()})


def restore(tree: T, plain: PyTree) -> T:
    """Replaces the arrays of a tree by arrays from plain nested dicts.

    >>> restore(({"w": 1.0}, 2.0), {"0": {"w": 3.0}, "1": 4.0})
    ({'w': 3.0}, 4.0)

    Raises:
      ValueError: the two differ in structure, shapes or dtypes; lists every difference by path.
    """
    here, given = _leaves(tree), _leaves(plain)
    wrong = [f"{_name(path)} is missing" for path in here if path not in given]
    wrong += [f"{_name(path)} is not in the state" for path in given if path not in here]
    restored = []
    for path, leaf in here.items():
        if path not in given:
            continue
        array = _read_as(given[path], leaf)
        if array is None:
            wrong.append(f"{_name(path)} is {_words(given[path])}, not {_words(leaf)}")
        restored.append(array)
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise ValueError(f"Cannot restore the state from this dict, which does not fit it:{lines}")
    return jax.tree.unflatten(jax.tree.structure(tree), restored)


def _layout(state: PyTree) -> dict[str, PyTree]:
    counted = {"step": state.step}
    if hasattr(state, "opt_state"):
        counted["param_states"] = state.opt_state
    return {"target": state.params, "state": counted, "flax_mutables": state.model_state}


def _leaves(tree: PyTree) -> dict[Path, ArrayLike]:
    leaves, twice = {}, []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in key_path)
        twice += [_name(path)] * (path in leaves)
        leaves[path] = leaf
    if twice:
        raise ValueError(f"Cannot name every array: these paths occur twice: {', '.join(twice)}.")
    return leaves


def _plain(leaf: ArrayLike) -> ArrayLike:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _read_as(value: ArrayLike, like: ArrayLike) -> ArrayLike | None:
    """Converts a value to the type of the leaf that it replaces; None if it does not fit."""
    if is_key(like):
        words = jnp.asarray(_plain(value))
        expected = jax.eval_shape(jax.random.key_data, like)
        if words.shape != expected.shape or words.dtype != expected.dtype:
            return None
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if not hasattr(like, "dtype"):
        return value if np.shape(value) == () else None
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if np.shape(value) != like.shape:
        return None
    if isinstance(value, bool | int | float):
        return jnp.asarray(value, like.dtype)
    if array.dtype.type is np.void and array.dtype.itemsize == like.dtype.itemsize:
        array = array.view(like.dtype)  # NumPy's formats store bfloat16 as raw bytes.
    # Files often hold a 64-bit step; JAX keeps 32 bits anyway.
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow != like.dtype:
        return None
    if isinstance(array, jax.Array):
        array = array.astype(like.dtype)
    return put_like(array, like, like.dtype)


def _name(path: Path) -> str:
    return "/".join(path)


def _words(leaf: ArrayLike) -> str:
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype} {shape}"

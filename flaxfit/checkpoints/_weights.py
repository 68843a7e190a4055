"""save_weights and load_weights: the weights of a model in one `.safetensors` file."""

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.checkpoints import _folder, _safetensors
from flaxfit.checkpoints._compare import check_fits, choose
from flaxfit.checkpoints._tree import (
    describe,
    key_description,
    leaves_of,
    nested,
    on_device,
    unflatten,
)
from flaxfit.display import short_errors
from flaxfit.state import InferenceState, TrainState
from flaxfit.tree import PyTree, is_key

_KEYS = "random_bits"
_SECONDS_TO_WRITE = 3600


def save_weights(path: str | os.PathLike[str], weights: PyTree) -> Path:
    """Saves weights in one file that many other programs can read.

    The file is written under a temporary name, synced and renamed: it is complete, or as it was
    before. It holds a checksum of its content.

    >>> import tempfile
    >>> path = save_weights(tempfile.mkdtemp() + "/w.safetensors", {"dense": {"bias": jnp.ones(2)}})
    >>> load_weights(path)
    {'dense': {'bias': Array([1., 1.], dtype=float32)}}

    Args:
      path: the file; its folder is made when it does not exist.
      weights: a tree of arrays, or a state. For a state, the parameters and the model's other
        collections are saved, under `params/...` and `<collection>/...`; not the optimizer's.

    Returns:
      The absolute path of the file.

    Raises:
      ValueError: the format lacks the dtype of an array, two arrays have the same name, or the file
        has the name of another format.
      OSError: the file cannot be written; an earlier file is unchanged.
    """
    target = _folder.absolute(path)
    if target.suffix in (".h5", ".hdf5", ".keras"):
        raise ValueError(
            f"Weights are saved as safetensors, and {target.name!r} is a name of HDF5: name the "
            f"file {target.name.partition('.')[0]}.safetensors."
        )
    arrays, keys = {}, {}
    for name, leaf in leaves_of(_variables(weights)).items():
        if is_key(leaf):
            keys[name] = key_description(leaf)["random_bits"]
            leaf = jax.random.key_data(leaf)
        arrays[name] = np.asarray(leaf)
    _replace(target, arrays, {"format": "flax", **({_KEYS: json.dumps(keys)} if keys else {})})
    return target


@short_errors
def load_weights(
    path: str | os.PathLike[str],
    target: PyTree = None,
    *,
    partial: str | Sequence[str] | None = None,
) -> PyTree:
    """Reads the weights of a `.safetensors` file.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/w.safetensors"
    >>> path = save_weights(path, {"encoder": jnp.ones(2), "head": jnp.ones(3)})
    >>> load_weights(path, {"encoder": jnp.zeros(2), "new_head": jnp.zeros(1)}, partial="encoder")
    {'encoder': Array([1., 1.], dtype=float32), 'new_head': Array([0.], dtype=float32)}

    Args:
      path: the file.
      target: a tree, or a state, that says what to expect and where to put it; its leaves may be
        `jax.ShapeDtypeStruct`s, and dtypes are never changed. In a state, the parameters and the
        model's other collections are replaced. Without a target, nested dicts are returned.
      partial: patterns of the weights to read from the file; the rest are the target's. They match
        whole "/"-joined paths within the model, without the name of the collection.

    Returns:
      The weights, or the state with them.

    Raises:
      ValueError: the file is damaged; it does not match the target (every difference is listed);
        `partial` matches nothing.
    """
    if partial is not None and target is None:
        raise ValueError("partial= needs a target whose other values are kept.")
    source = _folder.absolute(path)
    try:
        arrays, facts = _safetensors.read(source)
        arrays |= _keys(arrays, facts)
    except _safetensors.Malformed as error:
        raise ValueError(f"Cannot read weights from {source}: {error}.") from error
    if target is None:
        return nested({name: on_device(array) for name, array in arrays.items()})
    variables = _variables(target)
    here = leaves_of(variables)
    on_disk = {name: describe(array) for name, array in arrays.items()}
    if partial is None:
        expected = {name: describe(leaf) for name, leaf in here.items()}
        advice = "Pass the target that it was saved from, or say with partial= what to take."
        check_fits(on_disk, expected, source, advice=advice)
    else:
        is_variables = isinstance(variables, Mapping) and "params" in variables

        def path_in_model(name: str) -> str | None:
            """Removes the name of the collection, which paths of bare parameters lack."""
            return (name.partition("/")[2] or None) if is_variables else name

        taken = choose(on_disk, here, partial, source, path_in_model)
        arrays = {name: arrays[name] for name in taken}
    found = unflatten(arrays, variables)
    if not isinstance(target, TrainState | InferenceState):
        return found
    return target.replace(params=found.pop("params"), model_state=found)


def _variables(weights: PyTree) -> PyTree:
    is_state = isinstance(weights, TrainState | InferenceState)
    return weights.variables if is_state else weights


def _keys(arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> dict[str, jax.Array]:
    """Rebuilds the random keys, as the format stores only their words."""
    try:
        kinds = json.loads(facts.get(_KEYS, "{}"))
        return {
            name: jax.random.wrap_key_data(jnp.asarray(arrays[name]), impl=kind)
            for name, kind in kinds.items()
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _safetensors.Malformed(f"its random keys are invalid: {error!s:.100}") from error


def _remove_left_over(target: Path) -> None:
    """Removes temporary files of killed processes, but not recent files that may be in use."""
    for entry in target.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}", entry.name):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _SECONDS_TO_WRITE:
                    entry.unlink()


def _replace(target: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    written = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with written.open("xb") as file:
            _safetensors.write(file, arrays, facts)
            file.flush()
            os.fsync(file.fileno())
        written.replace(target)
        _folder.sync(target.parent)
    except OSError as error:
        space = _folder.space(target.parent, sum(array.nbytes for array in arrays.values()))
        raise OSError(
            error.errno,
            f"Cannot save the weights: {error.strerror}. (It needs {space}.) An earlier file is "
            "unchanged",
            str(target),
        ) from error
    finally:
        written.unlink(missing_ok=True)

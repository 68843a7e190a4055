"""load_tf_ckpt: reads TensorFlow's checkpoints, with TensorFlow."""

import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxfit.importers._lazy import LazyArray, LazyThreadPoolArray
from flaxfit.importers._unreadable import UnreadableFile, as_dtype, reading
from flaxfit.tree import local_path, required

_KIND = "a TensorFlow checkpoint"


def load_tf_ckpt(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens a checkpoint that TensorFlow's savers wrote; needs `flaxfit[tensorflow]`.

    Reads the index at once, and each array when it is accessed, one at a time, verifying its
    checksum. Joins partitioned variables. Leaves out text, such as the object graph of newer
    checkpoints.

    >>> load_tf_ckpt("no_such_folder/model.ckpt-1000")
    Traceback (most recent call last):
    FileNotFoundError: No TensorFlow checkpoint at no_such_folder/model.ckpt-1000: ...

    Args:
      path: the prefix of its files ("folder/model.ckpt-1000"), any one of them, or a folder whose
        `checkpoint` file names the newest prefix. The files are always read from the given folder,
        even if that file names another one, from which they were copied.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      UnreadableFile: it is damaged, or of an unsupported kind.
      ImportError: TensorFlow is not installed.
    """
    prefix = _prefix(local_path(path))
    index = Path(f"{prefix}.index")
    if not index.is_file():
        raise FileNotFoundError(
            f"No TensorFlow checkpoint at {path}: expected a folder, or a prefix with files such "
            f"as {index.name} and {prefix.name}.data-00000-of-00001."
        )
    if {*"*?["} & {*str(prefix)}:
        raise UnreadableFile(
            f"Cannot read {prefix}: TensorFlow takes *, ? and [ in a path for a pattern. Rename "
            "the file or folder."
        )
    tf = required("load_tf_ckpt", "tensorflow", "tensorflow")
    with reading(index, _KIND, tf.errors.OpError):
        # `tf.train.load_checkpoint` would prefer a folder of the name of the prefix.
        reader = tf.compat.v1.train.NewCheckpointReader(str(prefix))
        dtypes, lock = reader.get_variable_to_dtype_map(), threading.Lock()

        def read(name: str) -> np.ndarray:
            with lock, reading(f"{name} of {prefix}", _KIND, tf.errors.OpError):
                return reader.get_tensor(name)

        return {
            name: _lazy(read, prefix, name, shape, dtypes[name])
            for name, shape in reader.get_variable_to_shape_map().items()
            if dtypes[name] is not tf.string
        }


def _prefix(path: Path) -> Path:
    """Returns the common prefix of the paths of a checkpoint's files."""
    if not path.is_dir():
        return path.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name))
    try:
        text = (path / "checkpoint").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    named = re.search(r'^model_checkpoint_path:\s*"([^"]*)"', text, re.MULTILINE)
    if named:
        return path / re.split(r"[/\\]", named[1])[-1]
    found = sorted(path.glob("*.index"))
    if len(found) == 1:
        return found[0].with_suffix("")
    if not found:
        raise FileNotFoundError(
            f"There is no checkpoint in the folder {path}: TensorFlow's have a file whose name "
            "ends with .index."
        )
    names = ", ".join(file.stem for file in found[:10])
    raise FileNotFoundError(
        f"Cannot tell which checkpoint of {path} to read: it has no file named checkpoint that "
        f"says so. Give the path of one of these: {names}."
    )


def _lazy(
    read: Callable[[str], np.ndarray], prefix: Path, name: str, shape: Sequence[int], kind: Any
) -> LazyArray:
    try:
        dtype = as_dtype(kind.name)
    except ValueError:
        raise UnreadableFile(
            f"Cannot read {prefix}.index: {name} has TensorFlow's dtype {kind.name}, which NumPy "
            "lacks. Leave this variable out when writing the checkpoint."
        ) from None

    def checked() -> np.ndarray:
        files = prefix.parent.glob(f"{prefix.name}.data-*-of-*")
        # TensorFlow allocates the array before it reads.
        if math.prod(shape) * dtype.itemsize > sum(file.stat().st_size for file in files):
            raise UnreadableFile(
                f"Cannot read {name} of {prefix}: its data files are missing or cut short."
            )
        return read(name)

    return LazyThreadPoolArray(tuple(shape), dtype, checked)

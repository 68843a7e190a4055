"""load: opens a checkpoint of any format that this package reads."""

import os
from collections.abc import Callable
from pathlib import Path

from flaxfit.display import short_errors
from flaxfit.importers._lazy import LazyArray
from flaxfit.importers._msgpack import load_msgpack
from flaxfit.importers._npz import load_npz
from flaxfit.importers._orbax import is_orbax, load_orbax
from flaxfit.importers._safetensors import load_safetensors
from flaxfit.importers._t5x import is_t5x, load_t5x
from flaxfit.importers._tf_bundle import load_tf_ckpt
from flaxfit.importers._unreadable import UnreadableFile
from flaxfit.tree import local_path

_BY_SUFFIX: dict[str, Callable[..., dict[str, LazyArray]]] = {
    ".safetensors": load_safetensors,
    ".json": load_safetensors,
    ".npz": load_npz,
    ".msgpack": load_msgpack,
}


@short_errors
def load(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens a checkpoint with the reader for its suffix, or for the content of its folder.

    >>> import tempfile
    >>> import numpy as np
    >>> path = tempfile.mkdtemp() + "/weights.npz"
    >>> np.savez(path, bias=np.ones(3))
    >>> load(path)
    {'bias': LazyThreadPoolArray(shape=(3,), dtype=float64)}

    Args:
      path: a `.safetensors`, `.npz` or `.msgpack` file; a folder of safetensors files, of T5X or
        of Orbax; or the folder or prefix of a TensorFlow checkpoint.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      UnreadableFile: it is damaged, or of an unsupported kind.
    """
    path = local_path(path)
    if path.suffix in _BY_SUFFIX and not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no checkpoint {path}.")
        return _BY_SUFFIX[path.suffix](path)
    is_bundle = Path(f"{path}.index").is_file()
    if path.suffix in (".h5", ".hdf5", ".keras") and not is_bundle and not path.is_dir():
        raise (UnreadableFile if path.exists() else FileNotFoundError)(
            f"Cannot read {path}, a name of HDF5: weights are saved as safetensors, such as "
            f"{path.name.partition('.')[0]}.safetensors."
        )
    if path.is_file() and not is_bundle:
        raise UnreadableFile(
            f"Cannot tell by its name what {path} holds: files are called {', '.join(_BY_SUFFIX)}, "
            "and a TensorFlow checkpoint is given by its folder or prefix. Rename it, or call the "
            "reader of its format, such as load_safetensors."
        )
    if not path.is_dir():
        return load_tf_ckpt(path)
    if (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists():
        return load_safetensors(path)
    if is_t5x(path):
        return load_t5x(path)
    return load_orbax(path) if is_orbax(path) else load_tf_ckpt(path)

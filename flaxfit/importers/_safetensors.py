"""load_safetensors: maps the files of Hugging Face's models into memory."""

import os
from pathlib import Path

from flaxfit.checkpoints import _safetensors
from flaxfit.importers._lazy import LazyArray
from flaxfit.importers._msgpack import as_lazy
from flaxfit.importers._unreadable import UnreadableFile, reading, require
from flaxfit.tree import local_path


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Opens the weights of a safetensors file, or of several that an index lists.

    Reads the header at once; arrays are views of the mapped file, read when they are accessed.

    >>> load_safetensors("no_such_folder/model.safetensors")
    Traceback (most recent call last):
    FileNotFoundError: No safetensors file at no_such_folder/model.safetensors.

    Args:
      path: a file, an index (`model.safetensors.index.json`), or a folder with either.

    Raises:
      FileNotFoundError: the file does not exist.
      UnreadableFile: it is damaged or in an unsupported format.
    """
    path = local_path(path)
    if path.is_dir():
        single = path / "model.safetensors"
        path = single if single.exists() else path / "model.safetensors.index.json"
    if not path.is_file():
        raise FileNotFoundError(f"No safetensors file at {path}.")
    return _read_index(path) if path.suffix == ".json" else _read_file(path)


def _read_file(path: Path) -> dict[str, LazyArray]:
    with reading(path, "a safetensors file"):
        return {name: as_lazy(array) for name, array in _safetensors.map_arrays(path).items()}


def _read_index(path: Path) -> dict[str, LazyArray]:
    """Opens the arrays of all files that an index lists; they must be in its folder."""
    with reading(path, "an index of safetensors files"):
        file_of = dict(_safetensors.parse(path.read_bytes())["weight_map"])
        names = sorted(set(file_of.values()))
        require(all(Path(name).name == name for name in names), "it names files elsewhere")
    files = {}
    for name in names:
        if not (path.parent / name).is_file():
            raise UnreadableFile(f"Cannot read {path}: its file {name} is missing.")
        files[name] = _read_file(path.parent / name)
    with reading(path, "an index of safetensors files"):
        return {array: files[name][array] for array, name in file_of.items()}

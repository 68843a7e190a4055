"""The compilation cache: a folder of compiled programs that later processes read."""

import os
import tempfile

import jax
from jax.experimental.compilation_cache import compilation_cache

from flaxfit.tree._checks import local_path


def use_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Sets the folder of JAX's own cache, for all programs of this process, small ones too.

    Raises:
      ValueError: nothing can be written to the folder, or it is a URL.
    """
    path = local_path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"Cannot keep compiled programs in {path}: {error.strerror or error}. Pass "
            "compilation_cache= a folder that can be written to, or leave it out."
        ) from error
    settings = {
        "jax_compilation_cache_dir": str(path),
        # By default JAX leaves out what compiles within a second: most steps of small models.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if all(getattr(jax.config, name) == value for name, value in settings.items()):
        return
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX reads the folder once only, when it first compiles.
    compilation_cache.reset_cache()

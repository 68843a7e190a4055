"""The compilation cache: a folder of compiled programs for later processes."""

import contextlib
import functools
import hashlib
import os
import platform
import stat
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from flaxfit.tree import local_path

_SWITCH = "FLAXFIT_COMPILATION_CACHE"
_OFF = ("", "0", "none", "off")
_MOST = 2**30
"""Bytes that the folder of "auto" is trimmed to when a process starts to use it."""


def use_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Sets the folder of JAX's persistent compilation cache for all programs of this process.

    Args:
      folder: the folder of the cache; "auto": a per-user folder, trimmed to 1 GiB, unless JAX has
        one configured; None: no change.

    Raises:
      ValueError: nothing can be written to the folder, or it is a URL.
    """
    if folder is None:
        return
    if folder == "auto":
        _use_user_folder()
        return
    path = local_path(folder).absolute()
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"Cannot keep compiled programs in {path}: {error.strerror or error}. Pass "
            "compilation_cache= a folder that can be written to, or None."
        ) from error
    settings = {
        "jax_compilation_cache_dir": str(path),
        # By default JAX skips programs that compile within a second: most steps of small models.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if all(getattr(jax.config, name) == value for name, value in settings.items()):
        return
    try:
        _check_private(path)
    except PermissionError as error:
        warnings.warn(
            f"Programs in compilation_cache={path} will be executed, but {error}. Restrict write "
            "access to users whom you trust.",
            stacklevel=4,
        )
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX reads the setting only once, when it first compiles.
    compilation_cache.reset_cache()


def _use_user_folder() -> None:
    """Uses the per-user folder, unless the environment or JAX's configuration names another."""
    given = os.environ.get(_SWITCH, "auto")
    if jax.config.jax_compilation_cache_dir or given.lower() in _OFF:
        return
    if given != "auto":
        use_compilation_cache(given)
    # Processes that compile a program together must all find it in the cache, or none of them.
    elif not jax.distributed.is_initialized():
        use_compilation_cache(_prepared_folder())


@functools.cache  # Warns once.
def _prepared_folder() -> Path | None:
    """Creates and trims the per-user folder; warns and returns None if that fails."""
    path = None
    try:
        path = _user_folder()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        _check_private(path)
        _trim(path, _MOST)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home.
        warnings.warn(
            f"Compiled programs are not kept in {path or 'a folder'}: {error}. "
            f"compilation_cache=None or the environment variable {_SWITCH}=off is silent.",
            stacklevel=6,  # Past the wrapper of a public method.
        )
        return None
    return path


def _trim(folder: Path, most: int) -> None:
    """Deletes the files used least recently until `most` bytes are left."""
    # JAX's own bound, `jax_compilation_cache_max_size`, needs the package filelock.
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # Another process may delete it now.
            about = path.stat()
            if stat.S_ISREG(about.st_mode):
                files.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    size = sum(n for _, n, _ in files)
    for _, n, path in sorted(files):
        if size <= most:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        size -= n


def _user_folder() -> Path:
    """Returns the folder for this user, processor model and jaxlib version.

    A program compiled for one CPU model may crash on another, and JAX's cache keys do not
    distinguish CPU models.
    """
    home = Path.home()
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        caches = home / ".cache"
    caches = os.environ.get("XDG_CACHE_HOME") or caches
    host = "\n".join((version("jaxlib"), platform.machine(), _processor()))
    return Path(caches, "flaxfit", f"programs-{hashlib.sha256(host.encode()).hexdigest()[:16]}")


def _processor() -> str:
    """Returns the model and the features of the processor, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(text for name, text in fields.items() if name.strip() in told)


def _check_private(path: Path) -> None:
    """Checks that no other user can write to the folder: its programs are executed."""
    if hasattr(os, "getuid"):
        about = path.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError("other users can write to it")

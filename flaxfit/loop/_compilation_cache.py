"""The compilation cache: a folder of compiled programs that later processes read."""

import hashlib
import os
import platform
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from flaxfit.loop._program_folder import ProgramFolder
from flaxfit.tree._checks import local_path

_SWITCH = "FLAXFIT_COMPILATION_CACHE"
_OFF = ("", "0", "none", "off")
_MOST = 2**30
"""Bytes of all programs in the folder of "auto"."""

_in_use: list[Path | None] = []
"""The folder of "auto" that this process uses, or None if it has none; empty before it is asked."""


def use_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Sets the folder of JAX's persistent compilation cache for all programs of this process.

    Args:
      folder: the folder of the cache; "auto": a per-user folder of at most 1 GiB, unless JAX has
        one configured; None: no change.

    Raises:
      ValueError: nothing can be written to the folder, or it is a URL.
    """
    if folder is None:
        return
    if folder == "auto":
        _use_own()
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
        # By default JAX leaves out what compiles within a second: most steps of small models.
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if all(getattr(jax.config, name) == value for name, value in settings.items()):
        return
    try:
        _check_is_own(path)
    except PermissionError as error:
        warnings.warn(
            f"Compiled programs of {path}, a given compilation_cache, are run: {error}. Let only "
            "users whom you trust write to it.",
            stacklevel=4,
        )
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX reads the folder once only, when it first compiles.
    compilation_cache.reset_cache()
    _in_use.clear()


def _use_own() -> None:
    """Uses the folder of this user, where neither the user nor JAX has another one."""
    given = os.environ.get(_SWITCH, "auto")
    if jax.config.jax_compilation_cache_dir or given.lower() in _OFF:
        return
    if given != "auto":
        use_compilation_cache(given)
        return
    if _in_use:
        return
    path = None
    try:
        path = _own_folder()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        _check_is_own(path)
        _install(ProgramFolder(path, _MOST))
    except (
        OSError,
        RuntimeError,
        AttributeError,
        ImportError,
    ) as error:  # No home, or no such JAX.
        _in_use.append(None)
        warnings.warn(
            f"Compiled programs are not kept in {path or 'a folder'}: {error}. "
            f"compilation_cache=None or the environment variable {_SWITCH}=off is silent.",
            stacklevel=5,  # Past the wrapper of a public method.
        )
        return
    _in_use.append(path)


def _own_folder() -> Path:
    """The folder for this user, this kind of processor and this version of the compiler.

    What was compiled for one processor may end the process on another, and JAX's keys do not tell
    those of a CPU apart.
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
    """The model and the features of the processor, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(text for name, text in fields.items() if name.strip() in told)


def _check_is_own(path: Path) -> None:
    """Checks that nobody else can write to the folder: its programs are run."""
    if hasattr(os, "getuid"):
        about = path.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError("other users can write to it")


def _install(cache: ProgramFolder) -> None:
    # JAX has no public form of a cache of one's own. Its own writes files in place: a process that
    # is killed, or that reads meanwhile, finds half of a program.
    from jax._src import compilation_cache as own

    used: Any = own
    for name in ("_cache", "_cache_initialized", "_cache_initialized_mutex"):
        getattr(used, name)  # A version without them keeps nothing.
    compilation_cache.reset_cache()
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # The default.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    used._cache, used._cache_initialized = cache, True

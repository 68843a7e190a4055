"""ProgramFolder: compiled programs on disk, within a bound, for many processes at once."""

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_SUFFIX, _PART = ".program", ".part"
_N_DIGEST = hashlib.sha256().digest_size
_HOUR = 3600


class ProgramFolder:
    """A cache of compiled programs for JAX, in place of its own `LRUCache`.

    A program appears under its name when it is whole, and a damaged one counts as absent, so that
    processes may write at once and be killed. What was used least recently is deleted.

    Args:
      path: an existing folder of this user.
      most: bytes; programs beyond that are deleted.
    """

    def __init__(self, path: Path, most: int):
        self._path, self._most = path, most  # JAX prints `_path`.
        self._size: int | None = None

    def get(self, key: str) -> bytes | None:
        """Returns the program of a key, or None."""
        if jax.config.jax_compilation_cache_dir:  # The user has chosen another one meanwhile.
            compilation_cache.reset_cache()
            return None
        if _is_shared():
            return None
        path = self._path / f"{key}{_SUFFIX}"
        try:
            found = path.read_bytes()
            if hashlib.sha256(found[_N_DIGEST:]).digest() != found[:_N_DIGEST]:
                path.unlink(missing_ok=True)
                return None
            os.utime(path)  # Used now.
        except OSError:
            return None
        return found[_N_DIGEST:]

    def put(self, key: str, value: bytes) -> None:
        """Stores a program; does nothing where that fails, as on a full disk."""
        if _is_shared() or len(value) > self._most:
            return
        with contextlib.suppress(OSError):
            number, name = tempfile.mkstemp(_PART, dir=self._path)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(hashlib.sha256(value).digest() + value)
                os.replace(name, self._path / f"{key}{_SUFFIX}")
            except BaseException:
                os.unlink(name)
                raise
            if self._size is not None:
                self._size += _N_DIGEST + len(value)
            if self._size is None or self._size > self._most:
                self._size = self._tidied()

    def _tidied(self) -> int:
        """Deletes what is too much and what killed processes have left; returns the size."""
        programs, now = [], time.time()
        for entry in os.scandir(self._path):
            with contextlib.suppress(OSError):  # Another process may delete it now.
                about = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    programs.append((about.st_mtime, about.st_size, entry.path))
                elif entry.name.endswith(_PART) and about.st_mtime < now - _HOUR:
                    os.unlink(entry.path)
        size = sum(n for _, n, _ in programs)
        if size > self._most:
            for _, n, path in sorted(programs):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                size -= n
                if size <= 0.9 * self._most:  # Not again at the next program.
                    break
        return size


def _is_shared() -> bool:
    """Whether several processes compile one program: all have to read it then, or none."""
    return jax.process_count() > 1

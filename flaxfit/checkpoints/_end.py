"""The end of a process: what was handed to writers is saved by then, or its code tells of it."""

import atexit
import contextlib
import functools
import os
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from flaxfit.display import say

UNSAVED = 86
"""The exit code of a process whose last save failed; see `flaxfit.callbacks.ExitCode`."""

unfinished: set[Any] = set()
"""The writers that may have something to save, or hold threads: they are closed at the end."""


def close_at_end(writer: Any) -> None:
    """Has a writer closed before the interpreter ends, unless it is finished by then."""
    _register_end()
    unfinished.add(writer)


def wait_for_others(folder: Path, writer: Any = None) -> None:
    """Waits for the saves that writers of this process have begun in a folder.

    Their failures are left to them.

    Args:
      folder: where; links to it count.
      writer: the one that is not waited for.
    """
    place = os.path.realpath(folder)
    others = [each for each in list(unfinished) if each is not writer]
    saves = [each._saving for each in others if os.path.realpath(each.output_dir) == place]
    wait([save for save in saves if save is not None])


def let_go(writer: Any) -> None:
    """Notes that a writer has nothing left to be done at the end."""
    unfinished.discard(writer)


@functools.cache
def _register_end() -> None:
    """Has all writers closed before the interpreter ends, however that comes about."""
    # By the time of `atexit` no thread can be given work, and Orbax would lose the save: this is
    # where `concurrent.futures` registers its own end, and what comes later runs before that.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)
    if hasattr(os, "register_at_fork"):  # A child has no thread that would finish them.
        os.register_at_fork(after_in_child=unfinished.clear)


def _close_all() -> None:
    for writer in list(unfinished):
        try:
            writer.close()
        except Exception as error:
            say(f"{error}\nThe process ends with code {UNSAVED} (UNSAVED).")
            atexit.register(_end_unsaved)


def _end_unsaved() -> None:
    """Ends the process with a code that tells of the loss, when all else is done at its end."""
    atexit.unregister(_end_unsaved)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(UNSAVED)

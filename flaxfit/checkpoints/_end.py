"""Closes open writers before the process ends; the exit code reports a failed save."""

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


open_writers: set[Any] = set()
"""Every `CheckpointFileWriter` that may have a pending save or threads."""


def close_at_end(writer: Any) -> None:
    """Registers a writer to be closed before the interpreter ends."""
    _register_end()
    open_writers.add(writer)


def wait_for_others(folder: Path, writer: Any = None) -> None:
    """Waits for other writers of this process that save into a folder (links resolved).

    Does not raise their failures.
    """
    place = os.path.realpath(folder)
    others = [each for each in list(open_writers) if each is not writer]
    saves = [each._saving for each in others if os.path.realpath(each.output_dir) == place]
    wait([save for save in saves if save is not None])


@functools.cache
def _register_end() -> None:
    # Not `atexit`: by then executors accept no work, and Orbax would lose the save. Functions
    # registered here run in reverse, so before the shutdown that `concurrent.futures` registered.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)
    if hasattr(os, "register_at_fork"):  # A child lacks the threads that would finish the saves.
        os.register_at_fork(after_in_child=open_writers.clear)


def _close_all() -> None:
    for writer in list(open_writers):
        try:
            writer.close()
        except Exception as error:
            say(f"{error}\nThe process ends with code {UNSAVED} (UNSAVED).")
            atexit.register(_end_unsaved)


def _end_unsaved() -> None:
    """Ends the process with `UNSAVED`, after all other exit functions."""
    # Run the other exit functions here, as `os._exit` skips them, and a normal exit returns 0.
    atexit.unregister(_end_unsaved)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(UNSAVED)

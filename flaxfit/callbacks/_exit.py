"""Exit codes of processes that callbacks end, and an exit that prints all threads' stacks."""

import enum
import os
import sys
import threading
import traceback
from typing import NoReturn

from flaxfit.checkpoints._end import UNSAVED
from flaxfit.distributed import PEER_FAILED


class ExitCode(enum.IntEnum):
    """Exit codes of a process that a callback ended; other codes have their usual meaning.

    >>> ExitCode(85).name
    'PREEMPTED'
    """

    PREEMPTED = 85
    """A signal ended the run; every completed step is saved: start the same command again."""
    UNSAVED = UNSAVED
    """A signal ended the run, but its steps could not be saved within the grace period; or the last
    save failed. Earlier checkpoints are intact."""
    HUNG = 87
    """No step completed in the time that `Watchdog` allows."""
    PEER_FAILED = PEER_FAILED
    """Another process of the run has failed; `initialize` ends them together."""


def end_with_stacks(code: ExitCode, reason: str) -> NoReturn:
    """Prints the stacks of all threads and ends the process at once, from any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"flaxfit: {reason}; the process ends with code {code:d} ({code.name})\n"]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"\nThread {names.get(ident, ident)} (most recent call last):\n")
            lines += traceback.format_stack(frame)
    try:
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
    finally:
        os._exit(code)

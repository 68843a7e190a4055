"""The lock of a folder: two processes never save into the same one."""

import functools
import os
import weakref
from pathlib import Path

from flaxfit.distributed._processes import is_main


class FolderLock:
    """Holds a folder for this process for as long as the object is referred to.

    The system gives the lock back when the process ends, however that comes about. No file is
    left. Where a file system has no locks, nothing is locked.
    """

    def __init__(self, descriptor: int) -> None:
        _descriptors.add(descriptor)
        weakref.finalize(self, _close, descriptor)


_descriptors: set[int] = set()
_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


def hold(folder: Path) -> FolderLock | None:
    """Locks a folder that exists; within a process the lock is shared.

    Of several processes that train together, the first one holds it.

    Raises:
      BlockingIOError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # There is none on Windows.
        return None
    if not is_main():
        return None
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if (lock := _held.get(identity)) is not None:
        return lock
    _spare_children()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError(
            error.errno,
            "Cannot save here: another process does, and two runs cannot share a folder. End the "
            "other one, or use another folder",
            str(folder),
        ) from error
    except OSError:
        os.close(descriptor)
        return None
    lock = _held[identity] = FolderLock(descriptor)
    return lock


def _close(descriptor: int) -> None:
    if descriptor in _descriptors:
        _descriptors.remove(descriptor)
        os.close(descriptor)


@functools.cache
def _spare_children() -> None:
    """Has forked children, such as the workers of a data loader, not hold their parent's locks."""
    os.register_at_fork(after_in_child=lambda: [_close(each) for each in list(_descriptors)])

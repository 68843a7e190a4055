"""The lock of a folder: no two processes save into the same folder."""

import functools
import os
import weakref
from pathlib import Path

from flaxfit.distributed import is_main


class FolderLock:
    """Holds a folder until the object is collected or the process ends; leaves no file."""

    def __init__(self, descriptor: int) -> None:
        _descriptors.add(descriptor)
        weakref.finalize(self, _close, descriptor)


_descriptors: set[int] = set()
_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


def hold(folder: Path) -> FolderLock | None:
    """Locks a folder that exists; writers of one process share the lock.

    Only process 0 of a run locks it. Returns None if the file system has no locks.

    Raises:
      BlockingIOError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows.
        return None
    if not is_main():
        return None
    # By inode, as two paths (a link, say) may name one folder.
    status = os.stat(folder)
    identity = status.st_dev, status.st_ino
    if (lock := _held.get(identity)) is not None:
        return lock
    _release_in_children()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError(
            error.errno,
            "Cannot save here: another process is saving into this folder, and two runs cannot "
            "share one. End the other run, or use another folder",
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
def _release_in_children() -> None:
    """Closes inherited locks in forked children, such as data loader workers."""
    os.register_at_fork(after_in_child=lambda: [_close(each) for each in list(_descriptors)])

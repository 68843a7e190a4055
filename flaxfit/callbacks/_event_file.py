"""EventFile: TensorBoard's event file of a folder, to which later runs append."""

import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

Summary: TypeAlias = Any
"""A message of tensorboardX: a named scalar, histogram, image or text."""


class EventFile:
    """Appends summaries to the newest event file of a folder, or makes one.

    A record is: length, checksum of the length, data, checksum of the data.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._proto: Any = event_pb2
        self._checksum = masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("*.tfevents.*"), key=lambda path: path.stat().st_mtime)
        self.is_new = not found
        if found:
            # A record that a killed process left incomplete would hide all later ones.
            os.truncate(found[-1], _end_of_records(found[-1], masked_crc32c))
        path = found[-1] if found else folder / f"events.out.tfevents.{int(time.time())}.flaxfit"
        self._file = path.open("ab")
        if self._file.tell() == 0:
            self._write(file_version="brain.Event:2")

    def restart(self, step: int) -> None:
        """Invalidates the records from this step on."""
        self._write(step=step, session_log=self._proto.SessionLog(status="START"))

    def add(self, step: int, summaries: Iterable[Summary]) -> None:
        """Writes summaries of a step, and flushes them."""
        for summary in summaries:
            self._write(step=step, summary=summary)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, **fields: object) -> None:
        data = self._proto.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.write(length + checksums[0] + data + checksums[1])


def _end_of_records(path: Path, checksum: Callable[[bytes], int]) -> int:
    """Returns the position after the last complete record of a file."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            after = end + length + 16
            if after > size or struct.pack("<I", checksum(head[:8])) != head[8:]:
                break
            end = after
            file.seek(end)
    return end

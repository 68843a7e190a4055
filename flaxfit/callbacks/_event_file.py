"""EventFile: TensorBoard's file of events, one per folder, that a later run goes on with."""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


class EventFile:
    """Appends summaries to the events of a folder.

    A record is its length, a checksum of that, the data, a checksum of these.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the newest file of the folder behind its last whole record, or makes one."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._proto: Any = event_pb2
        self._checksum = masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(folder.glob("*.tfevents.*"), key=lambda path: path.stat().st_mtime)
        self.is_new = not found
        if found:
            # A record that a killed process left unfinished would hide all that follow.
            os.truncate(found[-1], _end_of_records(found[-1], masked_crc32c))
        path = found[-1] if found else folder / f"events.out.tfevents.{int(time.time())}.flaxfit"
        self._file: BinaryIO = path.open("ab")
        if self._file.tell() == 0:
            self._write(self._proto.Event(file_version="brain.Event:2"))

    def restart(self, step: int) -> None:
        """Says that what the file holds of this step and later ones is void."""
        self._write(
            self._proto.Event(step=step, session_log=self._proto.SessionLog(status="START"))
        )

    def add(self, step: int, *summaries: Any) -> None:
        """Writes summaries of a step, to the disk."""
        for summary in summaries:
            self._write(self._proto.Event(step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.write(length + checksums[0] + data + checksums[1])


def _end_of_records(path: Path, checksum: Callable[[bytes], int]) -> int:
    """Where the last whole record of a file ends."""
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

"""StepSave: the save of one step by all processes together."""

from collections.abc import Mapping
from pathlib import Path

from flaxfit.checkpoints import _contents, _folder
from flaxfit.checkpoints._orbax import StepWriter, savable, write_record
from flaxfit.checkpoints._record import Record
from flaxfit.display import first_line
from flaxfit.distributed import exchange, from_main
from flaxfit.tree import Array


class StepSave:
    """Copies arrays that may change; `finish` does the rest, in the background.

    If none may change, Orbax also starts in `finish`: here its busy threads would delay the caller.
    Arrays and record are from `contents`. The step is written to `place`, then renamed to `path`.
    """

    def __init__(
        self,
        writer: StepWriter,
        place: Path,
        path: Path,
        arrays: Mapping[str, Array],
        record: Record,
    ) -> None:
        self._writer, self._place, self._path, self._record = writer, place, path, record
        self.step: int = record["step"]
        self.arrays = {name: savable(array) for name, array in arrays.items()}
        self.failure: Exception | None = None
        """The error of a failed start, which `finish` reports to the other processes."""
        self._is_started = not _contents.holds_memory(record)
        if self._is_started:
            try:
                writer.start(place, self.arrays)
            except Exception as error:
                self.failure = error

    def finish(self) -> None:
        """Waits until the step is complete on disk; raises the failure of any process."""
        try:
            if not self._is_started:
                arrays = _contents.undeleted(self.arrays, self._record)
                self._writer.start(self._place, arrays)
            self._writer.wait()  # Before the digests, whose computation slows the training thread.
            self._record = _contents.with_digests(self._record)
        except Exception as error:
            self.failure = self.failure or error
        # The folder is in the topic, as the threads of several writers may run in any order.
        topic = f"a save in {self._place.parent}"
        reason = self.failure and first_line(self.failure)
        reported = exchange(f"the arrays of {topic}", reason, seconds=3600)
        if self.failure is not None:
            raise self.failure
        if others := [text for text in reported if text]:
            raise RuntimeError(f"On another process: {others[0]}")
        # Process 0 commits only now, when the arrays of every process are on disk.
        from_main(f"the end of {topic}", self._complete)

    def _complete(self) -> None:
        self._writer.finish(self._place, self.arrays)
        write_record(self._place, self._record)
        _folder.complete(self._path, self.step, self._place)


def cannot_save(
    folder: Path, step: int, arrays: Mapping[str, Array], error: Exception
) -> RuntimeError:
    """Returns the error of a failed save, with the bytes that it needs."""
    space = _folder.space(folder, sum(array.nbytes for array in arrays.values()))
    failure = RuntimeError(
        f"Cannot save the checkpoint of step {step} in {folder}: {type(error).__name__}: {error}\n"
        f"(It needs up to {space}.) Earlier steps are unchanged."
    )
    failure.__cause__ = error
    return failure

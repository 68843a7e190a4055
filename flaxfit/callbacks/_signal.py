"""SaveOnSignal: saves after the current dispatch when a signal asks the process to end."""

import atexit
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax

from flaxfit.callbacks._exit import ExitCode, end_with_stacks
from flaxfit.checkpoints import CheckpointFileWriter
from flaxfit.display import say
from flaxfit.distributed import is_preempted
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Function

_Handler: TypeAlias = Function | int | None
"""A signal handler, as `signal.signal` takes and returns it."""
_SECONDS_BETWEEN_LOOKS = 0.5


class SaveOnSignal:
    """Saves at the end of the dispatch during which a signal arrives, and ends the process.

    The saved state lies between two checkpoints: callbacks do not see it, and a run that resumes
    from it reports the same metrics as without the interruption. The process then ends by
    `SystemExit` with `ExitCode.PREEMPTED`, or with `UNSAVED` if that save failed. It works in the
    main thread only; `close` restores the earlier handlers. With several processes JAX's
    preemption service watches SIGTERM, and all save the same step; a hanging process also ends
    after the grace period.

    `fit(checkpoint_dir=...)` adds it if nothing else handles SIGTERM.

    >>> import tempfile
    >>> from flaxfit.checkpoints import CheckpointFileWriter
    >>> callbacks = [SaveOnSignal(), CheckpointFileWriter(tempfile.mkdtemp())]

    Args:
      writer: a `CheckpointFileWriter`; None: every writer among the loop's callbacks.
      signals: the signals to listen to.
      grace_seconds: how long after the signal the process may live; it then ends with
        `ExitCode.UNSAVED` (`PREEMPTED`, if every completed step is on disk) and shows where every
        thread is. None: without limit.
      on_exception: whether to save as well when an exception ends training, Ctrl-C included
        (with `fit`, or with `with loop:`). An exception in a callback leaves its checkpoint
        unfinished: it is not saved.
    """

    borrows = True
    order = "last"
    """It closes before the others, which may change the state when they close."""

    def __init__(
        self,
        writer: CheckpointFileWriter | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM,),
        grace_seconds: float | None = 60.0,
        on_exception: bool = False,
    ) -> None:
        if grace_seconds is not None and grace_seconds <= 0:
            raise ValueError(f"grace_seconds must be positive or None, got {grace_seconds}.")
        self._writer = writer
        self._signals = tuple(signals)
        self._grace_seconds = grace_seconds
        self._on_exception = on_exception
        self._loop: Callable[[], TrainLoop | None] = lambda: None
        self._previous: dict[int, _Handler] = {}
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._received: int | None = None
        self._is_done = False
        self._saved: list[int] = []

    def attach(self, loop: TrainLoop) -> None:
        """Starts to listen for signals, and to act on them after each dispatch."""
        self._stop_listening()  # Else a second loop would save its own handler as the earlier one.
        self._loop = weakref.ref(loop)
        if not self._writers(loop):
            raise ValueError(
                "SaveOnSignal has nothing to save with: add a CheckpointFileWriter to the "
                "callbacks, or pass one as writer=."
            )
        if (attach := getattr(self._writer, "attach", None)) is not None:
            attach(loop)  # It saves the states of the callbacks.
        self._received, self._is_done = None, False
        self._began = loop.revision
        loop.on.after_dispatch.append(self._watch)
        self._n_calls = 0
        if jax.process_count() == 1:
            self._listen()
        else:
            if self._signals != (signal.SIGTERM,):
                say("SaveOnSignal handles only SIGTERM when several processes train together")
            self._begin_deadline()
            _hear_notices(self._arrived, self._ended)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to save: no loop, or another thread closed it."""
        return self._loop() is None or (self._ended.is_set() and bool(self._previous))

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            say("SaveOnSignal receives no signals: Python delivers them to the main thread only")
            return
        self._begin_deadline()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)

    def _begin_deadline(self) -> None:
        # SimpleQueue.put is reentrant, so a signal handler may call it at any moment.
        self._arrived = queue.SimpleQueue()
        # New objects for each run: the thread of an earlier run may still hold its own.
        self._ended, self._saved = threading.Event(), []
        arguments = (
            self._arrived,
            self._grace_seconds,
            weakref.WeakMethod(self._why_nothing_is_lost),  # Do not keep loop and state alive.
            self._saved,  # The thread may outlive this object and its loop.
        )
        threading.Thread(
            target=_limit, args=arguments, daemon=True, name="flaxfit-deadline"
        ).start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.is_idle:
            self._stop_listening()
            signal.raise_signal(number)
        elif self._received is None:
            self._received = number
            self._arrived.put(signal.Signals(number).name)

    def _watch(self, step: int) -> None:
        loop = self._loop()
        if loop is not None and (self._received is not None or self._have_agreed()):
            self._save_and_end(loop)

    def _have_agreed(self) -> bool:
        """Returns whether all processes have agreed to end at this step."""
        if jax.process_count() == 1:
            return False
        from jax.experimental import multihost_utils

        self._n_calls += 1
        return multihost_utils.reached_preemption_sync_point(self._n_calls)

    def _save_and_end(self, loop: TrainLoop) -> None:
        step = self._save(loop)
        if step is None:
            return  # Try again after the next step.
        if not self._saved:
            what = f"step {step:,} could not be saved, earlier checkpoints are good"
            self._end(ExitCode.UNSAVED, what)
        self._end(ExitCode.PREEMPTED, f"step {step:,} is saved")

    def _end(self, code: ExitCode, what: str) -> NoReturn:
        name = signal.Signals(self._received or signal.SIGTERM).name
        say(f"received {name}: {what}; the process ends with code {code:d} ({code.name})")
        raise SystemExit(code)

    def _save(self, loop: TrainLoop) -> int | None:
        """Saves and waits for the disk; returns the step, or None if the loop has no snapshot.

        Failures are printed, so that an earlier failed save does not prevent this one.
        """
        checkpoint = loop.snapshot()
        if checkpoint is None:
            return None
        writers = self._writers(loop)
        for writer in writers:
            for attempt in (writer.close, lambda to=writer: to.save(checkpoint), writer.close):
                try:
                    attempt()
                except Exception as error:
                    say(str(error))
        saved = {getattr(writer, "last_saved", checkpoint.step) for writer in writers}
        self._saved[:] = [checkpoint.step] if saved == {checkpoint.step} else []
        self._is_done = True
        return checkpoint.step

    def _why_nothing_is_lost(self) -> str | None:
        """Returns why no completed step would be lost now, or None if some would be."""
        loop = self._loop()
        # By step, not revision: after the save, another callback may have restored best weights.
        if self._saved and (loop is None or loop.step == self._saved[0]):
            return _in_words(self._saved)
        if loop is None:
            return None
        is_where_it_began = loop.step == (0 if loop.start is None else loop.start.step)
        if is_where_it_began and loop.revision[:2] == self._began[:2]:
            return f"no step was completed since step {loop.step:,}, where it began"
        # By revision, not step: after `restore` the same number may mean another state.
        saved = {getattr(writer, "saved_revision", None) for writer in self._writers(loop)}
        return f"step {loop.step:,} is saved" if saved == {loop.revision} else None

    def _writers(self, loop: TrainLoop) -> list[Any]:
        if self._writer is not None:
            return [self._writer]
        return [each for each in loop.callbacks if hasattr(each, "save")]

    def close(self) -> None:
        """Restores the earlier handlers; acts on a signal that came after the last step."""
        error, loop = sys.exception(), self._loop()
        try:
            if self._is_done or loop is None:
                pass
            elif error is None and self._received is not None:
                if (why := self._why_nothing_is_lost()) is not None:
                    self._is_done = True
                    self._end(ExitCode.PREEMPTED, why)
                self._save_and_end(loop)
            elif error is not None and self._on_exception:
                step = self._save(loop)
                if step is not None and self._saved:
                    say(f"{type(error).__name__}: step {step:,} is saved")
        finally:
            self._stop_listening()

    def _stop_listening(self) -> None:
        # Only the main thread may. Else the next signal restores the handlers, and is raised again.
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                # Keep a handler that was installed later.
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            self._previous = {}
        self._ended.set()
        if self._received is None and not self._is_done:
            self._arrived.put(None)


def _hear_notices(arrived: queue.SimpleQueue[str | None], ended: threading.Event) -> None:
    """Starts a thread that asks JAX whether the process must end, until `ended` is set."""

    def hear() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            if is_preempted():
                arrived.put("SIGTERM")
                return

    thread = threading.Thread(target=hear, daemon=True, name="flaxfit-notice")
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(10.0)

    # A thread that returns from a call of JAX's client after Python has ended aborts the process.
    atexit.register(end)


def _limit(
    arrived: queue.SimpleQueue[str | None],
    seconds: float | None,
    why_nothing_is_lost: Callable[[], Callable[[], str | None] | None],
    saved: Sequence[int],
) -> None:
    """Ends the process some seconds after a signal, even if it has saved by then."""
    name = arrived.get()
    if name is None or seconds is None:
        return
    try:
        arrived.get(timeout=seconds)
    except queue.Empty:
        ask = why_nothing_is_lost()
        if (why := _in_words(saved) if ask is None else ask()) is not None:
            end_with_stacks(ExitCode.PREEMPTED, f"{name} arrived {seconds:g} s ago; {why}")
        reason = f"{name} arrived {seconds:g} s ago, and no step and no save was completed since"
        end_with_stacks(ExitCode.UNSAVED, reason)


def _in_words(saved: Sequence[int]) -> str | None:
    return f"step {saved[0]:,} is saved" if saved else None

"""Checkpointing: ends a span of steps with a checkpoint, and shows that to the callbacks."""

from collections.abc import Callable

from flaxfit.loop._callback_list import Delivery
from flaxfit.loop._record import LossWarning, get_running, make_checkpoint
from flaxfit.loop._settings import Settings
from flaxfit.loop._tuning import with_settings
from flaxfit.state._checkpoint import Checkpoint


class Checkpointing(Settings):
    """The part of `TrainLoop` that makes its checkpoints and delivers them."""

    _warn_of_loss: LossWarning

    def _next_target(self, last: int | None = None) -> Callable[[], int]:
        """The step of the next checkpoint; a function, as the schedule may change on the way."""
        # After steps that no checkpoint has shown, one may still be due at this very step.
        here = self.step - bool(self.n_completed_steps)
        return lambda: self.schedule.after(here, last)

    def _end_span(self) -> None:
        """Makes the checkpoint of the steps since the previous one, and starts a new count."""
        stepper = self._stepper
        stepper.consistency.checkpoint(stepper.step, stepper.state)
        checkpoint = make_checkpoint(
            stepper, self._watch, epoch=self._epoch, stop=self._is_finishing
        )
        self._warn_of_loss(checkpoint)
        stepper.interrupts.is_held = True
        self._due = Delivery(checkpoint, self._callbacks, self._settle)
        self._reset()
        stepper.interrupts.release()

    def _deliver(self) -> Checkpoint | None:
        """Shows the checkpoint to the callbacks; after an exception, to those still waiting."""
        if self._due is None:
            return None
        stepper = self._stepper
        with self.in_phase("callbacks"):
            checkpoint = self._due.finish(self.owned, lambda: stepper.revision)
        self._due = None
        self._last = checkpoint.replace(state=None, last_grads=None)
        self.stopped = checkpoint.stop
        return checkpoint

    def _settle(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds what callbacks have set, and whether it is the last, before it is saved."""
        tuned = [] if self._due is None else self._due.tuned
        if tuned and self.step == checkpoint.step and hasattr(checkpoint.state, "opt_state"):
            # The callbacks remember that they have set these: a resumed run needs both.
            is_borrowed = checkpoint.is_borrowed
            checkpoint = with_settings(self._stepper, checkpoint, tuned)
            if is_borrowed:  # It has the present state, of which others may be frozen now.
                checkpoint = checkpoint.replace(running=get_running(self._stepper))
        # A callback may have called `finish` just now.
        wanted, self._is_finishing = checkpoint.stop or self._is_finishing, False
        stop = self._stepper.consistency.stop(wanted)
        return checkpoint if stop == checkpoint.stop else checkpoint.replace(stop=stop)

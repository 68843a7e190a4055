"""Makes checkpoints, and records the facts that a run needs to resume exactly."""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np

from flaxfit.loop._stepper import Stepper
from flaxfit.loop._stopwatch import Stopwatch
from flaxfit.loop._tuning import learning_rates, set_generations
from flaxfit.metrics._monitor import modes_of
from flaxfit.optim._generations import from_json
from flaxfit.state import Checkpoint
from flaxfit.task import frozen_facts, module_of
from flaxfit.tree import Json


def make_checkpoint(
    stepper: Stepper,
    watch: Stopwatch,
    *,
    epoch: int | None,
    stop: bool = False,
    between: bool = False,
) -> Checkpoint:
    """Makes a checkpoint of the steps since the last reset; it borrows its arrays.

    Args:
      stepper: holds the state and the counts.
      watch: the time of these steps, including preparation.
      epoch: the number of the epoch of `fit`.
      stop: whether the run ends here.
      between: whether counting continues afterwards, so that the sums must be recorded.
    """
    # While the devices compute, do everything that needs no results of theirs.
    stepper.cursor.shuffle_ahead()
    state, grads = stepper.placed.lend()
    return Checkpoint(
        step=stepper.step,
        state=state,
        modes=modes_of(stepper.task.metrics),
        epoch=epoch,
        n_completed_steps=stepper.tally.n_steps,
        n_examples=stepper.tally.n_examples,
        compile_time=stepper.programs.watch.seconds,
        stop=stop,
        data_state=stepper.cursor.position(),
        running=get_running(stepper),
        last_grads=grads,
        companions=stepper.companions.saved,
        module_of=functools.partial(module_of, stepper.task),
        # The metrics wait for the devices; the elapsed time must be read after them.
        metrics=stepper.metrics() | learning_rates(stepper),
        elapsed_time=watch.seconds - stepper.preparation_time,
        sums=jax.tree.map(np.array, stepper.tally.totals) if between else None,
    )


def get_running(stepper: Stepper) -> dict[str, Json]:
    """Returns, as JSON, further facts that a run needs to resume exactly.

    Among them is the batch size, since the next batch may be a remainder.
    """
    running: dict[str, Json] = {"batch_size": stepper.feed.batch_size}
    running |= frozen_facts(stepper.task, lambda: stepper.state.params)
    if (n_virtual := stepper.strategy.virtual_replicas) is not None:
        running["virtual_replicas"] = n_virtual
    return running


def set_running(stepper: Stepper, running: dict[str, Json], say: Callable[[str], None]) -> None:
    """Restores the facts that `get_running` returned."""
    stepper.feed.batch_size = running.get("batch_size", stepper.feed.batch_size)
    set_generations(stepper, from_json(running.get("late", ())))
    before, now = running.get("virtual_replicas"), stepper.strategy.virtual_replicas
    if before != now:
        say(f"results will differ in their last bits: virtual_replicas was {before}, now is {now}")


class LossWarning:
    """Warns when the loss becomes NaN or infinite; again only after it was finite."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._was_finite = say, True

    def __call__(self, checkpoint: Checkpoint) -> None:
        """Checks the loss of a checkpoint."""
        loss = checkpoint.scalars.get("loss", 0.0)
        if self._was_finite and not math.isfinite(loss):
            self._say(
                f"warning: the loss is {loss} at step {checkpoint.step:,}. Lower the learning rate "
                "or clip the gradients; callbacks.StopOnNaN() ends such a run."
            )
        self._was_finite = math.isfinite(loss)

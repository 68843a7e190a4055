"""Rollback: returns to the last good checkpoint when training diverges, and skips the data."""

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.callbacks._callback import attached
from flaxfit.display import plural, say
from flaxfit.loop import TrainLoop
from flaxfit.metrics._monitor import Monitor
from flaxfit.optim._hyperparams import with_hyperparams_of
from flaxfit.state import Checkpoint, TrainState
from flaxfit.tree import Array, PyTree, is_key

_FIELDS = ("step", "params", "opt_state", "model_state")


class Rollback:
    """Restores the last good state when a metric or the parameters are no longer finite.

    It restores parameters, optimizer state and model state of the last good checkpoint, or of the
    start. The step and the data position do not change: the data that caused the failure is
    skipped, and no random key is used twice. Hyperparameters that were set, such as a lowered
    learning rate, stay. `metrics["rollbacks"]` counts rollbacks, so the history shows each rollback
    together with the value that was not finite.

    The good state is kept in the memory of the host, a copy for every checkpoint. A
    `CheckpointFileWriter` also saves it, unless it is the current state.

    >>> import numpy as np, optax
    >>> from flaxfit import TrainLoop, TrainTask
    >>> one = np.ones((1, 1), np.float32)
    >>> data = [(one, one), (one, one), (np.inf * one, one), (one, one), (one, one)]
    >>> task = TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", data)
    >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
    >>> loop = TrainLoop(init, task, 0, callbacks=[Rollback()], stdout=False)
    >>> [checkpoint.metrics["rollbacks"] for checkpoint in loop]
    [0, 0, 1, 1, 1]

    Args:
      monitor: the metric to watch.
      n_times: how often to roll back before giving up with a FloatingPointError.
    """

    borrows = True
    adds: ClassVar[dict[str, str | None]] = {"rollbacks": "min"}
    """The metric that it adds to a checkpoint."""

    def __init__(self, monitor: str = "loss", *, n_times: int = 3) -> None:
        if n_times < 1:
            raise ValueError(f"n_times must be at least 1, got {n_times}.")
        # Any finite value is good, so its mode does not matter.
        self._monitor = Monitor(monitor, "min", "Rollback")
        self._n_times = n_times
        self._loop: TrainLoop | None = None
        self._good: TrainState | None = None
        self.n_rollbacks: int = 0
        """The number of rollbacks."""

    def attach(self, loop: TrainLoop) -> None:
        """Attaches to a loop; its current state is good if it is finite."""
        self._loop = loop
        self._monitor.attach(loop, self)
        state = _to_host(loop.state)
        self._good = state if _is_finite(state) else None
        self.n_rollbacks = 0

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Replaces a state that is not finite by the last good one, also in the loop."""
        value = self._monitor.read(checkpoint)
        state = _to_host(checkpoint.state)
        if (value is None or math.isfinite(value)) and _is_finite(state):
            self._good = state
        else:
            checkpoint = checkpoint.replace(state=self._go_back(checkpoint.step, value))
        return checkpoint.with_metrics({"rollbacks": self.n_rollbacks})

    def _go_back(self, step: int, value: float | None) -> TrainState:
        loop = attached(self._loop, "Rollback", "restores")
        what = f"the parameters or the model's state are not finite at step {step:,}"
        if value is not None and not math.isfinite(value):
            what = f"{self._monitor.name} is {value:.4g} at step {step:,}"
        if self._good is None:
            raise FloatingPointError(
                f"{what}, and there is no good state to return to: this run began with one that is "
                "not finite. Restore an earlier checkpoint."
            )
        if self.n_rollbacks >= self._n_times:
            raise FloatingPointError(
                f"{what}, after {plural(self.n_rollbacks, 'rollback')}. Lower the learning rate "
                "or clip: optax.chain(optax.clip_by_global_norm(1.0), optimizer)."
            )
        self.n_rollbacks += 1
        say(
            f"{what}: continuing with the state of step {int(self._good.step):,} "
            f"(rollback {self.n_rollbacks} of {self._n_times})"
        )
        # Keep hyperparameters that callbacks have lowered: they would not set them again.
        opt_state = with_hyperparams_of(self._good.opt_state, _to_host(loop.state).opt_state)
        loop.restore(self._good.replace(step=jnp.int32(step), opt_state=opt_state))
        return loop.state

    def get_state(self) -> dict[str, PyTree]:
        """Returns the count, and the good state unless it is the current one."""
        state: dict[str, PyTree] = {"n_rollbacks": self.n_rollbacks}
        if self._good is None or self._loop is None or int(self._good.step) == self._loop.step:
            return state
        return state | {name: getattr(self._good, name) for name in _FIELDS}

    def set_state(self, state: Mapping[str, PyTree]) -> None:
        self.n_rollbacks = int(state["n_rollbacks"])
        fields = {name: state[name] for name in _FIELDS if name in state}
        if self._loop is not None and fields:
            self._good = _to_host(self._loop.state.replace(**fields))


def _to_host(state: TrainState) -> TrainState:
    """Copies the state to NumPy; random keys stay JAX arrays, as NumPy has none."""

    def copied(x: Array) -> Array:
        return jnp.copy(x) if is_key(x) else np.array(x)

    return jax.tree.map(copied, state)


def _is_finite(state: TrainState) -> bool:
    return all(
        bool(np.isfinite(x).all())
        for x in jax.tree.leaves((state.params, state.model_state))
        if jnp.issubdtype(x.dtype, jnp.inexact)
    )

"""AverageWeights: stochastic weight averaging, the equal mean of the weights of checkpoints."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxfit.callbacks._callback import first_epoch
from flaxfit.callbacks._stopping import EarlyStopping
from flaxfit.display import say
from flaxfit.loop import TrainLoop
from flaxfit.optim._averaged import has_average, wide
from flaxfit.state import Checkpoint
from flaxfit.tree import ArrayLike, Json, PyTree, owner_of, without_mesh

_WEIGHTS = ("params", "model_state")


class AverageWeights:
    """Ends training with the mean of the weights of its checkpoints (epochs, in `fit`).

    Stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407), with equal weights of the
    checkpoints. Training, metrics and checkpoints use the last weights; the mean replaces them when
    training ends, for any reason. Running statistics, such as BatchNorm's, are also averaged, and
    `Model.update_statistics` recomputes them; integers keep their last values. Means are computed
    in float32 or better. A `CheckpointFileWriter` saves them, so a resumed run ends with the same
    mean.

    >>> import numpy as np, optax
    >>> from flaxfit import TrainLoop, TrainTask
    >>> x = np.ones((8, 1), np.float32)
    >>> apply = lambda v, x, **_: (v["params"] * x, {})
    >>> task = TrainTask(apply, optax.sgd(0.25), "mse", (x, x))
    >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
    >>> loop = TrainLoop(init, task, 0, n_steps=2, callbacks=[AverageWeights()], stdout=False)
    >>> [float(checkpoint.state.params[0]) for checkpoint in loop], float(loop.state.params[0])
    ([0.5, 0.75], 0.625)

    Args:
      start_from_epoch: the number of initial checkpoints (epochs, in `fit`) to leave out.
    """

    borrows = True

    def __init__(self, start_from_epoch: int = 0) -> None:
        if start_from_epoch < 0:
            raise ValueError(f"start_from_epoch must not be negative, got {start_from_epoch}.")
        self._start_from = start_from_epoch
        self._loop: TrainLoop | None = None
        self._reset()

    def _reset(self) -> None:
        self.n_averaged: int = 0
        """The number of checkpoints in the mean."""
        self._n_seen, self._is_due = 0, False
        self._mean: dict[str, PyTree] = {}

    def attach(self, loop: TrainLoop) -> None:
        """Starts from scratch with a loop.

        Raises:
          ValueError: the task already keeps an average, or EarlyStopping restores weights.
        """
        if has_average(loop.state):
            raise ValueError(
                "AverageWeights cannot average weights that already have an average, from ema= or "
                "a schedule-free optimizer. Remove one of the two."
            )
        for each in map(owner_of, getattr(loop, "callbacks", ())):
            if isinstance(each, EarlyStopping) and each.restore_best:
                raise ValueError(
                    "AverageWeights and EarlyStopping both set the weights when training ends. "
                    "Pass restore_best=False to EarlyStopping."
                )
        self._reset()
        self._loop = loop

    @without_mesh()
    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds the weights of a checkpoint to the mean."""
        self._n_seen, self._is_due = self._n_seen + 1, True
        if self._n_seen > self._start_from - first_epoch(self._loop):
            self.n_averaged += 1
            weights = {name: getattr(checkpoint.state, name) for name in _WEIGHTS}
            mean = self._mean or jax.tree.map(wide, weights)
            self._mean = _moved(mean, weights, self.n_averaged)
        return checkpoint

    @without_mesh()
    def close(self) -> None:
        """Replaces the loop's weights by the mean, once each time training ends."""
        loop, is_due, self._is_due = self._loop, self._is_due, False
        if loop is None or not is_due:
            return
        if not self._mean:
            say(f"AverageWeights: training ended before epoch {self._start_from + 1}: no average")
            return
        last = {name: getattr(loop.state, name) for name in _WEIGHTS}
        mean = jax.tree.map(lambda x, y: y.astype(x.dtype), last, self._mean)
        loop.restore(loop.state.replace(**mean))

    def get_state(self) -> dict[str, PyTree]:
        """Returns what a resumed run needs: JSON, and the mean as fields of a state."""
        return {**self._mean, "n_averaged": self.n_averaged, "n_seen": self._n_seen}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._reset()
        self.n_averaged, self._n_seen = state["n_averaged"], state["n_seen"]
        self._mean = {name: state[name] for name in _WEIGHTS if name in state}
        self._is_due = True


@jax.jit
def _moved(mean: PyTree, weights: PyTree, n: ArrayLike) -> PyTree:
    """Returns `mean + (weights - mean) / n`, a running mean; with n = 1, the weights."""

    def move(mean: jax.Array, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return mean + (x.astype(mean.dtype) - mean) / jnp.asarray(n, mean.real.dtype)
        return jnp.copy(x)  # The step may donate the buffer of x.

    return jax.tree.map(move, mean, weights)

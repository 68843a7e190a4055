"""SwapEMA: swaps the parameters and their moving average when training ends."""

from collections.abc import Mapping

from flaxfit.loop import TrainLoop
from flaxfit.optim import swap_ema
from flaxfit.state import Checkpoint
from flaxfit.tree import Json


class SwapEMA:
    """Swaps the parameters and their moving average when training ends.

    For a loop whose task keeps one, `TrainTask(ema=0.999)`: afterwards `loop.state.params` is the
    average, and the average is the parameters. Checkpoints that were yielded or saved before stay
    as they are. Training then continues from the average. A `Model` does not need it: `Model(ema=)`
    already evaluates, predicts and exports with the average.

    >>> import numpy as np, optax
    >>> from flaxfit import TrainLoop, TrainTask
    >>> x = np.ones((8, 1), np.float32)
    >>> apply = lambda v, x, **_: (v["params"] * x, {})
    >>> task = TrainTask(apply, optax.sgd(0.5), "mse", (x, x), ema=0.5)
    >>> init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
    >>> loop = TrainLoop(init, task, 0, n_steps=1, callbacks=[SwapEMA()], stdout=False)
    >>> checkpoint = list(loop)[-1]
    >>> float(checkpoint.state.params[0]), float(loop.state.params[0])
    (1.0, 0.5)
    """

    borrows = True

    def __init__(self) -> None:
        self._loop: TrainLoop | None = None
        self._is_due = False

    def attach(self, loop: TrainLoop) -> None:
        """Checks that the loop keeps an average, and that the loop is not driven by `fit`."""
        if loop.fit_call is not None:
            raise ValueError(
                "SwapEMA is for loops: Model(ema=...) already evaluates, predicts and exports with "
                "the moving average. Remove SwapEMA; flaxfit.optim.swap_ema(model.state).params is "
                "the average."
            )
        swap_ema(loop.state)
        self._loop, self._is_due = loop, False

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        self._is_due = True
        return checkpoint

    def get_state(self) -> dict[str, Json]:
        return {"is_due": self._is_due}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._is_due = state["is_due"]

    def close(self) -> None:
        """Swaps, once each time training ends."""
        if self._is_due and self._loop is not None:
            self._is_due = False
            self._loop.restore(swap_ema(self._loop.state))

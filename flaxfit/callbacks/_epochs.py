"""Epochs: the index of the current epoch, also for callbacks that skip checkpoints."""

from collections.abc import Callable, Mapping

from flaxfit.callbacks._callback import first_epoch
from flaxfit.loop import TrainLoop
from flaxfit.tree import Json


class Epochs:
    """Counts the epochs of `fit`, or the checkpoints of your own loop, as they begin."""

    def __init__(self) -> None:
        self._first, self._n_begun = 0, 0
        self._begun_at: int | None = None
        self._loop: TrainLoop | None = None
        self._on_begin: Callable[[int], object] | None = None

    def attach(self, loop: TrainLoop, on_begin: Callable[[int], object] | None = None) -> None:
        """Counts from a loop's first epoch; `on_begin(epoch)` is called before its first step."""
        self._loop, self._on_begin = loop, on_begin
        self._first, self._n_begun, self._begun_at = first_epoch(loop), 0, None
        loop.on.before_span.append(self._begin)

    @property
    def is_of_fit(self) -> bool:
        """Whether `fit` drives the loop, so that checkpoints are epochs."""
        return self._loop is not None and self._loop.fit_call is not None

    @property
    def number(self) -> int:
        """The index of the current epoch, from 0 or from `initial_epoch`."""
        return self._first + max(self._n_begun - 1, 0)

    def _begin(self, step: int) -> None:
        if step == self._begun_at:  # A pass without a step: the data had ended.
            return
        self._n_begun, self._begun_at = self._n_begun + 1, step
        if self._on_begin is not None:
            self._on_begin(self.number)

    def get_state(self) -> dict[str, Json]:
        """Returns what a resumed run needs."""
        return {"n_begun": self._n_begun, "begun_at": self._begun_at}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._n_begun, self._begun_at = state["n_begun"], state["begun_at"]

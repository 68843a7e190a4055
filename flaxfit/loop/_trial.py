"""Trial: finds out during training whether several steps per dispatch are faster than one."""

import time
from collections.abc import Callable

from flaxfit.loop._stepper import Stepper

_MOST_STEPS = 32
_MOST_SECONDS = 0.1
"""The longest dispatch to try, in seconds of single steps; a longer one gains nothing."""
_N_TIMED = 8
_N_SPANS = 3


class Trial:
    """Times the steps of a run, first one per dispatch, then several, and keeps the faster.

    Each step is taken once; the trial only waits for the device at the ends of a timed span. It
    starts over for batches of another shape.

    Args:
      stepper: takes the steps.
      say: prints the choice, once.
    """

    def __init__(self, stepper: Stepper, say: Callable[[str], None]):
        self._stepper = stepper
        self._say = say
        self._begin()

    def _begin(self) -> None:
        self.n_steps = 1
        """How many steps a dispatch takes at present."""
        self.is_over = False
        """Whether the choice is made."""
        self._shapes = self._stepper.loader.shapes
        self._single: list[float] = []
        self._several: list[float] = []
        self._new_span()

    def _new_span(self) -> None:
        self._n_taken, self._seconds = 0, 0.0

    def advance(self, n_left: int, spacing: int) -> bool:
        """Dispatches the next steps, at most `n_left`, where checkpoints are `spacing` apart.

        Returns whether there was a batch to step.
        """
        stepper = self._stepper
        if stepper.loader.shapes is not self._shapes:
            is_known = self._shapes in (None, stepper.loader.shapes)
            self._shapes = stepper.loader.shapes
            if not is_known:
                self._begin()
        if self.is_over or spacing == 1 or stepper.inspection.is_slow_in_loops:
            return stepper.advance(min(self.n_steps, n_left))
        if n_left < self.n_steps:
            return stepper.advance(1)
        if not stepper.tally.n_steps:  # Behind a checkpoint, at which others had their time.
            self._new_span()
        return self._timed(spacing)

    def _timed(self, spacing: int) -> bool:
        """Dispatches steps, timed: a span of single ones, or several at once."""
        stepper, step = self._stepper, self._stepper.step
        if not self._n_taken:
            stepper.wait()
        before = stepper.preparation_time
        began = time.perf_counter()
        has_stepped = stepper.advance(self.n_steps)
        self._n_taken += stepper.step - step
        is_end = self.n_steps > 1 or self._n_taken == min(_N_TIMED, spacing) or not has_stepped
        if is_end:
            stepper.wait()
        prepared = stepper.preparation_time - before
        self._seconds += time.perf_counter() - began - prepared
        if is_end and self._n_taken:
            self._note(stepper.consistency.slowest(self._seconds / self._n_taken), spacing)
            self._new_span()
        return has_stepped

    def _note(self, seconds: float, spacing: int) -> None:
        """Notes the time of a step, and goes on to what is to be tried next."""
        timed = self._single if self.n_steps == 1 else self._several
        timed.append(seconds)
        if timed is self._single and len(timed) == _N_SPANS:
            self.n_steps = several(min(timed), spacing)
            self.is_over = self.n_steps == 1
        # A loop may be many times slower than its steps: once is enough.
        is_hopeless = timed is self._several and seconds > 2 * min(self._single)
        if is_hopeless or len(self._several) == _N_SPANS:
            n, single, fused = self.n_steps, min(self._single), min(self._several)
            self.is_over = True
            self.n_steps = n if fused < 0.95 * single else 1
            self._say(
                f"steps_per_call='auto': a step takes {single * 1e6:,.0f} us by itself and "
                f"{fused * 1e6:,.0f} us as one of {n} in a dispatch; chosen {self.n_steps}"
            )


def several(seconds: float, spacing: int) -> int:
    """How many steps of so many seconds to try in one dispatch; 1: there is nothing to gain.

    A number that divides the spacing of checkpoints needs one program only.

    >>> several(1e-4, 28), several(1e-4, 1000), several(0.02, 1000), several(1.0, 1000)
    (28, 25, 5, 1)
    """
    most = max(1, min(_MOST_STEPS, spacing, int(_MOST_SECONDS / seconds)))
    divisor = next(n for n in range(most, 0, -1) if spacing % n == 0)
    return divisor if 2 * divisor > most else most

"""`steps_per_call="auto"`: how many steps to take in one dispatch."""

import functools

_MOST_STEPS = 32
# As many operations as a slow device of the kind does in a tenth of a second.
_MOST_WORK_ON_CPU, _MOST_WORK = 2e9, 2e11
_PAYS_FROM = 50_000
"""Steps in a run from which on the time of a second compilation is won back."""


@functools.lru_cache
def steps_per_call(work: float, spacing: int, n_total: float, platform: str) -> int:
    """How many steps to take in one dispatch.

    A dispatch costs some tens of microseconds, however little there is to compute. It lasts a tenth
    of a second at most, so that a signal or a watcher need not wait. The number divides the spacing
    of checkpoints, as the steps of a remainder need a program of their own; only in long runs it
    need not. It depends on no clock, so that a run takes the same programs each time.

    >>> steps_per_call(1e6, 45, 1000, "cpu"), steps_per_call(1e6, 47, 1000, "cpu")
    (15, 1)
    >>> steps_per_call(1e6, 47, 100_000, "cpu"), steps_per_call(1e9, 45, 1000, "cpu")
    (32, 1)

    Args:
      work: the operations of a step on each device.
      spacing: the steps between checkpoints.
      n_total: the steps of the run.
      platform: of the devices, as JAX names it.
    """
    most_work = _MOST_WORK_ON_CPU if platform == "cpu" else _MOST_WORK
    most = max(1, int(min(_MOST_STEPS, spacing, most_work / max(work, 1))))
    divisor = next(n for n in range(most, 0, -1) if spacing % n == 0)
    return most if n_total >= _PAYS_FROM and 2 * divisor <= most else divisor

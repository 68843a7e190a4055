"""Times contenders in turns, and computes their ratios within a round."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int, n_steps: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns microseconds per step in each round, and the last loss of each contender.

    The order within a round is by chance, as the first one may come off worse or better. The
    first round, which compiles, does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses = {}
    draw = random.Random(0)
    for i in range(rounds + 1):
        for name, run in draw.sample([*contenders.items()], len(contenders)):
            start = time.perf_counter()
            losses[name] = run()
            if i:
                times[name].append((time.perf_counter() - start) / n_steps * 1e6)
    return times, losses


def ratio(values: list[float], base: list[float]) -> float:
    """Returns the median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def around_median(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of the values: the bounds of the median with at least 95 % confidence.

    By the order statistics of independent values, each of which is as likely to be below the median
    as above: of several processes it tells how these came out, and less of how others would. Fewer
    than six values do not tell it so surely.
    """
    ordered, n = sorted(values), len(values)
    # One in 40 at each end, in units of the 2**n ways that the values may fall.
    rank, ways = 0, 1 + n
    while 40 * ways <= 2**n:
        rank += 1
        ways += math.comb(n, rank + 1)
    return ordered[rank], ordered[n - 1 - rank]

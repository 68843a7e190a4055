"""Time per training step with and without the live bar, on the digits MLP.

    python -m benchmarks.display [--rounds 31]

It is one TrainLoop, so that both have the same memory; once in each round its bar is told of no
steps. It draws to a terminal that nobody sees, for so long that the bar is drawn between two
checkpoints. The order within a round is by chance; the figure to quote is the median of the ratios
of the rounds, with where it lies with 95 % certainty. Where that says less than the bar costs, go
by the last line: the share of a round's time that is spent in the bar, which the devices need not
even wait for, less what the same clock counts for a watcher that does nothing.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import optax

import flaxfit as ff
from benchmarks.contenders import unseen_terminal
from benchmarks.steps import task_parts
from benchmarks.turns import around_median, ratio, take_turns


def main() -> None:
    """Prints microseconds per step and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=16_800, help="in each round")
    arguments = parser.parse_args()

    with unseen_terminal():
        loop = loop_with_bar(arguments.steps)
        watchers = {"no display": [], "live bar": [*loop.dispatch_watchers]}
        contenders = {name: partial(round_of, loop, each) for name, each in watchers.items()}
        times, _ = take_turns(contenders, arguments.rounds, arguments.steps)
        pairs = [
            (share_of(loop, watchers["live bar"]), share_of(loop, [lambda step: None]))
            for _ in range(arguments.rounds // 2 + 1)
        ]
    base = times["no display"]
    for name, values in times.items():
        low, high = around_median([a / b for a, b in zip(values, base, strict=True)])
        print(
            f"{name:12} {statistics.median(values):8.1f} us/step   min {min(values):7.1f}"
            f"   x no display {ratio(values, base):.3f}, between {low:.3f} and {high:.3f}"
        )
    bar, nothing = (statistics.median(side) for side in zip(*pairs, strict=True))
    share = statistics.median(a - b for a, b in pairs)
    print(f"share of the time in the bar {share:.4f} ({bar:.4f} less {nothing:.4f})")


def loop_with_bar(n_steps: int):
    """Makes a TrainLoop on one device, with a display."""
    model, _, x, y = task_parts()
    stream = ff.ArrayStream(x[:1792], y[:1792], batch_size=64, shuffle=True)
    task = ff.TrainTask(model.apply, optax.adam(1e-4), "crossentropy", stream, ["accuracy"])
    return ff.TrainLoop(
        model.init,
        task,
        0,
        n_steps_per_checkpoint=n_steps,
        first_checkpoint=n_steps,
        devices=jax.devices()[:1],
        callbacks=[ff.callbacks.ProgressBar(live=True)],
        stdout=False,
    )


def round_of(loop, watchers) -> float:
    """Trains to the next checkpoint with these watchers; returns the loss."""
    loop.dispatch_watchers[:] = watchers
    return loop.next_checkpoint().loss


def share_of(loop, watchers) -> float:
    """Returns the fraction of a round that watchers take."""
    spent = 0.0

    def timed(watch):
        def watch_timed(step):
            nonlocal spent
            began = time.perf_counter()
            watch(step)
            spent += time.perf_counter() - began

        return watch_timed

    began = time.perf_counter()
    round_of(loop, [timed(watch) for watch in watchers])
    return spent / (time.perf_counter() - began)


if __name__ == "__main__":
    main()

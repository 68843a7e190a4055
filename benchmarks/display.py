"""Time per training step with the live bar beside none, on the digits MLP.

    python -m benchmarks.display [--rounds 15]

Both are the same TrainLoop over the same batches; one draws to a terminal that nobody sees, for
seconds on end, so that the bar is drawn many times between two checkpoints. The order within a
round is by chance; the figure to quote is the median of the ratios of the rounds. Beside it stands
the ratio of the fastest rounds, which a busy machine disturbs less. Where these scatter more than
the bar costs, go by the last line: the share of a round's time that is spent in the bar, which the
devices need not even wait for.
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
from benchmarks.turns import ratio, take_turns


def main() -> None:
    """Prints microseconds per step and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=16_800, help="in each round")
    arguments = parser.parse_args()

    with unseen_terminal():
        loops = {
            "no display": loop_with(False, arguments.steps),
            "live bar": loop_with(True, arguments.steps),
        }
        contenders = {name: partial(round_of, loop) for name, loop in loops.items()}
        times, losses = take_turns(contenders, arguments.rounds, arguments.steps)
        shares = [share_of_bar(loops["live bar"]) for _ in range(arguments.rounds)]
    if len(set(losses.values())) > 1:
        raise SystemExit(f"The losses disagree, so the times compare nothing: {losses}")
    base = times["no display"]
    for name, values in times.items():
        print(
            f"{name:12} {statistics.median(values):8.1f} us/step   min {min(values):7.1f}"
            f"   x no display {ratio(values, base):.3f}, fastest {min(values) / min(base):.3f}"
        )
    print(f"share of the time in the bar {statistics.median(shares):.4f}")


def loop_with(has_bar: bool, n_steps: int):
    """A TrainLoop on one device, with the bar or without."""
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
        callbacks=[ff.callbacks.ProgressBar(live=True)] if has_bar else [],
        stdout=False,
    )


def round_of(loop) -> float:
    """Trains up to the next checkpoint; its loss."""
    return loop.next_checkpoint().loss


def share_of_bar(loop) -> float:
    """The share of a round that passes in what the bar is told of each step, drawing included."""
    spent = 0.0

    def timed(watch):
        def watch_timed(step):
            nonlocal spent
            began = time.perf_counter()
            watch(step)
            spent += time.perf_counter() - began

        return watch_timed

    watchers, began = list(loop.watchers), time.perf_counter()
    loop.watchers[:] = map(timed, watchers)
    loop.next_checkpoint()
    loop.watchers[:] = watchers
    return spent / (time.perf_counter() - began)


if __name__ == "__main__":
    main()

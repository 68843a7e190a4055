"""Time per training step of adjustable optimizers and plain Optax, on the digits MLP.

    python -m benchmarks.optimizers [--rounds 15]

Every contender is a TrainLoop that trains the same model on the same batches with Adam; the last
one leaves the first layer, nine tenths of the parameters, as it is. The order within a round is by
chance; the figure to quote is the median of the ratios of the rounds.
"""

import argparse
import statistics

import jax
import optax

import flaxfit as ff
from benchmarks.steps import task_parts
from benchmarks.turns import ratio, take_turns


def main() -> None:
    """Prints microseconds per step and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=560)
    arguments = parser.parse_args()

    adam = ff.optim.OptimizerDef(optax.adam, learning_rate=1e-3)
    optimizers = {
        "optax.adam": optax.adam(1e-3),
        "OptimizerDef": adam,
        "MultiOptimizer, two groups": ff.optim.MultiOptimizer(
            ("layers_0/.*", adam), ("layers_2/.*", adam)
        ),
        "optax.partition, two groups": optax.partition(
            {"0": optax.adam(1e-3), "2": optax.adam(1e-3)}, {"layers_0": "0", "layers_2": "2"}
        ),
    }
    contenders = {
        name: loop_with(optimizer, arguments.steps) for name, optimizer in optimizers.items()
    }
    frozen = "optax.adam, a layer frozen"
    contenders[frozen] = loop_with(optax.adam(1e-3), arguments.steps, freeze="layers_0/.*")
    times, losses = take_turns(contenders, arguments.rounds, arguments.steps)
    losses.pop(frozen)  # It learns less.
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise SystemExit(f"The losses disagree, so the times compare nothing: {losses}")
    base = times["optax.adam"]
    for name, values in times.items():
        print(
            f"{name:28} {statistics.median(values):8.1f} us/step   min {min(values):7.1f}"
            f"   x optax {ratio(values, base):.3f}"
        )


def loop_with(optimizer, n_steps: int, **options):
    """A TrainLoop on one device, without a display."""
    model, _, x, y = task_parts()
    stream = ff.ArrayStream(x[:1792], y[:1792], batch_size=64, shuffle=True)
    task = ff.TrainTask(model.apply, optimizer, "crossentropy", stream, **options)
    loop = ff.TrainLoop(
        model.init,
        task,
        0,
        n_steps_per_checkpoint=n_steps,
        first_checkpoint=n_steps,
        devices=jax.devices()[:1],
        grad_norm=False,
        stdout=False,
    )
    return lambda: loop.next_checkpoint().loss


if __name__ == "__main__":
    main()

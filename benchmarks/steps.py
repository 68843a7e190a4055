"""Time per training step: TrainLoop, `fit` and hand-written loops on the shuffled digits.

    python -m benchmarks.steps [--rounds 60] [--epochs 10] [--width 128] [--batch-size 64]

All train the same MLP on the same batches with the same optimizer, and count accuracy inside the
step. Data is host-fed (NumPy gathers the batches) or resident (the step gathers them). A call takes
one step, or 32 under `lax.scan`: an epoch of 28. They take turns; the figure to quote is the median
over the rounds of the ratio to the faster hand-written loop with as many steps a call. Few hidden
units and small batches leave nothing but what the host does for each step.
"""

import argparse
import collections
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import flaxfit as ff
from benchmarks.measure import check_losses
from benchmarks.turns import ratio, take_turns
from flaxfit.tree._types import PyTree

_EPOCH = 28
"""Steps in an epoch."""
_FORMS = {"": "auto", ", resident": True, ", host-fed": False}


def main() -> None:
    """Prints microseconds per step and the ratios."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=10, help="in a round, of 28 steps each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps-a-call", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    model, optimizer, x, y = task_parts(arguments.width)
    batch_size, n = arguments.batch_size, _EPOCH * arguments.batch_size
    problem = Problem(model, optimizer, x[:n], y[:n], batch_size)
    for steps_a_call in arguments.steps_a_call:
        for is_by_epoch in False, True:
            rivals, ours = contenders(problem, arguments.epochs, steps_a_call, is_by_epoch)
            # The first spans start from the same parameters; later losses are next to nothing.
            check_losses({name: run() for name, run in {**rivals, **ours}.items()}, 1e-4)
            n_steps = arguments.epochs * _EPOCH
            times, _ = take_turns({**rivals, **ours}, arguments.rounds, n_steps)
            best = min(rivals, key=lambda name: statistics.median(times[name]))
            read = "each epoch" if is_by_epoch else f"after {arguments.epochs} epochs"
            print(f"{steps_a_call} a call, metrics read {read}; x {best}")
            for name, values in times.items():
                print(
                    f"  {name:24} {statistics.median(values):8.1f} us/step"
                    f"   least {min(values):7.1f}   x {ratio(values, times[best]):.3f}"
                )


def contenders(
    problem: "Problem", epochs: int, steps_a_call: int, is_by_epoch: bool
) -> tuple[dict[str, Callable[[], float]], dict[str, Callable[[], float]]]:
    """Returns the contenders: functions that train for some epochs and return the loss.

    Either metrics are read after each epoch, as `fit` does, or once at the end.
    """
    n_spans, n_epochs = (epochs, 1) if is_by_epoch else (1, epochs)
    options = problem, n_epochs, steps_a_call

    def spans(run: Callable[[], float]) -> Callable[[], float]:
        return lambda: statistics.fmean(run() for _ in range(n_spans))

    rivals = {
        f"hand-written{name}": spans(hand_written(*options, on))
        for name, on in _FORMS.items()
        if name
    }
    ours = {f"TrainLoop{name}": spans(train_loop(*options, on)) for name, on in _FORMS.items()}
    return rivals, {**ours, "fit": fit(problem, epochs, steps_a_call)} if is_by_epoch else ours


class Problem(NamedTuple):
    """The network of all contenders."""

    model: nn.Module
    optimizer: optax.GradientTransformation
    x: np.ndarray
    y: np.ndarray
    batch_size: int

    def params(self) -> PyTree:
        """Returns the initial parameters."""
        return self.model.init(jax.random.key(0), self.x[:1])["params"]


def task_parts(
    width: int = 128,
) -> tuple[nn.Module, optax.GradientTransformation, np.ndarray, np.ndarray]:
    """Model, optimizer and data of all contenders."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(10)])
    return model, optax.adam(1e-3), x, y


def hand_written(
    problem: Problem, epochs: int, steps_a_call: int, is_resident: bool
) -> Callable[[], float]:
    """A donating `jit` step that also sums the metrics."""
    model, optimizer, x, y, batch_size = problem

    def update(carry: PyTree, x: jax.Array, y: jax.Array) -> PyTree:
        params, opt_state, sums = carry

        def loss_fn(params: PyTree) -> tuple[jax.Array, jax.Array]:
            logits = model.apply({"params": params}, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        sums = {
            "loss": sums["loss"] + loss * len(x),
            "correct": sums["correct"] + (logits.argmax(-1) == y).sum(),
            "n": sums["n"] + len(x),
        }
        return optax.apply_updates(params, updates), opt_state, sums

    def on_batch(carry: PyTree, *batch: jax.Array) -> PyTree:
        if steps_a_call == 1:
            return update(carry, *batch)
        return jax.lax.scan(lambda c, each: (update(c, *each), None), carry, batch)[0]

    def on_rows(carry: PyTree, x: jax.Array, y: jax.Array, rows: jax.Array) -> PyTree:
        def gathering(carry: PyTree, rows: jax.Array) -> PyTree:
            taken = [each.at[rows].get(mode="promise_in_bounds") for each in (x, y)]
            return update(carry, *taken)

        if steps_a_call == 1:
            return gathering(carry, rows)
        return jax.lax.scan(lambda c, each: (gathering(c, each), None), carry, rows)[0]

    step = jax.jit(on_rows if is_resident else on_batch, donate_argnums=0)
    placed = jax.device_put((x, y)) if is_resident else ()
    params = problem.params()
    carry = params, optimizer.init(params), None
    n_epochs = 0

    def run() -> float:
        nonlocal carry, n_epochs
        carry = *carry[:2], {name: jnp.zeros(()) for name in ("loss", "correct", "n")}
        for _ in range(epochs):
            order = np.random.default_rng((0, n_epochs)).permutation(len(x)).astype(np.int32)
            n_epochs += 1
            batches = order.reshape(-1, batch_size)
            for i in range(0, len(batches), steps_a_call):
                rows = batches[i] if steps_a_call == 1 else batches[i : i + steps_a_call]
                given = (*placed, rows) if is_resident else (x[rows], y[rows])
                carry = step(carry, *given)
        return float(carry[2]["loss"]) / float(carry[2]["n"])

    return run


def train_loop(
    problem: Problem, epochs: int, steps_a_call: int, resident: bool | str
) -> Callable[[], float]:
    """TrainLoop with a metric, a callback and no display."""
    model, optimizer, x, y, batch_size = problem
    seen = collections.deque(maxlen=1)
    stream = ff.ArrayStream(x, y, batch_size=batch_size, shuffle=True, resident=resident)
    task = ff.TrainTask(model.apply, optimizer, "crossentropy", stream, ["accuracy"])
    loop = ff.TrainLoop(
        ff.TrainState.create(optimizer, {"params": problem.params()}),
        task,
        0,
        n_steps_per_checkpoint=epochs * _EPOCH,
        first_checkpoint=epochs * _EPOCH,
        steps_per_call=steps_a_call,
        devices=jax.devices()[:1],
        callbacks=[seen.append],
        stdout=False,
    )
    return lambda: loop.next_checkpoint().loss


def fit(problem: Problem, epochs: int, steps_a_call: int) -> Callable[[], float]:
    """`Model.fit` with a metric and no display; its history has an entry per epoch."""
    network, optimizer, x, y, batch_size = problem
    start = (lambda rngs, x: {"params": problem.params()}, network.apply)
    model = ff.Model(start, optimizer, "crossentropy", metrics=["accuracy"])
    options = {"batch_size": batch_size, "epochs": epochs, "steps_per_execution": steps_a_call}

    def run() -> float:
        history = model.fit(x, y, **options, verbose=0)
        return statistics.fmean(history["loss"][-epochs:])

    return run


if __name__ == "__main__":
    main()

"""flaxfit: TrainLoop and Model.fit, both with their progress bars."""

from typing import Any

import jax
import numpy as np
import optax

import flaxfit as ff
from benchmarks.contenders import Contender
from benchmarks.linen_models import build
from benchmarks.workloads import Workload


def train_loop_of_nnx(workload: Workload, params: Any = None, **options: Any) -> Contender:
    """The same with an NNX module whose parameters have Linen's names."""
    from flax import nnx  # Not by the others, whose start is measured, too.

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            (width,) = workload.sizes
            self.Dense_0 = nnx.Linear(workload.x.shape[1], width, rngs=rngs)
            self.Dense_1 = nnx.Linear(width, workload.n_classes, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.Dense_1(nnx.relu(self.Dense_0(x)))

    return train_loop(workload, params, model=ff.modules.from_nnx(MLP), **options)


def train_loop(
    workload: Workload,
    params: Any = None,
    *,
    model: Any = None,
    resident: bool | str = "auto",
    steps_per_call: Any = 1,
    n_devices: int = 1,
    snapshot: str = "device",
    rest: bool = False,
) -> Contender:
    """A TrainLoop with a metric, a bar and a callback, and a checkpoint each epoch.

    With a `rest` the data ends in a batch of half the size, which epochs here do not reach.
    """
    model, optimizer = model or build(workload), optax.adam(workload.learning_rate)
    x, y, batch_size = workload.x, workload.y, workload.batch_size
    if rest:
        x, y = (np.concatenate([each, each[: batch_size // 2]]) for each in (x, y))
    stream = ff.ArrayStream(x, y, batch_size=batch_size, resident=resident)
    task = ff.TrainTask(model.apply, optimizer, "crossentropy", stream, ["accuracy"])
    seen = []
    loop = ff.TrainLoop(
        model.init if params is None else ff.TrainState.create(optimizer, {"params": params}),
        task,
        0,
        n_steps_per_checkpoint=workload.n_steps,
        first_checkpoint=workload.n_steps,
        devices=jax.devices()[:n_devices],
        steps_per_call=steps_per_call,
        callbacks=[lambda checkpoint: seen.append(checkpoint.step), ff.callbacks.ProgressBar()],
        grad_norm=False,
        snapshot=snapshot,
    )
    evaluator = ff.EvalLoop(
        ff.EvalTask(model.apply, task.metrics, stream.one_epoch(), loss=task.loss),
        strategy=loop.strategy,
    )

    def train(epochs: int) -> float:
        for checkpoint in loop.run(epochs * workload.n_steps):
            loss = checkpoint.loss
        return loss

    def evaluate() -> tuple[float, float]:
        metrics = evaluator.measure(loop.state)
        return metrics["loss"], metrics["accuracy"]

    return Contender(lambda: _count(loop.state.params), train, evaluate)


def fit(
    workload: Workload, params: Any = None, *, steps_per_execution: Any = 1, n_devices: int = 1
) -> Contender:
    """`Model.fit`, `evaluate` and `predict`."""
    network: Any = build(workload)
    if params is not None:
        network = (lambda rngs, x: {"params": params}, network.apply)
    model = ff.Model(
        network,
        optax.adam(workload.learning_rate),
        "crossentropy",
        metrics=["accuracy"],
        strategy=ff.strategies.DataParallel(jax.devices()[:n_devices]),
    )
    x, y, batch_size = workload.x, workload.y, workload.batch_size

    def train(epochs: int) -> float:
        history = model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=False,
            steps_per_execution=steps_per_execution,
            verbose=1,
        )
        return history["loss"][-1]

    def evaluate() -> tuple[float, float]:
        metrics = model.evaluate(x, y, batch_size=batch_size)
        return metrics["loss"], metrics["accuracy"]

    return Contender(
        lambda: _count(model.state.params),
        train,
        evaluate,
        lambda: model.predict(x, batch_size=batch_size),
    )


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))

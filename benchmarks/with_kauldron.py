"""Kauldron: the steps of its trainer in a hand-written loop, as in its notebooks.

To install it beside the other rivals, pip looks for versions without an end; what went was
`pip install --no-deps kauldron`, and then likewise each package that it missed.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd, kontext
from tqdm import tqdm

from benchmarks.contenders import Contender
from benchmarks.linen_models import build
from benchmarks.workloads import Workload


class Network(nn.Module):
    """The network, with the keys of its inputs in a batch."""

    network: nn.Module
    x: kontext.Key = "batch.x"

    def __call__(self, x):
        return self.network(x)


def make(workload: Workload, params: Any = None) -> Contender:
    """Data in memory, a bar, and the mean loss and accuracy of each epoch.

    Its own loop reports single steps, and so does less; each call of it compiles anew.
    """
    labels = workload.y[..., None]  # As its losses want them.
    trainer = kd.train.Trainer(
        train_ds=kd.data.InMemoryPipeline(
            loader=lambda: {"x": workload.x, "y": labels},
            batch_size=workload.batch_size,
            num_epochs=1,
            seed=0,
        ),
        model=Network(build(workload)),
        train_losses={
            "loss": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.y")
        },
        train_metrics={"accuracy": kd.metrics.Accuracy(logits="preds", labels="batch.y")},
        optimizer=optax.adam(workload.learning_rate),
    )
    state = trainer.init_state()
    if params is not None:
        placed = jax.device_put({"network": params}, trainer.sharding.params)
        state = state.replace(params=placed)
    states = [state]

    def train(epochs: int) -> float:
        with tqdm(total=epochs * workload.n_steps, leave=False) as bar:
            for epoch in range(epochs):
                found = []
                for batch in trainer.train_ds:
                    batch = kd.sharding.device_put(batch, trainer.sharding.batch)
                    states[0], aux = trainer.trainstep.step(
                        states[0], batch, return_losses=True, return_metrics=True
                    )
                    loss, hits = aux.loss_states["loss"], aux.metric_states["accuracy"]
                    found.append(((loss.value, loss.count), (hits.total, hits.count)))
                    bar.update()
                # On the host: each `compute` of theirs would compile a program.
                loss, accuracy = (
                    float(total / n) for total, n in np.sum(jax.device_get(found), axis=0)
                )
                bar.write(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        return loss

    def count() -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(states[0].params))

    return Contender(count, train)

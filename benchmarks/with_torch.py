"""PyTorch: a plain loop over tensors in memory, and Lightning over the same batches."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.contenders import Contender
from benchmarks.torch_models import build
from benchmarks.workloads import Workload


def plain(workload: Workload, params: Any = None) -> Contender:
    """The loop of PyTorch's tutorials, without a loader, its metrics read once an epoch."""
    from tqdm import tqdm

    model = build(workload, params)
    optimizer = torch.optim.Adam(model.parameters(), workload.learning_rate, fused=True)
    batches = _batches(workload)

    def train(epochs: int) -> float:
        model.train()
        for _ in range(epochs):
            loss_sum, n_correct = torch.zeros(()), torch.zeros(())
            for x, y in tqdm(batches):
                optimizer.zero_grad()
                logits = model(x)
                loss = _loss(logits, y)
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                n_correct += (logits.argmax(-1) == y).sum()
        return float(loss_sum) / len(batches)

    return _contender(model, train, batches)


def lightning(workload: Workload, params: Any = None) -> Contender:
    """Lightning's Trainer without a logger and without saving; the bar, the metrics by epoch."""
    import logging
    import warnings

    import lightning as L

    # It advises to use more workers, which are slower for batches that are ready.
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = build(workload, params)
    batches = _batches(workload)
    # A bare list would count as several loaders.
    loader = torch.utils.data.DataLoader(batches, batch_size=None)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            x, y = batch
            logits = self.model(x)
            loss = _loss(logits, y)
            accuracy = (logits.argmax(-1) == y).float().mean()
            values = {"loss": loss, "accuracy": accuracy}
            self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(x))
            return loss

        def configure_optimizers(self):
            return optimizer

    module = Module()
    optimizer = torch.optim.Adam(model.parameters(), workload.learning_rate, fused=True)

    def train(epochs: int) -> float:
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return float(trainer.callback_metrics["loss"])

    # Measuring and predicting are those of the plain loop.
    return _contender(model, train, batches)._replace(evaluate=None, predict=None)


def _contender(model: nn.Module, train: Any, batches: list[Any]) -> Contender:
    @torch.inference_mode()
    def evaluate() -> tuple[float, float]:
        model.eval()
        loss_sum, n_correct, n = torch.zeros(()), torch.zeros(()), 0
        for x, y in batches:
            logits = model(x)
            loss_sum += _loss(logits, y)
            n_correct += (logits.argmax(-1) == y).sum()
            n += y.numel()
        return float(loss_sum) / len(batches), float(n_correct) / n

    @torch.inference_mode()
    def predict() -> np.ndarray:
        model.eval()
        return torch.cat([model(x) for x, _ in batches]).numpy()

    def count() -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    return Contender(count, train, evaluate, predict)


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def _batches(workload: Workload) -> list[Any]:
    x, y = torch.from_numpy(workload.x), torch.from_numpy(workload.y).long()
    return list(zip(x.split(workload.batch_size), y.split(workload.batch_size), strict=True))

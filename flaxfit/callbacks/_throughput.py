"""Throughput: the speed of training, and its utilization of the devices."""

import math
import re
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np

from flaxfit.callbacks._callback import attached
from flaxfit.loop import TrainLoop
from flaxfit.state import Checkpoint
from flaxfit.tree import Device, PyTree

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A800": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H800": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300": 2250e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "Tesla V100-PCIE": 112e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
    "AMD Instinct MI300X": 1307e12,
}
"""Vendors' dense 16-bit peaks, by prefix of the device kind."""


class Throughput:
    """Adds the speed of its steps to each checkpoint.

    `examples_per_second`; `tokens_per_second` if examples are sequences; `flops_per_second`, the
    operations of the step (`TrainLoop.step_flops`) on all devices; and `mfu`, the model FLOPs
    utilization: the fraction of the devices' peak, if known. A step that recomputes parts of the
    forward pass (`jax.checkpoint`) has `hfu` instead, the hardware FLOPs utilization, which counts
    that as well: give `flops_per_example` for its `mfu`. The time includes neither compilation,
    callbacks nor your own code. Nothing is done per step; operations are counted once, on the host.

    >>> throughput = Throughput(peak_flops=989e12)

    Args:
      tokens_per_example: the tokens of an example. None: the length of the first input if that is
        integers `(batch, length)`, else tokens are not reported.
      flops_per_example: operations for an example, forward and backward; None: as XLA counts
        them. Give them for models with kernels or `while` loops that XLA cannot count.
      peak_flops: the peak operations per second of one device; None: the maker's figure for 16-bit
        numbers, if the kind of device is known; else there is neither `mfu` nor `hfu`. For a model
        that computes in float32, give the float32 peak.
    """

    borrows = True
    adds: ClassVar[dict[str, str | None]] = dict.fromkeys(
        ("examples_per_second", "tokens_per_second", "flops_per_second", "mfu", "hfu"), "max"
    )
    """The metrics that it adds to a checkpoint."""

    def __init__(
        self,
        *,
        tokens_per_example: float | None = None,
        flops_per_example: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._tokens = tokens_per_example
        self._given_flops = flops_per_example
        self._peak = peak_flops
        self._loop: TrainLoop | None = None
        self._flops: float | None = None
        """The operations per example."""
        self._utilisation = "mfu"

    def attach(self, loop: TrainLoop) -> None:
        """Resets it for a loop."""
        self._loop = loop
        self._flops, self._utilisation = self._given_flops, "mfu"

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Adds the speed of the steps to the metrics."""
        loop = attached(self._loop, "Throughput", "measures")
        if not checkpoint.n_examples or checkpoint.elapsed_time <= 0:
            return checkpoint
        speed = checkpoint.n_examples / checkpoint.elapsed_time
        found = {"examples_per_second": speed}
        tokens = self._tokens or _length(loop.input_shapes)
        if tokens:
            found["tokens_per_second"] = tokens * speed
        if self._flops is None:
            self._flops, self._utilisation = _flops_per_example(loop)
        if math.isfinite(self._flops):
            found["flops_per_second"] = self._flops * speed
            devices = loop.strategy.devices
            peak = self._peak or _peak_flops(devices[0].device_kind)
            if peak:
                used = found["flops_per_second"] / (peak * _n_devices(devices))
                found[self._utilisation] = used
        return checkpoint.with_metrics(found)


def _n_devices(devices: Sequence[Device]) -> int:
    """Counts the devices of all processes: a strategy lists all devices, or the local ones."""
    is_local = {device.process_index for device in devices} == {jax.process_index()}
    return len(devices) * (jax.process_count() if is_local else 1)


def _length(inputs: PyTree) -> int | None:
    """Returns the sequence length if the first input is integer tokens `(batch, length)`."""
    first = next(iter(jax.tree.leaves(inputs)), None)
    is_tokens = first is not None and first.ndim == 2 and np.issubdtype(first.dtype, np.integer)
    return first.shape[1] if first is not None and is_tokens else None


def _peak_flops(kind: str) -> float | None:
    """Returns the peak by the longest matching prefix; None for a MIG slice of a GPU."""
    if " MIG " in kind:
        return None
    names = [name for name in PEAK_FLOPS if re.match(rf"{re.escape(name)}(?![0-9A-Za-z])", kind)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def _flops_per_example(loop: TrainLoop) -> tuple[float, str]:
    """Returns the operations of a step per example, and "mfu", or "hfu" if some are repeated."""
    sizes = {x.shape[0] if x.shape else 0 for x in jax.tree.leaves(loop.input_shapes)}
    if len(sizes) > 1 or not all(sizes):
        return math.nan, "mfu"  # Graphs have no per-example cost.
    (n,) = sizes
    cost = loop.step_cost(n)
    return cost.flops / n, "hfu" if cost.recomputes else "mfu"

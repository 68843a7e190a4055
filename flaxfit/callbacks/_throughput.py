"""Throughput: how fast training goes, and how much of the devices it uses."""

import math
import re
from typing import Any, ClassVar

import jax
import numpy as np

from flaxfit.callbacks._callback import Loop
from flaxfit.state._checkpoint import Checkpoint
from flaxfit.tree._types import PyTree

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
"""Makers' figures for dense products of 16-bit numbers, by the first words of a device's kind."""


class Throughput:
    """Adds to each checkpoint how fast its steps were.

    `examples_per_second`; `tokens_per_second` where examples are sequences; `flops_per_second`,
    the operations that the step asks for (`TrainLoop.step_flops`), of all devices; and `mfu`,
    the model FLOPs utilisation: what part that is of the most that the devices could do, where
    that is known. A step that computes parts of the forward pass again (`jax.checkpoint`) has
    `hfu` instead, the hardware FLOPs utilisation, which counts that as well: give
    `flops_per_example` for its `mfu`. Compilation, callbacks and your own code are not in the time.
    Nothing is done per step; operations are counted once, on the host.

    >>> throughput = Throughput(peak_flops=989e12)

    Args:
      tokens_per_example: None: the length of the first input where that is integers
        `(batch, length)`, else tokens are not reported.
      flops_per_example: operations for an example, forward and backward; None: as XLA counts
        them. Give them for models with kernels or `while` loops that XLA cannot count.
      peak_flops: the most operations per second of one device; None: the maker's figure for
        16-bit numbers, where the kind of device is known; else there is neither `mfu` nor `hfu`.
        Give that of float32 for a model that computes in float32.
    """

    borrows = True
    """It only reads what a checkpoint holds."""

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
        self._loop: Any = None
        self._flops: float | None = None
        self._utilisation = "mfu"

    adds: ClassVar[dict[str, str | None]] = dict.fromkeys(
        ("examples_per_second", "tokens_per_second", "flops_per_second", "mfu", "hfu"), "max"
    )
    """The metrics that it adds to a checkpoint."""

    def attach(self, loop: Loop) -> None:
        """Learns which loop it measures."""
        self._loop = loop
        self._flops, self._utilisation = self._given_flops, "mfu"

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with its speed."""
        if self._loop is None:
            raise ValueError("Throughput must be in the callbacks of a loop, which it measures.")
        if not checkpoint.n_examples or checkpoint.elapsed_time <= 0:
            return checkpoint
        speed = checkpoint.n_examples / checkpoint.elapsed_time
        found = {"examples_per_second": speed}
        tokens = self._tokens or _length(self._loop.input_shapes)
        if tokens:
            found["tokens_per_second"] = tokens * speed
        if self._flops is None:
            self._flops, self._utilisation = _measured(self._loop)
        if math.isfinite(self._flops):
            found["flops_per_second"] = self._flops * speed
            devices = self._loop.strategy.devices
            peak = self._peak or _peak_flops(devices[0].device_kind)
            if peak:
                used = found["flops_per_second"] / (peak * _n_devices(devices))
                found[self._utilisation] = used
        return checkpoint.with_metrics(found)


def _measured(loop: Any) -> tuple[float, str]:
    """The operations for each example, and the name of the share of the peak that they make."""
    (n, *_), *_ = (x.shape for x in jax.tree.leaves(loop.input_shapes))
    cost = loop.step_cost(n)
    return cost.flops / n, "hfu" if cost.recomputes else "mfu"


def _n_devices(devices: Any) -> int:
    """How many take part: a strategy names those of all processes, or its own local ones."""
    is_local = {device.process_index for device in devices} == {jax.process_index()}
    return len(devices) * (jax.process_count() if is_local else 1)


def _length(inputs: PyTree) -> int | None:
    """The length of the sequences that a model is fed, if it is."""
    first = next(iter(jax.tree.leaves(inputs)), None)
    is_tokens = first is not None and first.ndim == 2 and np.issubdtype(first.dtype, np.integer)
    return first.shape[1] if first is not None and is_tokens else None


def _peak_flops(kind: str) -> float | None:
    """The figure of the longest name whose words the kind begins with; None for part of a GPU."""
    if " MIG " in kind:
        return None
    names = [name for name in PEAK_FLOPS if re.match(rf"{re.escape(name)}(?![0-9A-Za-z])", kind)]
    return PEAK_FLOPS[max(names, key=len)] if names else None

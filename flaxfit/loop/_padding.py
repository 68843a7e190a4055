"""Padder: pads batches to the few shapes that a step is compiled for."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch, describe, has_rows, n_examples, normalize
from flaxfit.data._sample_weights import OTHER_OUTPUTS
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask, TrainTask
from flaxfit.tree import Array, ArrayLike, PyTree


class PreparedBatch(NamedTuple):
    """A batch padded to a size that its strategy can split, with the key of its program."""

    strategy: Strategy
    """The devices to split it over: all of them, or fewer for a remainder."""
    batch: Batch
    is_weighted: bool
    """Whether the weights are the user's, which may all be zero."""
    n_examples: int
    """The number of examples without padding."""
    signature: Hashable
    """See `signature_of`: batches of one signature share a program."""
    data: tuple[PyTree, ...] = ()
    """Resident data from which the step gathers the batch by index; empty: the batch is whole."""


@dataclasses.dataclass
class Padder:
    """Pads batches, or finds a number of devices that divides them.

    With `pad`, every batch is padded to a multiple of the devices, and a smaller one to the regular
    size, so that one program serves all. Otherwise a smaller batch (the remainder of an epoch) runs
    at its own size on a number of devices that divides it, and a regular batch must divide evenly.
    """

    strategy: Strategy
    _: dataclasses.KW_ONLY
    pad: bool
    why_not: str = ""
    """Why batches cannot be padded, for errors."""
    size: int = 0
    """The regular size; 0: that of the first batch."""
    parts: int = 1
    """The number of parts into which the rows of a device must divide."""
    is_process_local: bool = False
    """Whether a batch holds only the rows of this process, for its local devices."""
    is_even: bool = False
    """Whether all batches have the regular size: a program without weights then saves work."""
    is_mixed: bool = False
    """Whether batches may have different structures, each with a program of its own."""
    is_whole: bool = False
    """Whether a batch may be any pytree; see `may_be_whole`."""
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        n = self.strategy.n_devices
        self._n_devices = len(range(n)[self.strategy.rows(n)]) if self.is_process_local else n
        self._divisor = self._n_devices * self.parts
        is_virtual = self.strategy.virtual_replicas is not None
        self._unit = "virtual replicas" if is_virtual else "devices"
        self._division = f"{self._n_devices} {self._unit}"
        if self.parts > 1:
            self._division += f" in {self.parts} parts each"
        self._structure: PyTree = None
        self._first = ""
        self._has_announced = self._has_differed = False

    def __call__(self, item: PyTree) -> PreparedBatch:
        """Returns a batch in normal form, of a size that can be split."""
        given = batch = normalize(item, is_whole=self.is_whole)
        n = n_examples(batch)
        self.size = self.size or n
        strategy, divisor = self.strategy, self._divisor
        has_weights = batch.weights is not None
        needs_weights = has_weights or not self.is_even or n != self.size or n % divisor
        # Once arrays differed in length (nodes and edges of a graph), equal lengths are a
        # coincidence, not an axis of examples.
        self._has_differed = self._has_differed or self.is_whole and not has_rows(batch)
        if self._has_differed:
            # The rows are not split: each device computes the whole batch.
            strategy = strategy if strategy.n_devices == 1 else strategy.narrow(1)
        elif self.pad and needs_weights:
            batch = batch._replace(weights=_weights(n, batch.weights))
            size = -(-max(n, self.size) // divisor) * divisor
            if n % divisor:
                self._announce(n, size)
            if size != n:
                batch = pad_batch(batch, size)
        elif (n >= self.size or self.is_process_local) and n % divisor:
            raise ValueError(self._cannot_split(n))
        elif n % self._n_devices:
            strategy = self.strategy.narrow(n)
        self._check_structure(batch, given)
        signature = signature_of(strategy, batch, has_weights)
        return PreparedBatch(strategy, batch, has_weights, n, signature)

    def _check_structure(self, batch: Batch, given: Batch) -> None:
        structure = jax.tree.structure(batch)
        if self._structure is None:
            self._structure, self._first = structure, describe(given)
        elif structure != self._structure and not self.is_mixed:
            raise ValueError(
                "A batch has another structure than the first one. The shapes are:\n  first "
                f"{self._first}\n  now   "
                f"{describe(given)}\nAll batches must have the same structure."
            )

    def _cannot_split(self, n: int) -> str:
        divisor = self._divisor
        sizes = [size for size in (n - n % divisor, n + divisor - n % divisor) if size]
        fewer = f"fewer {self._unit}"
        fewer = f"or {fewer}" if self.parts == 1 else f"{fewer}, or accumulate less"
        return (
            f"Cannot split a batch of {n} examples over {self._division} "
            f"({n} % {divisor} = {n % divisor}), nor pad it: {self.why_not}. Use a batch size of "
            f"{' or '.join(map(str, sizes))}, {fewer}."
        )

    def _announce(self, n: int, size: int) -> None:
        if not self._has_announced:
            self.say(
                f"a batch of {n} examples does not divide over {self._division}: padded to {size} "
                "with rows of weight 0 (loss, gradients and metrics stay exact)"
            )
        self._has_announced = True


def may_be_whole(task: TrainTask | EvalTask, strategy: Strategy) -> bool:
    """Returns whether neither task nor strategy pads a batch or divides its rows."""
    is_undivided = strategy.axis_name is None and strategy.virtual_replicas is None
    return task.keeps_whole and is_undivided and strategy.n_processes == 1


def _weights(n: int, weights: PyTree) -> PyTree:
    if weights is None:
        return np.ones(n, np.float32)
    if isinstance(weights, Mapping):
        return {OTHER_OUTPUTS: np.ones(n, np.float32), **weights}
    return np.asarray(weights, np.float32)


def signature_of(strategy: Strategy, batch: Batch, is_weighted: bool) -> Hashable:
    """Returns the key of a batch's program: devices, user weights, structure, shapes, dtypes."""
    leaves, structure = jax.tree.flatten(batch)
    shapes = ((leaf.shape, leaf.dtype) for leaf in leaves)
    return (strategy.n_devices, is_weighted, structure, *shapes)


def pad_batch(batch: Batch, size: int) -> Batch:
    """Pads a batch to `size` rows with copies of the first row, at weight 0.

    A row of zeros could give NaN gradients even at weight 0, because 0 * NaN is NaN.
    """
    n = n_examples(batch)
    rows = np.concatenate([np.arange(n), np.zeros(size - n, np.int32)])

    def take(x: ArrayLike) -> Array:
        return jnp.take(x, rows, axis=0) if isinstance(x, jax.Array) else x[rows]

    def zeros_after(weights: ArrayLike) -> np.ndarray:
        padded = np.zeros((size, *np.shape(weights)[1:]), np.float32)
        padded[:n] = weights
        return padded

    weights = jax.tree.map(zeros_after, batch.weights)
    return Batch(jax.tree.map(take, batch.inputs), jax.tree.map(take, batch.targets), weights)

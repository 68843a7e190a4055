"""Eager: runs functions operation by operation on one device, to inspect values."""

from collections.abc import Sequence

import jax

from flaxfit.strategies._copy import unaliased
from flaxfit.strategies._data_parallel import DataParallel
from flaxfit.strategies._strategy import Strategy
from flaxfit.tree import Device, Function, PyTree


class Eager:
    """Runs functions operation by operation that other strategies of one device compile.

    In the model, the loss and the metrics arrays have values: prints and breakpoints show them,
    and `jax_debug_nans` raises its error at the operation. It is many times slower.
    `Model(..., run_eagerly=True)` and `TrainLoop(..., debug=True)` use it.

    >>> Eager()
    Eager(DataParallel(1 cpu device))

    Args:
      strategy: a strategy of one device, whose axis models may name; None: the first local device.

    Raises:
      ValueError: the strategy has several devices or virtual replicas, or there are several
        processes.
    """

    axis_name: str | None = None
    n_devices = n_processes = 1
    virtual_replicas: int | None = None
    shardings: None = None
    runs_eagerly = True
    text: str = ""

    def __init__(self, strategy: Strategy | None = None):
        strategy = DataParallel(jax.local_devices()[:1]) if strategy is None else strategy
        _check_alone(strategy)
        self.devices: Sequence[Device] = strategy.devices
        self._strategy = strategy

    def __repr__(self) -> str:
        return f"Eager({self._strategy!r})"

    def place(self, tree: PyTree) -> PyTree:
        """Puts a copy of a tree onto the device."""
        return self._strategy.place(tree)

    def share(self, tree: PyTree) -> PyTree:
        """Like `place`, but does not copy arrays that are already on the device."""
        return self._strategy.share(tree)

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a placed tree."""
        return self._strategy.collect(tree)

    def rows(self, n_examples: int) -> slice:
        """Returns all rows of a batch."""
        return slice(0, n_examples)

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Puts the batch onto the device."""
        return jax.device_put(jax.tree.map(unaliased, batch), self.devices[0])

    def join(self, outputs: PyTree) -> PyTree:
        """Returns the outputs as NumPy arrays."""
        return jax.device_get(outputs)

    def narrow(self, n_examples: int) -> "Eager":
        """Returns itself: one device can take any number of examples."""
        return self

    def bind(self, function: Function) -> Function:
        """Makes the function run operation by operation."""
        bound, device = self._strategy.bind(function), self.devices[0]

        def run(*arguments: PyTree) -> PyTree:
            with jax.disable_jit():
                return bound(*jax.device_put(arguments, device))

        vars(run)["runs_eagerly"] = True
        return run

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Returns the results unchanged."""
        return results

    def compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        *,
        n_donated: int = 0,
        has_rows: bool = False,
    ) -> Function:
        """Makes the function run operation by operation; compiles and donates nothing."""
        return self.bind(function)

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Like `compile`."""
        return self.bind(function)


def _check_alone(strategy: Strategy) -> None:
    n_processes = max(jax.process_count(), strategy.n_processes)
    virtual = strategy.virtual_replicas
    if len(strategy.devices) == n_processes == 1 and virtual is None:
        return
    given = f"{n_processes} processes" if n_processes > 1 else repr(strategy)
    raise ValueError(
        f"Cannot run eagerly on {given}: the debug mode runs on one device of one process, without "
        "virtual replicas. Leave the strategy and the devices out, or pass one device, such as "
        "DataParallel(jax.local_devices()[:1])."
    )

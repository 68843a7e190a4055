"""Strategy: compiles and places for the loop. It sees functions and pytrees, never tasks."""

from collections.abc import Callable, Sequence
from typing import Protocol

from flaxfit.tree import Device, Function, PyTree


class Strategy(Protocol):
    """Compiles pure functions and places their arguments.

    >>> from flaxfit.strategies import DataParallel
    >>> strategy: Strategy = DataParallel()
    """

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that it computes on."""
        ...

    @property
    def n_devices(self) -> int:
        """The number of parts that a batch is split into."""
        ...

    @property
    def n_processes(self) -> int:
        """The number of processes that train together on these devices."""
        ...

    @property
    def axis_name(self) -> str | None:
        """The axis over which a step must reduce, or None if the compiler does it."""
        ...

    @property
    def virtual_replicas(self) -> int | None:
        """The number of replicas that devices compute in turn; None: each device is a replica."""
        ...

    @property
    def runs_eagerly(self) -> bool:
        """Whether functions run operation by operation, not compiled."""
        ...

    @property
    def shardings(self) -> Callable[[PyTree], PyTree] | None:
        """Maps an abstract state to the shardings to create its arrays in; None: anywhere."""
        ...

    def place(self, tree: PyTree) -> PyTree:
        """Puts a copy of a tree of whole arrays onto the devices."""
        ...

    def share(self, tree: PyTree) -> PyTree:
        """As `place`, without a copy of arrays that are already placed."""
        ...

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a placed tree as whole arrays, which outlive a donation of the tree."""
        ...

    def rows(self, n_examples: int) -> slice:
        """Returns the rows that this process computes, of a batch of all processes.

        The size of the batch divides by the devices. Where batches are not split over the
        processes, these are all rows.
        """
        ...

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Splits the leaves `(n, ...)` of a batch, or a list of leaves, over the devices.

        Each of several processes splits its own `rows`. With `n_stacked` the leaves are
        `(n_stacked, n, ...)`: several batches, one per step.
        """
        ...

    def join(self, outputs: PyTree) -> PyTree:
        """Joins outputs computed from a split batch into NumPy leaves `(n, ...)`, in order.

        Every process calls it, and receives the rows of all of them.
        """
        ...

    def narrow(self, n_examples: int) -> "Strategy":
        """Returns the strategy on as many devices as divide `n_examples`."""
        ...

    def bind(self, function: Function) -> Function:
        """Makes a function traceable outside of `compile`, with the axes that models name."""
        ...

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Lays out the results of a traced function as `place` would.

        Args:
          results: a pytree that may hold states, and trees like the parameters of `state`.
          state: the state that the function is traced with.
        """
        ...

    def compile(
        self,
        function: Function,
        arguments: tuple[PyTree, ...],
        *,
        n_donated: int = 0,
        has_rows: bool = False,
    ) -> Function:
        """Compiles `function(state, ..., batch)` for these arguments; results are whole.

        The batch may be a list of its leaves. The function itself lays out its results, by
        `constrain`. With `has_rows` it returns a pair `(results, rows)`, of which the rows are
        split like the batch.
        """
        ...

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results are split like the batch."""
        ...

"""Strategy: compiles functions and places arrays; knows functions and pytrees, not tasks."""

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
        """The number of replicas that the devices compute one by one; None: one per device."""
        ...

    @property
    def runs_eagerly(self) -> bool:
        """Whether functions run operation by operation instead of compiled."""
        ...

    @property
    def shardings(self) -> Callable[[PyTree], PyTree] | None:
        """`abstract state -> shardings` to create the arrays with; None: anywhere."""
        ...

    @property
    def text(self) -> str:
        """The lowered text of the latest program, if several processes compare it; else ""."""
        ...

    def place(self, tree: PyTree) -> PyTree:
        """Puts a copy of a tree of whole arrays onto the devices."""
        ...

    def share(self, tree: PyTree) -> PyTree:
        """Like `place`, but does not copy arrays that are already placed."""
        ...

    def collect(self, tree: PyTree) -> PyTree:
        """Copies a placed tree as whole arrays, which outlive a donation of the tree."""
        ...

    def rows(self, n_examples: int) -> slice:
        """Returns the rows of a global batch that this process computes.

        The size of the batch must be a multiple of the number of devices. If batches are not split
        over processes, these are all rows.
        """
        ...

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Splits the leaves `(n, ...)` of a batch, or a list of leaves, over the devices.

        A process splits its own `rows`. With `n_stacked` the leaves are `(n_stacked, n, ...)`:
        several batches, one per step.
        """
        ...

    def join(self, outputs: PyTree) -> PyTree:
        """Joins outputs computed from a split batch into NumPy leaves `(n, ...)`, in order.

        Every process must call it, and receives the rows of all processes.
        """
        ...

    def narrow(self, n_examples: int) -> "Strategy":
        """Returns the strategy on as many devices as divide `n_examples`."""
        ...

    def bind(self, function: Function) -> Function:
        """Makes a function traceable outside `compile`, with the axes that models name."""
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

        The batch may be a list of its leaves. The function must lay out its results by `constrain`.
        With `has_rows` it returns a pair `(results, rows)`; the rows are split like the batch.
        """
        ...

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results are split like the batch."""
        ...

"""Strategy: what the loop asks of the devices. It sees functions and pytrees, never tasks."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flaxfit.tree._types import Function, PyTree


class Strategy(Protocol):
    """Compiles pure functions and places what they are called with.

    >>> from flaxfit.strategies import DataParallel
    >>> strategy: Strategy = DataParallel()
    """

    @property
    def devices(self) -> Sequence[Any]:
        """The devices that it computes on."""
        ...

    @property
    def axis_name(self) -> str | None:
        """The axis over which a step must reduce, or None if the compiler does it."""
        ...

    @property
    def virtual_replicas(self) -> int | None:
        """How many replicas the devices work at in turn, or None: each device is one replica."""
        ...

    @property
    def n_devices(self) -> int:
        """The number of parts that a batch is split into."""
        ...

    @property
    def shardings(self) -> Callable[[Any], Any] | None:
        """Maps an abstract state to the shardings to create its arrays in; None: anywhere."""
        ...

    def place(self, tree: PyTree) -> PyTree:
        """Puts a tree of whole arrays onto the devices."""
        ...

    def share(self, tree: PyTree) -> PyTree:
        """As `place`, without a copy of arrays that are placed already."""
        ...

    def collect(self, tree: PyTree) -> PyTree:
        """A copy of a placed tree as whole arrays, safe from later donation."""
        ...

    @property
    def n_processes(self) -> int:
        """How many processes train together over these devices."""
        ...

    def rows(self, n_examples: int) -> slice:
        """Which rows of a batch of all processes, of a size that divides, this one's devices get.

        Where batches are not split over the processes, they are all of the rows.
        """
        ...

    def split(self, batch: PyTree, n_stacked: int = 0) -> PyTree:
        """Splits the leaves `(n, ...)` of a batch over the devices.

        Of several processes, each splits the `rows` that its devices get. With `n_stacked` the
        leaves are `(n_stacked, n, ...)`: several batches, one per step.
        """
        ...

    def join(self, outputs: PyTree) -> PyTree:
        """Joins outputs computed from a split batch: NumPy leaves `(n, ...)`, in order.

        Every process calls it, and gets the rows of all of them.
        """
        ...

    def narrow(self, n_examples: int) -> "Strategy":
        """The same strategy on as many devices as divide `n_examples`."""
        ...

    def bind(self, function: Function) -> Function:
        """The function as it may be traced outside of `compile`, with what models refer to."""
        ...

    def constrain(self, results: PyTree, state: PyTree) -> PyTree:
        """Has results of a function that is traced come out as `place` would put them.

        Args:
          results: a pytree that may hold states, and trees like the parameters of `state`.
          state: the state that it is traced with.
        """
        ...

    def compile(
        self, function: Function, arguments: tuple[PyTree, ...], *, n_donated: int = 0
    ) -> Function:
        """Compiles `function(state, ..., batch)` for these arguments; results are whole.

        Where they go is the function's own affair, by `constrain`.
        """
        ...

    def compile_split(self, function: Function, arguments: tuple[PyTree, ...]) -> Function:
        """Compiles `function(state, ..., batch)` whose results are split as the batch is."""
        ...

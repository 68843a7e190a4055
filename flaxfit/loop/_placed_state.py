"""PlacedState: the training state on the devices, as steps take it."""

from collections.abc import Callable
from typing import Any

import jax

from flaxfit.loop._state_layout import StateLayout
from flaxfit.optim import set_hyperparams
from flaxfit.optim._extended import continued_state
from flaxfit.optim._generations import Generations
from flaxfit.optim._hyperparams import names_of
from flaxfit.optim._plain_rate import matched
from flaxfit.state import Borrowed, TrainState, with_opt_state
from flaxfit.strategies import Strategy
from flaxfit.tree import ArrayLike, PyTree


class PlacedState:
    """Holds the arrays of a state, which the next step donates, and lends them until then.

    Donation reuses the memory of the old state for the new one, which deletes the old arrays: every
    reference to them must end before the step, or read a deleted buffer.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self.layout = StateLayout(())
        """The structure of the state."""
        self.leaves: list[Any] = []
        """The flat arrays, as a compiled step takes and returns them."""
        self.grads: PyTree = None
        """The gradients of the latest step, if they are kept."""
        self.has_hyperparams = False
        self._lent: list[Borrowed] = []

    @property
    def value(self) -> Any:
        """The state; the next step donates it."""
        return self.layout.unflatten(self.leaves)

    def copied(self, copy: Callable[[PyTree], PyTree]) -> Any:
        """Returns the state with copies of its arrays."""
        return self.layout.unflatten(copy(self.leaves))

    def hold(self, state: TrainState) -> None:
        """Replaces the state by one whose arrays are already placed."""
        self.layout = StateLayout(state)
        self.leaves = self.layout.flatten(state)
        self.has_hyperparams = bool(names_of(state.opt_state))

    def lend(self) -> tuple[Any, Any]:
        """Returns the state and the kept gradients as `Borrowed`, readable until the next step."""
        state = Borrowed(self.leaves, self.layout.unflatten)
        grads = None if self.grads is None else Borrowed(self.grads, lambda grads: grads)
        self._lent += [state] if grads is None else [state, grads]
        return state, grads

    def take_back(self) -> None:
        """Invalidates everything lent: a step is about to donate its arrays."""
        for each in self._lent:
            each.end()
        self._lent.clear()

    def moved(self, strategy: Strategy, leaves: PyTree, totals: PyTree) -> tuple[Any, Any]:
        """Places leaves and totals under another strategy; copies only arrays that move."""
        state, totals = strategy.share((self.layout.unflatten(leaves), totals))
        return self.layout.flatten(state), totals

    # Changes between steps.

    def place(self, state: TrainState, *, may_donate: bool = False) -> None:
        """Replaces the state by a copy of another one, keeping the structure if the paths agree.

        With `may_donate` it takes the arrays themselves: nobody else holds them.
        """
        put = self._strategy.share if may_donate else self._strategy.place
        self.hold(put(self.layout.restructured(state)))

    def set_hyperparams(self, group: str | int | None, values: dict[str, ArrayLike]) -> None:
        """Sets hyperparameters; nothing is recompiled."""
        old = self.value
        new = set_hyperparams(old.opt_state, group=group, **values)

        def placed(x: ArrayLike, before: ArrayLike) -> ArrayLike:
            # A copy, because the next step donates it, and the caller may keep the value.
            return before if x is before else self._strategy.place(x)

        self.hold(old.replace(opt_state=jax.tree.map(placed, new, old.opt_state)))

    def match(self, optimizer: Any) -> None:
        """Moves the learning rate of an optimizer into the state, if it is not there yet."""
        old = self.value
        kept = {id(x) for x in jax.tree.leaves(old.opt_state)}

        def placed(x: ArrayLike) -> ArrayLike:
            return x if id(x) in kept else self._strategy.place(x)

        opt_state = jax.tree.map(placed, matched(optimizer, old.opt_state)[1])
        self.hold(with_opt_state(old, opt_state))

    def set_optimizer(self, optimizer: Any) -> Generations:
        """Rebuilds the optimizer state for another `freeze`; returns its generations."""
        state = self._strategy.collect(self.value)
        opt_state, _, generations = continued_state(
            state.opt_state, optimizer, state.params, state.model_state, is_same=True
        )
        self.hold(self._strategy.place(with_opt_state(state, opt_state)))
        return generations

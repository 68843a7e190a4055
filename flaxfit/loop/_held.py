"""A state as compiled steps take it: the arrays that they change, and those that they leave."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from flaxfit.loop._keys import key_types, without_types
from flaxfit.optim._hyperparams import constants
from flaxfit.tree._paths import flat, label


class Held(NamedTuple):
    """The arrays of a state, random keys as plain arrays."""

    moving: list[Any]
    """Those that a step uses up and gives back anew."""
    still: list[Any]
    """Those that are handed to each step as they are: an array less to make and to give back."""

    def after(self, moving: list[Any], changed: Mapping[int, Any]) -> "Held":
        """What is held after a step that gave back these; `changed` are others, by position."""
        still = [changed.get(i, x) for i, x in enumerate(self.still)] if changed else self.still
        return Held(moving, still)


class Form:
    """How states of one structure are taken apart, and put together again.

    Held to be still are the key, frozen parameters, and hyperparameters without a schedule. That
    is a guess, which no result depends on: those that a step changes all the same it gives back.

    Args:
      state: a state of that structure, of arrays.
      freeze: patterns of the paths of frozen parameters.
    """

    def __init__(self, state: Any, freeze: Sequence[str] = ()):
        leaves, self._structure = jax.tree.flatten(state)
        self._freeze = freeze
        self._types = key_types(leaves)
        self._keys: dict[int, tuple[Any, Any]] = {}
        """The latest keys that were put into a state, each behind the plain array of it."""
        is_frozen = flat(label([(pattern, True) for pattern in freeze], state.params, False))
        frozen = [x for path, x in flat(state.params).items() if is_frozen[path]]
        still = {id(x) for x in jax.tree.leaves((frozen, constants(state.opt_state), state.key))}
        self._is_still = [id(x) in still for x in leaves]
        self._paths = [*flat(state)]

    def fits(self, state: Any, freeze: Sequence[str]) -> bool:
        """Whether it is the form of a state with these parameters frozen, too."""
        leaves, structure = jax.tree.flatten(state)
        is_alike = freeze == self._freeze and structure == self._structure
        return is_alike and key_types(leaves) == self._types

    def restructured(self, state: Any) -> Any:
        """A state with arrays of the same paths in this structure, any other one as it is.

        Names of axes that it brings along stay its own.

        One that was restored without a template has plain dicts, whose order may be another.
        """
        given = flat(state)
        is_alike = len(given) == self._structure.num_leaves and {*given} == {*self._paths}
        if not is_alike or jax.tree.structure(state) == self._structure:
            return state
        same = jax.tree.unflatten(self._structure, [given[path] for path in self._paths])
        return same if state.axes is None else same.replace(axes=state.axes)

    def apart(self, state: Any) -> Held:
        """The arrays of a state."""
        leaves = without_types(jax.tree.leaves(state), self._types)
        pairs = list(zip(leaves, self._is_still, strict=True))
        return Held([x for x, still in pairs if not still], [x for x, still in pairs if still])

    def together(self, held: Held) -> Any:
        """The state of these arrays."""
        moving, still = iter(held.moving), iter(held.still)
        leaves = [next(still if is_still else moving) for is_still in self._is_still]
        for i, implementation in self._types.items():
            leaves[i] = self._key(i, leaves[i], implementation)
        return self._structure.unflatten(leaves)

    def _key(self, i: int, data: Any, implementation: Any) -> Any:
        """The random key whose plain array stands at this position."""
        known, key = self._keys.get(i, (None, None))
        if known is not data:
            key = jax.random.wrap_key_data(data, impl=implementation)
            # To make it takes a while, and mostly the next state has the same. One that was made in
            # a function that JAX traces is of no use outside.
            if not isinstance(key, Tracer):
                self._keys[i] = data, key
        return key

    def changed(self, new: Any, old: Any) -> list[int]:
        """Which of the arrays held to be still a traced step has changed, by position."""
        triples = zip(jax.tree.leaves(new), jax.tree.leaves(old), self._is_still, strict=True)
        kept = [(a, b) for a, b, is_still in triples if is_still]
        return [i for i, (a, b) in enumerate(kept) if a is not b]


def on_held(
    update: Callable[..., Any], form: Form, constrain: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes `(moving, totals, still, ...) -> (moving, totals, grads, changed)` of an update.

    Args:
      update: `(state, totals, ...) -> (state, totals, grads)`.
      form: how the state is taken apart.
      constrain: as of a `Strategy`.
    """

    def update_held(moving: Any, totals: Any, still: Any, *batch: Any) -> Any:
        state = form.together(Held(moving, still))
        new, totals, grads = update(state, totals, *batch)
        positions = form.changed(new, state)
        new, totals, grads = constrain((new, totals, grads), state)
        held = form.apart(new)
        return held.moving, totals, grads, {i: held.still[i] for i in positions}

    return update_held

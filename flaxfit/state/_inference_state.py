"""InferenceState: a trained model for evaluation, prediction and export."""

from collections.abc import Mapping
from typing import NoReturn, Self

import jax
import jax.numpy as jnp
from flax import struct

from flaxfit.display import count, html
from flaxfit.state import _logical_axes
from flaxfit.tree import ArrayLike, Json, Params, PyTree, plain

# `self: PyTree`, as the subclasses add the fields `model_state` and `axes`: not here, since the
# state of the optimizer comes before them.


class State(struct.PyTreeNode, repr=False):
    """The part of the protocol of T5X's train states that needs no optimizer."""

    step: jax.Array
    params: Params

    @property
    def variables(self: PyTree) -> dict[str, PyTree]:
        """The variables of the model's `apply`: parameters and every other collection."""
        return {"params": self.params, **self.model_state}

    @property
    def flax_mutables(self: PyTree) -> PyTree:
        """The model state, by its name in T5X."""
        return self.model_state

    @property
    def params_axes(self: PyTree) -> PyTree:
        """A tree like `params` of `PartitionSpec`s of logical names, or None."""
        return _logical_axes.below("params", self.params, self.axes)

    @property
    def flax_mutables_axes(self: PyTree) -> PyTree:
        """A tree like `model_state` of `PartitionSpec`s of logical names, or None."""
        return _logical_axes.below("model_state", self.model_state, self.axes)

    def as_logical_axes(self) -> Self:
        """Replaces each array by a `PartitionSpec` of logical names.

        >>> from flax.linen import LogicallyPartitioned
        >>> kernel = LogicallyPartitioned(jnp.ones(2), ("embed",))
        >>> named = InferenceState.create({"params": {"kernel": kernel}})
        >>> tuple(named.as_logical_axes().params["kernel"])
        ('embed',)

        Raises:
          ValueError: some parameters have no names, and it lists them; or the optimizer's state
            was replaced by another's.
        """
        return _logical_axes.as_logical_axes(self)

    def state_dict(self) -> dict[str, Json]:
        """Returns plain nested dicts in T5X's layout.

        It is `{target, state: {step, param_states}, flax_mutables}`; an `InferenceState` has no
        `param_states`, and models without such collections no `flax_mutables`. The key and the axes
        are left out. Random keys elsewhere become their words.

        >>> InferenceState.create({"params": {"w": 1.0}}).replace(step=3).state_dict()
        {'target': {'w': 1.0}, 'state': {'step': 3}}
        """
        return plain.state_dict(self)

    def restore_state(self, state_dict: Mapping[str, Json]) -> Self:
        """Replaces the arrays by a `state_dict`; the key and the axes stay.

        An `InferenceState` ignores `param_states`.

        >>> state.restore_state(state.state_dict()).params
        {'w': 1.0}

        Raises:
          ValueError: every difference in structure, shape or dtype.
        """
        return plain.restore_state(self, state_dict)

    def replace_params(self, params: Params) -> Self:
        """Returns a copy with other parameters.

        >>> state.replace_params({"w": 2.0}).params
        {'w': 2.0}
        """
        return self.replace(params=params)

    def replace_step(self, step: ArrayLike) -> Self:
        """Returns a copy at another step.

        >>> int(state.replace_step(9).step)
        9
        """
        return self.replace(step=jnp.asarray(step, jnp.int32))

    def replace_flax_mutables(self, flax_mutables: PyTree) -> Self:
        """Returns a copy with another model state.

        >>> state.replace_flax_mutables({"cache": {}}).model_state
        {'cache': {}}
        """
        return self.replace(model_state=flax_mutables)

    def __repr__(self) -> str:
        step = html.step_of(self)
        at = "" if step is None else f"step={step}, "
        return f"{type(self).__name__}({at}{count(html.n_numbers(self.params))} params)"

    def _repr_html_(self) -> str:
        """Returns the step, the sizes and the arrays as a notebook shows them."""
        return html.of_state(self)


class InferenceState(State, repr=False):
    """Holds a trained model's parameters and state, without the optimizer.

    It has the protocol of `TrainState` without the methods that need an optimizer.

    >>> state = InferenceState(jnp.int32(7), {"w": 1.0}, {"batch_stats": {}})
    >>> state.variables
    {'params': {'w': 1.0}, 'batch_stats': {}}

    Attributes:
      step: completed updates, an int32 scalar.
      params: the model's parameters.
      model_state: every other collection of the model, such as `batch_stats`.
      axes: logical axis names by path, or None.
    """

    model_state: PyTree
    axes: _logical_axes.Axes | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(cls, variables: Mapping[str, PyTree]) -> "InferenceState":
        """Makes a state at step 0 of what a model's `init` returned; splits off names of axes.

        >>> InferenceState.create({"params": {"w": 1.0}}).params
        {'w': 1.0}

        Raises:
          ValueError: the variables have no "params", or names that do not match the arrays.
        """
        _logical_axes.check_has_params(variables)
        fields, axes = _logical_axes.take_apart(variables)
        return cls(step=jnp.zeros((), jnp.int32), axes=axes, **fields)

    @property
    def param_states(self) -> NoReturn:
        """Refuses: there is no optimizer state."""
        raise AttributeError(
            "An InferenceState has no optimizer state: read param_states of the TrainState that it "
            "was made of."
        )

    def apply_gradient(self, *args: PyTree, **kwargs: PyTree) -> NoReturn:
        """Refuses: there is no optimizer state to update with."""
        raise TypeError(
            "An InferenceState cannot apply a gradient, for it has no optimizer state: train a "
            "TrainState, such as TrainState.create(optimizer, state.variables)."
        )

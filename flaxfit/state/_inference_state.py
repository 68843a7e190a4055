"""InferenceState: what evaluation, prediction and export need of a trained model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flaxfit.display import _html
from flaxfit.state import _logical_axes
from flaxfit.tree import _plain
from flaxfit.tree._types import Json, Params, PyTree


class InferenceState(struct.PyTreeNode):
    """A trained model's parameters and state, without the optimizer.

    It has the protocol of `TrainState`, short of what needs an optimizer.

    >>> InferenceState(jnp.int32(7), {"w": 1.0}, {"batch_stats": {}}).variables
    {'params': {'w': 1.0}, 'batch_stats': {}}

    Attributes:
      step: completed updates, an int32 scalar.
      params: the model's parameters.
      model_state: every other collection of the model, such as `batch_stats`.
      axes: logical axis names by path, or None.
    """

    step: jax.Array
    params: Params
    model_state: PyTree
    axes: _logical_axes.Axes | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(cls, variables: Mapping[str, PyTree]) -> "InferenceState":
        """The state at step 0 of what a model's `init` returned; names of axes are split off.

        >>> InferenceState.create({"params": {"w": 1.0}}).params
        {'w': 1.0}

        Raises:
          ValueError: the variables have no "params", or names that do not fit the arrays.
        """
        _logical_axes.check_has_params(variables)
        fields, axes = _logical_axes.take_apart(variables)
        return cls(step=jnp.zeros((), jnp.int32), axes=axes, **fields)

    @property
    def variables(self) -> dict[str, PyTree]:
        """What the model's `apply` takes."""
        return {"params": self.params, **self.model_state}

    @property
    def param_states(self) -> Any:
        """There is none, and an error says so."""
        raise AttributeError(
            "An InferenceState has no optimizer state: read param_states of the TrainState that it "
            "was made of."
        )

    @property
    def flax_mutables(self) -> Any:
        """The model state, by its name in T5X."""
        return self.model_state

    @property
    def params_axes(self) -> Any:
        """A tree like `params` of the names of their dimensions, or None."""
        return _logical_axes.below("params", self.params, self.axes)

    @property
    def flax_mutables_axes(self) -> Any:
        """A tree like `model_state` of the names of its dimensions, or None."""
        return _logical_axes.below("model_state", self.model_state, self.axes)

    def apply_gradient(self, *args: Any, **kwargs: Any) -> "InferenceState":
        """Refuses: there is no optimizer state to update with."""
        raise TypeError(
            "An InferenceState cannot apply a gradient, for it has no optimizer state: train a "
            "TrainState, such as TrainState.create(optimizer, state.variables)."
        )

    def as_logical_axes(self) -> "InferenceState":
        """The same state with a `PartitionSpec` of logical names in the place of each array.

        Raises:
          ValueError: parameters without names; they are listed.
        """
        return _logical_axes.as_logical_axes(self)

    def state_dict(self) -> dict[str, Json]:
        """Plain nested dicts in T5X's layout, `{target, state: {step}, flax_mutables}`."""
        return _plain.state_dict(self)

    def restore_state(self, state_dict: Mapping[str, Json]) -> "InferenceState":
        """A copy with the arrays of such a dict; `param_states`, if it has them, are left out.

        Raises:
          ValueError: every difference in structure, shape or dtype.
        """
        return _plain.restore_state(self, state_dict)

    def replace_params(self, params: Params) -> "InferenceState":
        """A copy with other parameters."""
        return self.replace(params=params)

    def replace_step(self, step: Any) -> "InferenceState":
        """A copy at another step."""
        return self.replace(step=jnp.asarray(step, jnp.int32))

    def replace_flax_mutables(self, flax_mutables: Any) -> "InferenceState":
        """A copy with another model state."""
        return self.replace(model_state=flax_mutables)

    def _repr_html_(self) -> str:
        """The step, the sizes and the arrays as a notebook shows them."""
        return _html.of_state(self)

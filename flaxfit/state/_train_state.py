"""TrainState: everything that a training step reads and writes, as data."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from flaxfit.optim._demands import not_taken
from flaxfit.optim._extended import first_state
from flaxfit.optim._hyperparams import group_named
from flaxfit.state import _logical_axes
from flaxfit.state._inference_state import InferenceState, State
from flaxfit.state._optimizer_axes import with_optimizer, without_optimizer
from flaxfit.tree import ArrayLike, OptState, PyTree, Transformation, is_key, without_mesh


class TrainState(State, repr=False):
    """Holds the state of a training run. Functions (apply, loss, optimizer) live in the task.

    >>> params, optimizer = jnp.ones(2), optax.sgd(0.5)
    >>> state = TrainState(jnp.int32(0), params, optimizer.init(params), {}, as_key(0))
    >>> state.apply_gradient(optimizer, jnp.ones(2)).params
    Array([0.5, 0.5], dtype=float32)

    Attributes:
      step: completed updates, an int32 scalar.
      params: the model's trainable parameters.
      opt_state: the optimizer's state.
      model_state: every other collection of the model, such as `batch_stats`.
      key: a typed random key. It never changes: a step uses `flaxfit.step_key(key, step, replica)`.
      axes: logical axis names of the arrays by path ("params/Dense_0/kernel"), or None.
    """

    opt_state: OptState
    model_state: PyTree
    key: jax.Array
    axes: _logical_axes.Axes | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        optimizer: Transformation,
        variables: Mapping[str, PyTree],
        *,
        key: ArrayLike = 0,
    ) -> "TrainState":
        """Makes a state at step 0 of what a model's `init` returned; splits off names of axes.

        >>> TrainState.create(optax.sgd(0.1), {"params": {"w": 1.0}}).params
        {'w': 1.0}

        Args:
          optimizer: an Optax transformation.
          variables: `{"params": ...}` and other collections, with or without names of axes.
          key: a random key or an integer seed.

        Raises:
          ValueError: the variables have no "params", or names that do not match the arrays.
        """
        _logical_axes.check_has_params(variables)
        return at_start(optimizer, variables, as_key(key))

    def apply_gradient(
        self,
        optimizer: Transformation,
        grads: PyTree,
        *,
        model_state: PyTree = None,
        flax_mutables: PyTree = None,
        group: str | int | None = None,
        **hyperparams: PyTree,
    ) -> "TrainState":
        """Returns the state after one update of the optimizer.

        >>> state.apply_gradient(optimizer, jnp.ones(2)).step
        Array(1, dtype=int32)

        Args:
          optimizer: the Optax transformation that made `opt_state`.
          grads: gradients, shaped like `params`.
          model_state: the model's new state; None keeps the current one.
          flax_mutables: the same, by its name in T5X.
          group: the name or the position of a group of a `MultiOptimizer`, to update it alone: the
            parameters and the optimizer states of the others stay.
          **hyperparams: passed on to `optimizer.update` (such as `value=loss`).

        Raises:
          TypeError: both `model_state` and `flax_mutables` are given.
          ValueError: an argument that the optimizer does not take, such as a learning rate if it
            is not an `OptimizerDef`; or a group that it does not have.
        """
        if flax_mutables is not None:
            if model_state is not None:
                raise TypeError("model_state and flax_mutables are the same: pass one of them.")
            model_state = flax_mutables
        call = optimizer, grads, self.opt_state, self.params
        if unknown := not_taken(*call, hyperparams):  # Optax would silently ignore them.
            raise ValueError(
                f"Cannot set {', '.join(unknown)}: no update of this optimizer takes such an "
                "argument. The new state of the model is model_state or flax_mutables. Make an "
                "optimizer whose hyperparameters can be set with "
                "flaxfit.optim.OptimizerDef(optax.adam, learning_rate=1e-3)."
            )
        if group is not None:
            hyperparams["group"] = group_named(self.opt_state, group)
        model_state = self.model_state if model_state is None else model_state
        if getattr(self.opt_state, "statistics", ()):  # The optimizer averages them.
            hyperparams["model_state"] = model_state
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params, **hyperparams)
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            model_state=model_state,
        )

    @property
    def param_states(self) -> OptState:
        """The optimizer's state, by its name in T5X."""
        return self.opt_state

    def replace_optimizer(self, optimizer: Transformation) -> "TrainState":
        """Returns a copy with the initial state of another optimizer, and its axes.

        >>> state.replace_optimizer(optax.trace(0.9)).opt_state
        TraceState(trace=Array([0., 0.], dtype=float32))
        """
        return with_opt_state(self, first_state(optimizer, self.params, self.model_state))

    def for_inference(self) -> InferenceState:
        """Returns the part that evaluation, prediction and export need.

        >>> state.for_inference().variables
        {'params': Array([1., 1.], dtype=float32)}
        """
        return InferenceState(
            step=self.step,
            params=self.params,
            model_state=self.model_state,
            axes=without_optimizer(self.axes),
        )


def with_opt_state(state: TrainState, opt_state: OptState) -> TrainState:
    """Replaces the optimizer's state, and the logical axes of its arrays."""
    axes = with_optimizer(state.axes, state.params, opt_state)
    return state.replace(opt_state=opt_state, axes=axes)


@without_mesh()
def as_key(key: ArrayLike) -> jax.Array:
    """Makes a typed random key of a typed key, an old-style uint32 key, or an integer seed."""
    if isinstance(key, int | np.integer):
        return jax.random.key(int(key))
    if not hasattr(key, "dtype"):
        raise TypeError(f"A random key is jax.random.key(0) or an integer seed, got {key!r:.60}.")
    if is_key(key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key, jnp.uint32))


def at_start(
    optimizer: Transformation, variables: Mapping[str, PyTree], key: jax.Array
) -> TrainState:
    """Makes a state at step 0, of variables that may lack parameters."""
    fields, axes = _logical_axes.take_apart(variables)
    opt_state = first_state(optimizer, **fields)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        opt_state=opt_state,
        key=key,
        axes=with_optimizer(axes, fields["params"], opt_state),
        **fields,
    )

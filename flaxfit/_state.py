"""TrainState: everything that a training step reads and writes, as data."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from flaxfit._batch import call


class TrainState(struct.PyTreeNode):
    """The state of a training run. Functions (apply, loss, optimizer) live in the task.

    >>> params, optimizer = jnp.ones(2), optax.sgd(0.5)
    >>> state = TrainState(jnp.int32(0), params, optimizer.init(params), {}, as_key(0))
    >>> state.apply_gradient(optimizer, jnp.ones(2)).params
    Array([0.5, 0.5], dtype=float32)

    Attributes:
      step: completed updates, an int32 scalar.
      params: the model's trainable parameters.
      opt_state: the optimizer's state.
      model_state: every other collection of the model, such as `batch_stats`.
      key: a typed random key; the key of a step is `fold_in(key, step)`, so it never changes.
      axes: logical axis names of the parameters, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    key: jax.Array
    axes: Any = struct.field(pytree_node=False, default=None)

    def apply_gradient(
        self, optimizer: Any, grads: Any, *, model_state: Any = None, **hyperparams: Any
    ) -> "TrainState":
        """The state after one update of the optimizer.

        Args:
          optimizer: the optax transformation that made `opt_state`.
          grads: gradients, shaped like `params`.
          model_state: the model's new state; None keeps the present one.
          **hyperparams: passed on to `optimizer.update` (such as `value=loss`).
        """
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params, **hyperparams)
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            model_state=self.model_state if model_state is None else model_state,
        )

    @property
    def variables(self) -> dict[str, Any]:
        """What the model's `apply` takes: parameters and every other collection."""
        return {"params": self.params, **self.model_state}

    def replace_params(self, params: Any) -> "TrainState":
        """A copy with other parameters."""
        return self.replace(params=params)

    def replace_step(self, step: Any) -> "TrainState":
        """A copy at another step."""
        return self.replace(step=jnp.asarray(step, jnp.int32))

    def for_inference(self) -> "InferenceState":
        """The part that evaluation, prediction and export need."""
        return InferenceState(
            step=self.step, params=self.params, model_state=self.model_state, axes=self.axes
        )


class InferenceState(struct.PyTreeNode):
    """A trained model's parameters and state, without the optimizer.

    >>> InferenceState(jnp.int32(7), {"w": 1.0}, {"batch_stats": {}}).variables
    {'params': {'w': 1.0}, 'batch_stats': {}}
    """

    step: jax.Array
    params: Any
    model_state: Any
    axes: Any = struct.field(pytree_node=False, default=None)

    @property
    def variables(self) -> dict[str, Any]:
        """What the model's `apply` takes."""
        return {"params": self.params, **self.model_state}


def as_key(key: Any) -> jax.Array:
    """A typed random key from a typed key, an old-style uint32 key, or an integer seed."""
    if isinstance(key, int):
        return jax.random.key(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key, jnp.uint32))


def init_state(
    init: Callable[..., Any],
    optimizer: Any,
    key: Any,
    inputs: Any,
    *,
    collections: Sequence[str] = ("params", "dropout"),
) -> TrainState:
    """Initialises a model and its optimizer in one jitted call.

    An `init` that says `gives_weights` is not traced, since its weights would be constants.

    >>> init = lambda rngs, x: {"params": jnp.ones(x.shape[1])}
    >>> init_state(init, optax.adam(0.1), 0, (jnp.ones((2, 3)),)).params.shape
    (3,)

    Args:
      init: a linen `init`: `init(rngs, *inputs) -> variables`.
      optimizer: an optax transformation.
      key: a random key or an integer seed.
      inputs: the model's inputs, a tuple (or a dict of keyword inputs) of arrays or
        `jax.ShapeDtypeStruct`s; only shapes and dtypes matter.
      collections: the random streams that `init` is given.

    Returns:
      The state at step 0.
    """
    key = as_key(key)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)

    def create(key: jax.Array) -> TrainState:
        init_key, train_key = jax.random.split(key)
        keys = jax.random.split(init_key, len(collections))
        rngs = dict(zip(collections, keys, strict=True))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        variables = dict(call(init, rngs, zeros))
        params = variables.pop("params", {})
        variables.pop("intermediates", None)
        variables.pop("losses", None)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            model_state=variables,
            key=train_key,
        )

    return create(key) if getattr(init, "gives_weights", False) else jax.jit(create)(key)

"""Optimizer: parameters together with the state of what updates them, as one pytree."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import struct

from flaxfit.tree._plain import as_plain, restore
from flaxfit.tree._types import ArrayLike, PyTree


class Optimizer(struct.PyTreeNode):
    """Parameters, the optimizer's state, and the definition that updates both.

    It is a pytree, so that `jit`, `grad` and `pmap` take it and give it back.

    >>> import jax.numpy as jnp
    >>> from flaxfit.optim import OptimizerDef
    >>> optimizer = OptimizerDef(optax.sgd, learning_rate=0.5).create(jnp.ones(2))
    >>> optimizer.apply_gradient(jnp.ones(2)).target
    Array([0.5, 0.5], dtype=float32)
    >>> optimizer.apply_gradient(jnp.ones(2), learning_rate=0.0).target
    Array([1., 1.], dtype=float32)
    """

    optimizer_def: Any = struct.field(pytree_node=False)
    state: PyTree
    target: PyTree

    def apply_gradient(
        self, grads: PyTree, *, hyper_params: PyTree = None, **overrides: ArrayLike
    ) -> "Optimizer":
        """The optimizer after one step.

        Args:
          grads: gradients, shaped like `target`.
          hyper_params: all hyperparameters for this step, in place of the whole set; for groups a
            sequence with a set for each of them, or a mapping from groups to sets.
          **overrides: hyperparameters for this step by name, for every group that has them.
        """
        sets = {} if hyper_params is None else {"hyper_params": hyper_params}
        updates, state = self.optimizer_def.update(
            grads, self.state, self.target, **sets, **overrides
        )
        return self.replace(state=state, target=optax.apply_updates(self.target, updates))

    def compute_gradient(
        self, loss_fn: Callable[[PyTree], PyTree]
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The loss, the auxiliary outputs (or None), and the gradient of `target`.

        Args:
          loss_fn: a function of the target that returns a loss, or a loss and anything else.
        """

        def with_aux(target: PyTree) -> tuple[PyTree, PyTree]:
            result = loss_fn(target)
            return result if isinstance(result, tuple) else (result, None)

        (loss, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(self.target)
        return loss, aux, grads

    def state_dict(self) -> dict[str, PyTree]:
        """The target and the state as plain nested dicts."""
        return {"target": as_plain(self.target), "state": as_plain(self.state)}

    def restore_state(self, state_dict: dict[str, PyTree]) -> "Optimizer":
        """The optimizer with the target and the state of a `state_dict`.

        Raises:
          ValueError: it does not match the parameters or the optimizer; lists every difference.
        """
        restored = restore({"target": self.target, "state": self.state}, state_dict)
        return self.replace(**restored)

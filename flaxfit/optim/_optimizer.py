"""Optimizer: parameters and the state of their optimizer; and the base class of its definitions."""

import abc
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Self

import jax
import optax
from flax import struct

from flaxfit.optim._arguments import OPTAX_ARGUMENTS
from flaxfit.optim._hyperparams import check_known, group_named
from flaxfit.tree import ArrayLike, OptState, Params, PyTree, as_plain, restore


class Optimizer(struct.PyTreeNode):
    """Holds parameters, the state of their optimizer, and the definition that updates both.

    It is a pytree, which `jit`, `grad` and `pmap` take and return.

    >>> import jax.numpy as jnp
    >>> from flaxfit.optim import OptimizerDef
    >>> optimizer = OptimizerDef(optax.sgd, learning_rate=0.5).create(jnp.ones(2))
    >>> optimizer.apply_gradient(jnp.ones(2)).target
    Array([0.5, 0.5], dtype=float32)
    >>> optimizer.apply_gradient(jnp.ones(2), learning_rate=0.0).target
    Array([1., 1.], dtype=float32)

    Attributes:
      optimizer_def: the Optax transformation.
      state: its state.
      target: the parameters.
    """

    optimizer_def: optax.GradientTransformationExtraArgs = struct.field(pytree_node=False)
    state: OptState
    target: Params

    def apply_gradient(
        self,
        grads: PyTree,
        *,
        hyper_params: PyTree = None,
        group: str | int | None = None,
        **overrides: ArrayLike,
    ) -> "Optimizer":
        """Returns the optimizer after one step.

        >>> optimizer.apply_gradient(jnp.ones(2)).target
        Array([0.5, 0.5], dtype=float32)

        Args:
          grads: gradients, shaped like `target`.
          hyper_params: all hyperparameters of this step; for groups a sequence with a set for each
            of them, or a mapping from groups to sets.
          group: the name or the position of a group, to update it alone: the parameters and the
            states of the others stay.
          **overrides: hyperparameters of this step by name, for every group that has them.
        """
        sets = {} if hyper_params is None else {"hyper_params": hyper_params}
        if group is not None:
            sets["group"] = group_named(self.state, group)
        updates, state = self.optimizer_def.update(
            grads, self.state, self.target, **sets, **overrides
        )
        return self.replace(state=state, target=optax.apply_updates(self.target, updates))

    def compute_gradient(
        self, loss_fn: Callable[[PyTree], PyTree]
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns the loss, the auxiliary outputs (or None), and the gradient of `target`.

        >>> loss, aux, grads = optimizer.compute_gradient(lambda target: (target**2).sum())
        >>> grads
        Array([2., 2.], dtype=float32)

        Args:
          loss_fn: maps the target to a loss, or to a pair of a loss and auxiliary outputs.
        """

        def with_aux(target: PyTree) -> tuple[PyTree, PyTree]:
            result = loss_fn(target)
            return result if isinstance(result, tuple) else (result, None)

        (loss, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(self.target)
        return loss, aux, grads

    def state_dict(self) -> dict[str, PyTree]:
        """Returns the target and the state as plain nested dicts.

        >>> sorted(optimizer.state_dict())
        ['state', 'target']
        """
        return {"target": as_plain(self.target), "state": as_plain(self.state)}

    def restore_state(self, state_dict: dict[str, PyTree]) -> "Optimizer":
        """Returns the optimizer with the target and the state of a `state_dict`.

        >>> optimizer.restore_state(optimizer.state_dict()).target
        Array([1., 1.], dtype=float32)

        Raises:
          ValueError: it does not match the parameters or the optimizer; lists every difference.
        """
        restored = restore({"target": self.target, "state": self.state}, state_dict)
        return self.replace(**restored)


class Adjustable(optax.GradientTransformationExtraArgs, abc.ABC):
    """An Optax transformation that knows its hyperparameters.

    Subclasses implement `_init` and `_update` instead of a pair of functions.
    """

    def __init_subclass__(cls) -> None:
        # `help` and editors would show the arguments of `__new__`.
        _, *arguments = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(arguments)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes the pair of functions that Optax unpacks."""

        def init(params: Params) -> OptState:
            return made._init(params)

        def update(
            updates: PyTree, state: OptState, params: Params = None, **extra_args: PyTree
        ) -> tuple[PyTree, OptState]:
            return made._update(updates, state, params, **extra_args)

        made = super().__new__(cls, init, update)
        return made

    def __setattr__(self, name: str, value: object) -> None:
        # A user's subclass may store hyperparameters as attributes.
        is_builtin = type(self).__module__.startswith("flaxfit.")
        if is_builtin and not name.startswith("_") and name in (*self.known, "lr"):
            name = "learning_rate" if name == "lr" else name
            raise AttributeError(
                f"{self!r} keeps {name} in its state: use model.compile(optimizer=...) in a "
                f"Model, loop.set_hyperparams({name}=...) in a TrainLoop, and else "
                f"flaxfit.optim.set_hyperparams(state, {name}=...).",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)

    @abc.abstractmethod
    def _init(self, params: Params) -> OptState:
        """Returns the state before the first step."""

    @abc.abstractmethod
    def _update(
        self, updates: PyTree, state: OptState, params: Params = None, **extra_args: PyTree
    ) -> tuple[PyTree, OptState]:
        """Returns the updates of a step and the new state."""

    @property
    @abc.abstractmethod
    def known(self) -> Iterable[str]:
        """The names of all hyperparameters."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Lists the hyperparameters for messages."""

    @abc.abstractmethod
    def update_hyper_params(self, *, hyper_params: PyTree = None, **overrides: ArrayLike) -> PyTree:
        """Returns the hyperparameters with some values replaced."""

    def create(self, target: Params) -> Optimizer:
        """Returns an `Optimizer` of a tree of parameters.

        >>> import jax.numpy as jnp
        >>> optimizer.create({"w": jnp.ones(2)}).target
        {'w': Array([1., 1.], dtype=float32)}
        """
        return Optimizer(optimizer_def=self, state=self.init(target), target=target)

    def check(self, overrides: Iterable[str]) -> None:
        """Checks that arguments of an update are hyperparameters or known to Optax."""
        check_known(set(overrides) - OPTAX_ARGUMENTS, self.known, self.describe())

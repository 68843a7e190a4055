"""The base class of the optimizers here: an optax transformation with methods."""

import abc
from collections.abc import Iterable
from typing import Any, Self

import optax

from flaxfit.optim._hyperparams import check_known
from flaxfit.optim._optimizer import Optimizer
from flaxfit.tree._types import ArrayLike, OptState, Params, PyTree

OPTAX_ARGUMENTS = frozenset(("grad", "obj_fn", "value", "value_fn"))
"""What transformations of optax take in an update beside hyperparameters."""


class Adjustable(optax.GradientTransformationExtraArgs, abc.ABC):
    """An optax transformation with methods; subclasses have `_init` and `_update`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """The pair of functions that optax unpacks."""

        def init(params: Params) -> OptState:
            return made._init(params)

        def update(
            updates: PyTree, state: PyTree, params: Params = None, **extra_args: Any
        ) -> tuple[PyTree, OptState]:
            return made._update(updates, state, params, **extra_args)

        made = super().__new__(cls, init, update)
        return made

    @abc.abstractmethod
    def _init(self, params: Params) -> OptState:
        """The state before the first step."""

    @abc.abstractmethod
    def _update(
        self, updates: PyTree, state: PyTree, params: Params = None, **extra_args: Any
    ) -> tuple[PyTree, OptState]:
        """The updates of a step, and the new state."""

    @property
    @abc.abstractmethod
    def known(self) -> Iterable[str]:
        """The names of all hyperparameters."""

    @abc.abstractmethod
    def describe(self) -> str:
        """The hyperparameters in words."""

    @abc.abstractmethod
    def update_hyper_params(self, *, hyper_params: PyTree = None, **overrides: ArrayLike) -> PyTree:
        """The set of hyperparameters with some values replaced."""

    def create(self, target: PyTree) -> Optimizer:
        """An `Optimizer` of the target, which is a tree of parameters."""
        return Optimizer(optimizer_def=self, state=self.init(target), target=target)

    def check(self, overrides: Iterable[str]) -> None:
        """Checks that the arguments of an update are hyperparameters, or what optax takes.

        Raises:
          ValueError: with the hyperparameters that there are.
        """
        check_known(set(overrides) - OPTAX_ARGUMENTS, self.known, self.describe())

"""MultiOptimizer: one optimizer per group of parameters."""

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from flaxfit.optim._arguments import OPTAX_ARGUMENTS, of_selected, selected, with_arguments
from flaxfit.optim._filters import Filter, assign, group_name
from flaxfit.optim._hyperparams import GroupsState, check_known, group_named, names_of
from flaxfit.optim._optimizer import Adjustable
from flaxfit.tree import ArrayLike, OptState, Params, PyTree, Selection, is_nnx_filter


class MultiOptimizer(Adjustable):
    """Updates each group of parameters with its own optimizer.

    A parameter in no group is never updated and has no optimizer state. A group is named by its
    pattern, or by its position where its filter is not a pattern, and has its own hyperparameters.
    An override by name applies to all groups that have the hyperparameter.

    >>> import jax.numpy as jnp
    >>> from flaxfit.optim import OptimizerDef
    >>> optimizer = MultiOptimizer(
    ...     ("encoder/.*", OptimizerDef(optax.sgd, learning_rate=0.1)),
    ...     (lambda path, value: path == "head", OptimizerDef(optax.adam, learning_rate=0.5)),
    ... )
    >>> params = {"encoder": {"kernel": jnp.ones(2)}, "head": jnp.ones(2), "scale": jnp.ones(2)}
    >>> optimizer.create(params).apply_gradient(params, learning_rate=1.0).target["encoder"]
    {'kernel': Array([0., 0.], dtype=float32)}

    Args:
      *groups: pairs of a filter and an optimizer. A filter is a pattern that matches whole paths
        ("encoder/.*"), an NNX filter such as `nnx.LoRAParam` or `nnx.All(...)` if the task has
        an NNX module, a function `(path, value) -> bool` of the path as text ("encoder/kernel")
        and the array, or an object with `iterate` and `update`, such as a
        `flax.traverse_util.ModelParamTraversal`. An optimizer is an `OptimizerDef` or any Optax
        transformation.

    Raises:
      TypeError: a group is not a pair of a filter and an optimizer.
      ValueError: there is no group, or two have the same name.
    """

    def __init__(self, *groups: tuple[Filter, optax.GradientTransformation]):
        if not groups:
            raise ValueError(
                "MultiOptimizer needs at least one group: a pair (filter, optimizer), such as "
                "('encoder/.*', optax.adam(1e-3))."
            )
        for position, group in enumerate(groups):
            _check_pair(position, group)
        self._filters = tuple(filter for filter, _ in groups)
        self._optimizers = tuple(optimizer for _, optimizer in groups)
        self._names = tuple(group_name(i, filter) for i, filter in enumerate(self._filters))
        if len(set(self._names)) < len(groups):
            raise ValueError(f"Two groups have the same name: {list(self._names)}.")

    def __repr__(self) -> str:
        return f"MultiOptimizer({self.describe() or list(self._names)})"

    def with_patterns(self, select: Callable[[Any], str]) -> "MultiOptimizer":
        """Returns an optimizer with each NNX filter or `Selection` replaced by `select(filter)`."""
        filters = tuple(select(f) if _is_selected(f) else f for f in self._filters)
        if all(map(operator.is_, filters, self._filters)):
            return self
        new = copy.copy(self)
        new._filters = filters
        return new

    @property
    def hyper_params(self) -> list[PyTree]:
        """The hyperparameters of each group, as they were given."""
        return [getattr(optimizer, "hyper_params", {}) for optimizer in self._optimizers]

    def update_hyper_params(
        self, *, hyper_params: PyTree = None, **overrides: ArrayLike
    ) -> list[PyTree]:
        """Returns the hyperparameters of each group with some values replaced.

        >>> optimizer.update_hyper_params(learning_rate=0.2)
        [{'learning_rate': 0.2}, {'learning_rate': 0.2}]

        Args:
          hyper_params: a sequence of sets, or a mapping from groups to sets, to start from; None:
            the values given at construction.
          **overrides: values by name, for every group that has them.

        Raises:
          ValueError: no group has a hyperparameter of that name.
        """
        self.check(overrides)
        replaced = []
        for optimizer, given in zip(self._optimizers, self._sets(hyper_params), strict=True):
            if isinstance(optimizer, Adjustable):
                own = {name: value for name, value in overrides.items() if name in optimizer.known}
                given = optimizer.update_hyper_params(hyper_params=given, **own)
            replaced.append({} if given is None else given)
        return replaced

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all hyperparameters, whatever their group."""
        adjustable = [x for x in self._optimizers if isinstance(x, Adjustable)]
        return tuple(dict.fromkeys(name for optimizer in adjustable for name in optimizer.known))

    def describe(self) -> str:
        """Lists the hyperparameters for messages."""
        groups = zip(self._names, self._optimizers, strict=True)
        return ", ".join(
            f"{optimizer.describe()} in group {name!r}"
            for name, optimizer in groups
            if isinstance(optimizer, Adjustable)
        )

    def _init(self, params: Params) -> GroupsState:
        labels = assign(self._filters, self._names, params)
        state = _partition(self._optimizers, labels).init(params)
        names = tuple({name: ()} for name in self._names)
        return GroupsState(_of_groups(state), names)

    def _update(
        self,
        updates: PyTree,
        state: PyTree,
        params: Params = None,
        *,
        hyper_params: PyTree = None,
        group: str | int | None = None,
        **extra: PyTree,
    ) -> tuple[PyTree, GroupsState]:
        if params is None:
            raise ValueError(
                "MultiOptimizer needs the parameters to find its groups: call "
                "optimizer.update(grads, state, params)."
            )
        known = {*self.known, *names_of(state)}
        check_known(set(extra) - OPTAX_ARGUMENTS, known, self.describe())
        labels = assign(self._filters, self._names, params)
        sets = self._sets(hyper_params)
        only = None if group is None else self._names.index(group_named(state, group))
        optimizers = [
            _bound(
                optimizer,
                of_group,
                given,
                of_selected(extra, params, functools.partial(selected, labels, number)),
            )
            if only in (None, number)
            else optax.set_to_zero()  # This step skips the group, which keeps its state.
            for number, (optimizer, of_group, given) in enumerate(
                zip(self._optimizers, state.states, sets, strict=True)
            )
        ]
        states = optax.transforms.PartitionState(dict(enumerate([*state.states, _REST])))
        updates, new = _partition(optimizers, labels).update(updates, states, params)
        return updates, state._replace(states=_of_groups(new))

    def _sets(self, hyper_params: PyTree) -> list[PyTree]:
        if hyper_params is None:
            return [None] * len(self._names)
        if isinstance(hyper_params, Mapping):
            positions = dict(enumerate(self._names))
            hyper_params = {positions.get(n, n): given for n, given in hyper_params.items()}
            unknown = [name for name in hyper_params if name not in self._names]
            if unknown:
                raise ValueError(f"There are no groups {unknown}, only {list(self._names)}.")
            return [hyper_params.get(name) for name in self._names]
        if len(hyper_params) != len(self._names):
            raise ValueError(
                f"hyper_params must hold a set for each of the groups {list(self._names)}, got "
                f"{len(hyper_params)}."
            )
        return list(hyper_params)


def _check_pair(position: int, group: PyTree) -> None:
    is_pair = isinstance(group, tuple | list) and len(group) == 2
    if not is_pair or not (hasattr(group[1], "init") and hasattr(group[1], "update")):
        raise TypeError(
            "MultiOptimizer takes pairs (filter, optimizer), such as ('encoder/.*', "
            f"optax.adam(1e-3)), got {group!r:.80} for group {position}."
        )


def _bound(
    optimizer: optax.GradientTransformation,
    state: OptState,
    hyper_params: PyTree,
    extra: Mapping[str, PyTree],
) -> optax.GradientTransformationExtraArgs:
    """Binds the arguments of an update that this optimizer takes."""
    is_adjustable = isinstance(optimizer, Adjustable)
    if hyper_params and not is_adjustable:
        raise ValueError(
            f"Cannot set {list(hyper_params)}: the optimizer of this group is not an OptimizerDef."
        )
    names = OPTAX_ARGUMENTS.union(optimizer.known if is_adjustable else names_of(state))
    arguments = {name: value for name, value in extra.items() if name in names}
    if is_adjustable:
        arguments["hyper_params"] = hyper_params
    update = functools.partial(with_arguments(optimizer).update, **arguments)
    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _is_selected(filter: Filter) -> bool:
    return isinstance(filter, Selection) or is_nnx_filter(filter)


# The state of parameters in no group.
_REST = optax.MaskedState(optax.EmptyState())


def _of_groups(state: PyTree) -> tuple[OptState, ...]:
    return tuple(state.inner_states.values())[:-1]


def _partition(
    optimizers: Sequence[optax.GradientTransformation], labels: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Applies optimizers by index; parameters labeled `len(optimizers)` do not change."""
    return optax.partition(dict(enumerate([*optimizers, optax.set_to_zero()])), labels)

"""Roles: which columns of a mapping are the inputs, the targets and the weights of a batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flaxfit.data._batch import TARGET_NAMES, Batch, fields_by_part, is_given, parts_of
from flaxfit.data._fit_arguments import as_arrays
from flaxfit.data._sample_weights import by_output, is_list_of_weights
from flaxfit.tree import Data, PyTree, is_array, is_named

Names = str | Sequence[str] | Mapping[str, str] | None
"""One column, several in order, or columns by the argument names of the call."""

_NAME = "Name the columns, such as inputs='image', targets='label', in TrainTask, EvalTask or Model"


@dataclasses.dataclass(frozen=True)
class Roles:
    """Selects the columns of a batch or data set by name; ignores other columns.

    Items without names, such as `(x, y)`, are unchanged.

    >>> Roles(inputs="image", targets="label")({"image": [1.0], "label": [2], "id": ["a"]})
    (([1.0],), ([2],), None)

    Without names of columns, a mapping whose keys the call takes is keyword inputs. If another key
    would make that call fail, usual names identify targets and weights, as in a NamedTuple.

    >>> Roles(call=("x",))({"image": [1.0], "label": [2]})
    (([1.0],), ([2],), None)
    """

    inputs: Names = None
    """None: the columns that the model's call takes, else the only one without another role."""
    targets: Names = None
    """None: the column with a usual name, such as "label", if there is one."""
    weights: str | Mapping[str, str] | None = None
    call: tuple[str, ...] | None = None
    """The input names of the model's call; None: any, or unknown."""
    outputs: tuple[str, ...] = ()
    """The names of the outputs, in the order of a list of weights."""

    def check(self, owner: str) -> None:
        """Raises a `TypeError` for anything but names of columns."""
        for role in ("inputs", "targets", "weights"):
            given = getattr(self, role)
            if not (given is None or _are_names(given)) or (
                role == "weights" and isinstance(given, list | tuple)
            ):
                raise TypeError(
                    f"{owner}: {role} names the columns of a batch that are its {role}: a name, "
                    "several in order or a mapping {name in the call: column}; got "
                    f"{type(given).__name__}: {given!r:.60}"
                    + (". Pass data to data= or to fit." if role != "weights" else "")
                )

    def __call__(self, item: PyTree) -> PyTree:
        """Returns an item as `(inputs, targets, weights)`; unchanged if it has no columns.

        Raises:
          ValueError: a column is missing, the roles are ambiguous, or a list of weights does not
            have one entry per output.
        """
        found = self._split(item)
        parts = parts_of(found) if self.outputs else ()
        if len(parts) == 3 and is_list_of_weights(parts[2]):
            return (*parts[:2], by_output(parts[2], self.outputs))
        return found

    def _split(self, item: PyTree, *, has_targets: bool = True) -> PyTree:
        # Fast path: most items begin with an array and have no columns.
        first = item[0] if type(item) is tuple and item else item
        columns = None if type(first) is np.ndarray else self._columns_of(item)
        if columns is None:
            return item
        roles = self if self._has_names else self._by_usual_names(columns)
        targets = roles._targets_of(columns)
        inputs = roles._inputs_of(columns, targets)
        if not has_targets:
            return inputs, (), None
        return inputs, _taken("targets", targets, columns), _one("weights", roles.weights, columns)

    def inputs_of(self, item: PyTree) -> PyTree:
        """Returns only the inputs of an item; other columns may be missing."""
        return self._split(item, has_targets=False)

    def of_data_set(self, data: Data, *, has_targets: bool = True) -> Data:
        """Returns columns of arrays as `(inputs, targets, weights)`; other data is unchanged.

        Without targets, as for `predict`, it returns only the inputs. Later, batches of only inputs
        look like columns again, so named inputs keep the names of their columns.
        """
        batches = list if has_targets else (list, tuple)
        if isinstance(data, batches) or self._columns_of(data) is None:
            return data
        parts = self(data) if has_targets else self.inputs_of(data)
        inputs, targets, weights = map(_as_arrays, parts)
        if isinstance(self.inputs, Mapping) and not (is_given(targets) or is_given(weights)):
            inputs = {column: inputs[name] for name, column in self.inputs.items()}
        return (inputs, targets, weights) if has_targets else inputs

    @property
    def _has_names(self) -> bool:
        return not (self.inputs is self.targets is self.weights is None)

    def _columns_of(self, item: PyTree) -> Mapping[str, PyTree] | None:
        """Returns the columns of an item, or None if it has no columns that need roles."""
        if isinstance(item, Batch):
            return None
        is_sequence = isinstance(item, list | tuple) and not is_named(item)
        # The items of an `ArrayStream` are pairs.
        is_alone = is_sequence and item and not any(map(is_given, item[1:]))
        given: Any = item[0] if is_alone else item
        if self._has_names and is_named(given):
            return given._asdict()
        if self._has_names and is_array(given) and hasattr(given, "columns"):  # pandas, polars.
            return {name: given[name] for name in given.columns}
        if not isinstance(given, Mapping) or self._has_names:
            return given if isinstance(given, Mapping) else None
        is_split = len(parts_of(given)) > 1
        if self.call is None or is_split or not all(isinstance(name, str) for name in given):
            return None
        return given if given.keys() - {*self.call} else None

    def _by_usual_names(self, columns: Mapping[str, PyTree]) -> "Roles":
        """Finds roles by usual names, for columns that the model's call does not take."""
        call = self.call or ()
        others = tuple(name for name in columns if name not in call)
        has_inputs = len(others) < len(columns)
        found = fields_by_part(("inputs", *others) if has_inputs else others)
        if found is None:
            raise ValueError(
                f"Cannot tell the roles of the columns {_list(columns)} of a batch: the call of "
                f"the model takes {_list(call)}. {_NAME}; columns without a role are ignored."
            )
        inputs, targets, weights = found
        return dataclasses.replace(
            self, inputs=None if has_inputs else inputs, targets=targets or (), weights=weights
        )

    def _targets_of(self, columns: Mapping[str, PyTree]) -> Names:
        if self.targets is not None:
            return self.targets
        taken = (self.call or ()) if self.inputs is None else _columns_in(self.inputs)
        taken = {*taken, *_columns_in(self.weights)}
        found = [n for n in columns if str(n).lower() in TARGET_NAMES and n not in taken]
        if len(found) > 1:
            raise ValueError(
                f"Cannot tell which of the columns {_list(found)} are the targets. {_NAME}; "
                "targets=() for none."
            )
        return tuple(found)

    def _inputs_of(self, columns: Mapping[str, PyTree], targets: Names) -> PyTree:
        """Returns the inputs, by name if the model's call has these names."""
        if self.inputs is not None:
            return _taken("inputs", self.inputs, columns)
        taken = {*_columns_in(targets), *_columns_in(self.weights)}
        others = [name for name in columns if name not in taken]
        named = {name: columns[name] for name in others if name in (self.call or ())}
        if named:
            return named
        if len(others) != 1:
            takes = "" if self.call is None else f"; the call of the model takes {_list(self.call)}"
            raise ValueError(
                f"Cannot tell which of the columns {_list(others)} are inputs{takes}. {_NAME}."
            )
        return (columns[others[0]],)


NO_ROLES = Roles()
"""Returns every item unchanged."""


def _taken(role: str, names: Names, columns: Mapping[str, PyTree]) -> Any:
    """Returns the columns of a role: in order, or inputs by name."""
    if isinstance(names, Mapping):
        found = _one(role, names, columns)
        return found if role == "inputs" else (found,)
    return tuple(_one(role, name, columns) for name in _columns_in(names))


def _one(role: str, name: Any, columns: Mapping[str, PyTree]) -> PyTree:
    if isinstance(name, Mapping):
        return {given: _one(role, each, columns) for given, each in name.items()}
    if name is None or name in columns:
        return None if name is None else columns[name]
    raise ValueError(
        f"A batch lacks the column {name!r}, which the task names in its {role}: the batch has "
        f"{_list(columns)}."
    )


def _columns_in(names: Names) -> tuple[str, ...]:
    if names is None or isinstance(names, str):
        return () if names is None else (names,)
    return tuple(names.values()) if isinstance(names, Mapping) else tuple(names)


def _are_names(given: object) -> bool:
    if isinstance(given, Mapping):
        return all(isinstance(name, str) for pair in given.items() for name in pair)
    return isinstance(given, str) or (
        isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)
    )


def _as_arrays(part: PyTree) -> PyTree:
    """Converts the columns of a part to arrays; a column may be a list of numbers."""
    if part is None or not isinstance(part, tuple):
        return None if part is None else as_arrays(part)
    found = tuple(map(as_arrays, part))
    return found[0] if len(found) == 1 and is_array(found[0]) else found


def _list(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"

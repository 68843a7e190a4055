"""CheckpointTranslator: rules that rename, change or drop the arrays of a checkpoint."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from flaxfit.tree import ArrayLike, Function

Rule: TypeAlias = Callable[..., tuple[str | None, ArrayLike] | None]


@dataclasses.dataclass(frozen=True)
class Translation:
    """The result of applying rules: arrays by new name, their old names, and the problems."""

    values: Mapping[str, ArrayLike]
    sources: Mapping[str, str]
    dropped: list[str]
    unmatched: list[str]
    collisions: Mapping[str, list[str]]

    def problems(self, strict: bool = True) -> list[str]:
        """Lists the problems that prevent the use of the translation, one per line."""
        lines = [f"{name}: no rule matches this name" for name in self.unmatched if strict]
        lines += [f"{' and '.join(olds)} all become {new}" for new, olds in self.collisions.items()]
        return lines


class CheckpointTranslator:
    r"""Translates the names, and if needed the values, of a checkpoint by rules.

    A rule is a function of `(opts, name, value, *groups)` with a regular expression that must match
    a whole name; the groups are those of the expression. It returns the new name and value, or None
    to drop the array. The first rule that matches wins; a name that no rule matches is an error.
    Values may be lazy: `T`, `reshape`, `transpose` and `astype` are then applied when they are
    read.

    >>> translator = CheckpointTranslator()
    >>> @translator.add(r"fc(\d+)\.weight")
    ... def kernel(opts, name, value, number):
    ...     return f"Dense_{number}/kernel", value.T
    >>> @translator.add(r".*\.num_batches_tracked")
    ... def drop(opts, name, value):
    ...     return None
    >>> checkpoint = {"fc0.weight": np.ones((2, 3)), "bn.num_batches_tracked": np.array(9)}
    >>> translator.dry_run(checkpoint)
    fc0.weight              -> Dense_0/kernel  (3, 2)  float64
    bn.num_batches_tracked  -> dropped
    >>> {name: value.shape for name, value in translator.apply(checkpoint).items()}
    {'Dense_0/kernel': (3, 2)}
    """

    def __init__(self) -> None:
        self.rules: list[tuple[re.Pattern[str], Rule]] = []
        self._last_steps: list[Function] = []
        self._inverse: CheckpointTranslator | None = None

    def add(self, pattern: str) -> Callable[[Rule], Rule]:
        """Decorates the rule for names that the pattern matches as a whole.

        >>> @translator.add("scale")
        ... def scale(opts, name, value):
        ...     return "norm/scale", value
        """

        def register(rule: Rule) -> Rule:
            self.rules.append((re.compile(pattern), rule))
            return rule

        return register

    def add_last_step(self, function: Function) -> Function:
        """Decorates a function `(opts, values) -> values` that is called after all rules.

        It gets the results of all rules, for decisions that need more than one array.

        >>> tied = CheckpointTranslator()
        >>> @tied.add_last_step
        ... def tie(opts, values):
        ...     return {**values, "head": values["embedding"]}
        """
        self._last_steps.append(function)
        return function

    @property
    def inverse(self) -> "CheckpointTranslator":
        """The translator for the opposite direction, with its own rules.

        `@translator.inverse.add(...)` adds a rule that undoes another rule;
        `translator.inverse.apply(...)` restores the old names, for export.
        """
        if self._inverse is None:
            self._inverse = CheckpointTranslator()
            self._inverse._inverse = self
        return self._inverse

    def apply(self, checkpoint: Mapping[str, ArrayLike], **opts: object) -> dict[str, ArrayLike]:
        """Translates a checkpoint.

        >>> translator.apply(checkpoint)["Dense_0/kernel"].shape
        (3, 2)

        Args:
          checkpoint: arrays, lazy or not, by name.
          **opts: passed to every rule, as one dict.

        Raises:
          ValueError: lists names that no rule matches, and names that become the same.
        """
        translation = self.translate(checkpoint, **opts)
        raise_problems(translation.problems(), "translate the checkpoint")
        return dict(translation.values)

    def dry_run(self, checkpoint: Mapping[str, ArrayLike], **opts: object) -> None:
        """Prints a table of old name, new name, shape and dtype, without reading arrays.

        >>> translator.dry_run({"fc1.weight": np.ones((2, 3))})
        fc1.weight  -> Dense_1/kernel  (3, 2)  float64
        """
        translation = self.translate(checkpoint, **opts)
        sources = translation.sources
        shown = [
            (sources.get(new, "(added)"), new, str(np.shape(value)), _dtype(value))
            for new, value in translation.values.items()
        ]
        shown += [(name, "dropped", "", "") for name in translation.dropped]
        shown += [(name, "no rule matches", "", "") for name in translation.unmatched]
        shown += [
            (old, f"{new} (taken)", "", "")
            for new, olds in translation.collisions.items()
            for old in olds[1:]
        ]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for cells in shown:
            old, *rest = (c.ljust(width) for c, width in zip(cells, widths, strict=True))
            print(f"{old}  -> {'  '.join(rest)}".rstrip())

    def translate(self, checkpoint: Mapping[str, ArrayLike], **opts: object) -> Translation:
        """Translates a checkpoint, and returns problems instead of raising them.

        >>> translator.translate({"fc1.bias": np.ones(2)}).unmatched
        ['fc1.bias']
        """
        values, olds_of, dropped, unmatched = {}, {}, [], []
        options = _Options(opts)
        for name, value in checkpoint.items():
            found = ((rule, pattern.fullmatch(name)) for pattern, rule in self.rules)
            rule, match = next(((r, m) for r, m in found if m), (None, None))
            if rule is None or match is None:
                unmatched.append(name)
                continue
            new_name, new_value = _renamed(rule, options, name, value, match)
            if new_name is None:
                dropped.append(name)
                continue
            olds_of.setdefault(new_name, []).append(name)
            values.setdefault(new_name, new_value)
        collisions = {new: olds for new, olds in olds_of.items() if len(olds) > 1}
        # The last steps may rename arrays: find their old names by object identity.
        origins = {id(value): olds_of[new][0] for new, value in values.items()}
        result = dict(values)
        for step in self._last_steps:
            result = dict(step(options, result))
        sources = {new: origins[id(v)] for new, v in result.items() if id(v) in origins}
        return Translation(result, sources, dropped, unmatched, collisions)


class _Options(dict[str, object]):
    """The options of rules; a missing option raises a clear error."""

    def __missing__(self, name: str) -> object:
        raise ValueError(
            f"The translator needs the option {name!r}, which was not given: pass {name}=... along "
            "with the translator."
        )


def _renamed(
    rule: Rule, options: Mapping[str, object], name: str, value: ArrayLike, match: re.Match[str]
) -> tuple[str | None, ArrayLike]:
    found = rule(options, name, value, *match.groups())
    if found is None:
        return None, None
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not is_pair or not isinstance(found[0], str | None):
        raise TypeError(
            f"The rule for {match.re.pattern!r} must return a pair of the new name and the value, "
            f"or None to drop the array, got {found!r:.60} for {name}."
        )
    return found


def raise_problems(problems: list[str], task: str) -> None:
    """Raises one `ValueError` that lists all problems, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {line}" for line in problems)
        raise ValueError(
            f"Cannot {task} ({count}):{lines}\nAdd or correct rules of the translator (one that "
            "returns None drops an array), or build the model of the checkpoint."
        )


def _dtype(value: ArrayLike) -> str:
    return str(getattr(value, "dtype", type(value).__name__))

"""Which arrays of a file a model takes over, by path patterns, when it takes not all of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flaxfit.checkpoints._compare import check_fits
from flaxfit.checkpoints._tree import Description, describe
from flaxfit.display import say
from flaxfit.tree._paths import match
from flaxfit.tree._types import Json


def chosen(
    on_disk: Mapping[str, Description],
    here: Mapping[str, Json],
    patterns: str | Sequence[str],
    source: Any,
    in_model: Callable[[str], str | None],
) -> list[str]:
    """The names of the weights that the patterns choose; says what is taken and what is kept.

    Args:
      on_disk: descriptions of the file's arrays by name.
      here: the template's leaves by name.
      patterns: regular expressions, each for the whole of a path within the model.
      source: the name of the file, for the messages.
      in_model: gives the path within the model that a name stands for; None: it is no weight.

    Raises:
      ValueError: a pattern matches nothing, what matches differs, or what is to be kept is not
        there.
    """
    rules = [(pattern, pattern) for pattern in _compiled(patterns)]
    names = {name: path for name in {**on_disk, **here} if (path := in_model(name)) is not None}
    matches = {name: match(rules, path) for name, path in names.items()}
    for pattern, _ in rules:
        if not any(re.fullmatch(pattern, path) for path in names.values()):
            known = sorted({path.split("/")[0] for path in names.values()})
            raise ValueError(
                f"partial={pattern!r} matches no weight of {source}, nor of the target. Paths "
                f"within the model begin with {', '.join(known)}."
            )
    check_fits(
        {name: description for name, description in on_disk.items() if matches.get(name)},
        {name: describe(leaf) for name, leaf in here.items() if matches.get(name)},
        source,
        advice="Change partial=, which chose these, or the model.",
    )
    kept = [name for name in here if not matches.get(name)]
    absent = [name for name in kept if isinstance(here[name], jax.ShapeDtypeStruct)]
    if absent:
        raise ValueError(
            f"partial= does not cover {', '.join(absent)}, and the target only describes them. "
            "Pass a target that holds values, or more patterns."
        )
    taken = [name for name in here if matches.get(name)]
    weights = [name for name in kept if name in names]
    say(
        f"took {len(taken)} of {len(taken) + len(weights)} weights from {source}; kept "
        f"{_few([names[name] for name in weights]) or 'none'}"
    )
    return taken


def path_in_state(name: str) -> str | None:
    """The path within the model that the name of a leaf of a state stands for; None: no weight.

    Parameters and running statistics of the same module have the same one.

    >>> path_in_state("params/encoder/kernel"), path_in_state("opt_state/0/mu/encoder/kernel")
    ('encoder/kernel', None)
    >>> path_in_state("model_state/batch_stats/encoder/mean")
    'encoder/mean'
    """
    found = re.fullmatch("(params|model_state/[^/]+)/(.*)", name, re.DOTALL)
    return found and found[2]


def path_in_variables(name: str) -> str | None:
    """The same for the name of a leaf of variables, which begins with that of a collection.

    >>> path_in_variables("batch_stats/encoder/mean")
    'encoder/mean'
    """
    return name.partition("/")[2] or None


def _compiled(patterns: str | Sequence[str]) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ValueError("partial= names no pattern, so nothing would be read.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"partial={pattern!r} is not a regular expression: {error}."
            ) from error
    return patterns


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown

"""as_patterns: converts NNX filters to patterns of paths."""

import re
from collections.abc import Iterable
from typing import Any

from flaxfit.modules._switch import handle_of
from flaxfit.tree import Selection


def as_patterns(
    name: str, given: Any, apply: object, *, collection: str | None = "params"
) -> tuple[str, ...]:
    """Replaces NNX filters by patterns of the paths that they select; patterns stay.

    >>> as_patterns("freeze", "encoder/.*", None)
    ('encoder/.*',)

    A filter is a type of variables, one such as `nnx.All(...)`, or a predicate of a path tuple and
    a variable. It selects from a collection of the module of `apply`; None: from all of them.
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    several: Any = [given] if is_one else given
    patterns: list[str] = []
    for each in several:
        if callable(each) or each is ... or isinstance(each, Selection):
            patterns.append(select(name, each, apply, collection=collection))
            continue
        try:
            re.compile(each)
        except (TypeError, re.error) as error:
            raise ValueError(
                f"{name} takes patterns of the paths of parameters, such as 'encoder/.*', or NNX "
                f"filters, such as nnx.LoRAParam, got {given!r}: {error}."
            ) from None
        patterns.append(each)
    return tuple(patterns)


def select(name: str, filter: Any, apply: object, *, collection: str | None) -> Selection:
    """Returns the pattern of the paths that an NNX filter selects; see `as_patterns`.

    A `Selection` of another module is resolved again for this one.
    """
    if isinstance(filter, Selection):
        if filter.filter is None or filter.apply is apply:
            return filter
        filter = filter.filter
    label = getattr(filter, "__name__", None) or repr(filter)
    handle = handle_of(apply)
    if handle is None or handle.paths is None:
        raise TypeError(
            f"{name}: {label} is a filter of NNX variables, and the model is not an NNX module. "
            "Give patterns of paths, such as 'encoder/.*'."
        )
    found = handle.paths(filter)
    own = [path.partition("/") for path in found]
    chosen = [
        path
        for (kind, _, path), is_selected in zip(own, found.values(), strict=True)
        if is_selected and collection in (None, kind)
    ]
    if not chosen:
        what = "variable" if collection is None else "parameter"
        listed = "".join(f"\n  {path}" for path in [*found][:50])
        raise ValueError(f"{name}: {label} selects no {what}. The variables are:{listed}")
    return Selection(f"(?:{'|'.join(map(re.escape, chosen))})", label, filter, apply)

"""Selection: the pattern of paths that a filter by type selects, and the filter's name."""

import sys
from typing import Any


class Selection(str):
    """A pattern of the paths that an NNX filter selects; `label` is the name of the filter.

    `filter`, and the `apply` of the module that it was resolved for, may be lambdas: not pickled.
    """

    label: str
    filter: Any
    apply: Any

    def __new__(
        cls, pattern: str, label: str, filter: Any = None, apply: Any = None
    ) -> "Selection":
        made = super().__new__(cls, pattern)
        made.label, made.filter, made.apply = label, filter, apply
        return made

    def __repr__(self) -> str:
        return self.label

    def __reduce__(self) -> tuple[type["Selection"], tuple[str, str]]:
        return Selection, (str(self), self.label)


def label_of(pattern: object) -> str:
    """Returns the name of a pattern for messages: itself, or the name of its filter.

    >>> label_of("encoder/.*"), label_of(Selection("a|b", "LoRAParam"))
    ('encoder/.*', 'LoRAParam')
    """
    return str(getattr(pattern, "label", pattern))


def is_nnx_filter(given: object) -> bool:
    """Returns whether this is an NNX variable type, or a filter such as `nnx.All(...)`."""
    # A user of NNX has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    if isinstance(given, type):
        return issubclass(given, nnx.Variable)
    return given is ... or type(given).__module__ == "flax.nnx.filterlib"

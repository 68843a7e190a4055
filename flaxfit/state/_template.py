"""TemplateOf: what to read a checkpoint into, where that depends on what it records."""

import dataclasses
from collections.abc import Callable

from flaxfit.state._train_state import TrainState
from flaxfit.tree import Json


@dataclasses.dataclass(frozen=True)
class TemplateOf:
    """Makes the template of a checkpoint from its `running` record.

    >>> TemplateOf(lambda running: running["template"]).make({"template": None}) is None
    True
    """

    make: Callable[[Json], TrainState]

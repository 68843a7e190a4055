"""StepName: the names of steps by a template, such as "{epoch:02d}-{val_loss:.2f}"."""

import math
import re
import string
from typing import Any

from flaxfit.checkpoints import _folder
from flaxfit.display import is_scalar
from flaxfit.metrics._monitor import Monitor
from flaxfit.state import Checkpoint

_LONGEST = 200  # Bytes. File systems allow 255, including the number of the step.


class StepName:
    """Names the folder of a step: its number, and with a template "@" and the filled template.

    >>> name = StepName("{epoch:02d}-{loss:.2f}")
    >>> name(Checkpoint(step=120, state=None, metrics={"loss": 0.251}, epoch=2))
    '120@03-0.25'

    Args:
      template: its fields are "step", "epoch" (from 1) and metrics; None: the number alone.

    Raises:
      ValueError: the template has a field without a name, a format that numbers do not have, or
        a part of a path.
    """

    def __init__(self, template: str | None):
        self._parts = [] if template is None else _parsed(template)
        self._fields = {field for _, field, _ in self._parts if field is not None}
        words = "CheckpointFileWriter", "name steps by", "Use one of these in name=."
        metrics = self._fields - {"step", "epoch"}
        self._metrics = {field: Monitor(field, "min", *words) for field in metrics}

    def attach(self, loop: Any, writer: object) -> None:
        """Checks that the checkpoints of a loop have the fields."""
        if "epoch" in self._fields and getattr(loop, "fit_call", None) is None:
            raise ValueError(_NO_EPOCH)
        for metric in self._metrics.values():
            metric.attach(loop, writer)

    def __call__(self, checkpoint: Checkpoint) -> str:
        """Returns the name of the folder of a checkpoint."""
        filled = "".join(
            literal + ("" if field is None else format(self._value(field, checkpoint), form))
            for literal, field, form in self._parts
        )
        cut = filled.encode()[:_LONGEST].decode(errors="ignore")
        return _folder.step_name(checkpoint.step, cut)

    def _value(self, field: str, checkpoint: Checkpoint) -> float:
        if field == "step":
            return int(checkpoint.step)
        if field == "epoch":
            if checkpoint.epoch is None:
                raise ValueError(_NO_EPOCH)
            return checkpoint.epoch + 1
        if not is_scalar(checkpoint.metrics.get(field, 0.0)):
            raise ValueError(
                f"CheckpointFileWriter cannot name steps by {field!r}: it is not a single number."
            )
        if field not in checkpoint.metrics and checkpoint.sums is not None:  # Within an epoch.
            return math.nan
        value = self._metrics[field].read(checkpoint)
        return math.nan if value is None else value


_NO_EPOCH = (
    "CheckpointFileWriter cannot name steps by 'epoch', which only fit has: use {step} in name=."
)


def _parsed(template: str) -> list[tuple[str, str | None, str]]:
    """Splits a template into text, the name of a field or None, and its format."""
    parts = []
    try:
        if not template:
            raise ValueError("it is empty")
        for literal, field, form, conversion in string.Formatter().parse(template):
            if field is not None and (conversion or not field or field.isdigit()):
                raise ValueError("a field is written {name} or {name:format}")
            if any(sign in "/\\" or not sign.isprintable() for sign in literal + (form or "")):
                raise ValueError("it is the name of a folder, not a path")
            if any(int(number) > _LONGEST for number in re.findall(r"\d+", form or "")):
                raise ValueError(f"a width is at most {_LONGEST}")
            if field is not None:
                format(1 if field in ("step", "epoch") else 0.5, form or "")
            parts.append((literal, field, form or ""))
    except ValueError as error:
        raise ValueError(f"name={template!r} is not a template of names: {error}.") from None
    return parts

"""Text in the output of a notebook's cell that is changed in place and leaves no trace."""

from collections.abc import Callable
from typing import Any

# Empty text is an empty line, or an empty box; empty HTML is nothing.
_NOTHING = {"text/plain": "", "text/html": ""}


def passing(text: str = "") -> Callable[[str], None]:
    """Shows text at the end of a cell's output; returns what changes it, or removes it by ""."""
    from IPython import display as ipython  # A notebook has it.

    def data(text: str) -> dict[str, str]:
        return {"text/plain": text} if text.strip() else _NOTHING

    cell: Any = ipython.display(data(text), raw=True, display_id=True)
    return lambda text: cell.update(data(text), raw=True)

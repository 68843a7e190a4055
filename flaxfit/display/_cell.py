"""Text in a notebook cell's output that changes in place and disappears at the end."""

from collections.abc import Callable
from typing import Any

# Empty text would show an empty line or box; empty HTML shows nothing.
_NOTHING = {"text/plain": "", "text/html": ""}


def passing(text: str = "") -> Callable[[str], None]:
    """Shows text in a cell's output; returns a function that changes it, or removes it by ""."""
    from IPython import display as ipython  # A notebook has it.

    def data(text: str) -> dict[str, str]:
        return {"text/plain": text} if text.strip() else _NOTHING

    cell: Any = ipython.display(data(text), raw=True, display_id=True)
    return lambda text: cell.update(data(text), raw=True)

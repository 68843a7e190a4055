"""What notebooks show: pieces of HTML with nothing to run in them, in the colours of the page."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxfit.display import count, plural, size
from flaxfit.tree._paths import flat
from flaxfit.tree._types import ArrayLike, Json, PyTree

_MOST_ROWS = 200
"""A table of arrays has no more rows, however many layers the model has."""
# Pages outside of Jupyter have no room of their own between the cells, or put tables in the middle.
_TABLE = '<table cellpadding="5" style="margin:0.5em 0">'


def card(title: str, facts: Iterable[str], *parts: str) -> str:
    """A title and a line of facts, both text, above parts that are HTML already.

    >>> card("a < b", ["1 step", "", "2 devices"], "<p/>")
    '<div><b>a &lt; b</b><br/><small style="opacity:0.65">1 step · 2 devices</small><p/></div>'
    """
    line = html.escape(" · ".join(filter(None, facts)))
    head = f'<b>{html.escape(title)}</b><br/><small style="opacity:0.65">{line}</small>'
    return f"<div>{head}{''.join(parts)}</div>"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of texts.

    >>> table([["loss", "0.5"]], head=["", "last"])
    '...<tr><th></th><th>last</th></tr><tr><td>loss</td><td>0.5</td></tr></table>'
    """
    lines = [_row(head, "th")] if head else []
    content = "".join([*lines, *(_row(row, "td") for row in rows)])
    return f"{_TABLE}{content}</table>"


def arrays(title: str, tree: PyTree, axes: Mapping[str, Any] | None = None) -> str:
    """The paths, dtypes and shapes of the arrays of a tree, below a title that unfolds them.

    Args:
      title: what they are ("params"), and the beginning of their paths in `axes`.
      tree: a pytree; of arrays that are read only when asked for, none is read.
      axes: the names of the dimensions of some arrays, by path.

    >>> arrays("params", {})
    ''
    """
    leaves = flat(tree)
    if not leaves:
        return ""
    rows = []
    for path, leaf in list(leaves.items())[:_MOST_ROWS]:
        row = [path, str(getattr(leaf, "dtype", type(leaf).__name__)), str(_shape(leaf))]
        if axes:
            row.append(", ".join(map(str, axes.get(f"{title}/{path}", ()))))
        rows.append(row)
    head = ["path", "dtype", "shape", "axes"][: len(rows[0])]
    more = len(leaves) - len(rows)
    rest = f"<small>and {plural(more, 'more array')}</small>" if more else ""
    summary = f"{title}: {plural(n_numbers(tree), 'number')} in {plural(len(leaves), 'array')}"
    return f"<details><summary>{html.escape(summary)}</summary>{table(rows, head)}{rest}</details>"


def of_state(state: PyTree) -> str:
    """A training or an inference state: its facts, and its arrays by field."""
    fields = ("params", "model_state", "opt_state")
    trees = {name: getattr(state, name, {}) for name in fields}
    facts = [f"{count(n_numbers(state.params))} params"]
    facts += [f"{name} {size(_n_bytes(tree))}" for name, tree in trees.items() if flat(tree)]
    try:
        title = f"{type(state).__name__} at step {count(int(state.step))}"
    except (TypeError, RuntimeError):  # It is abstract, or was donated.
        title = type(state).__name__
    return card(title, facts, *(arrays(name, tree, state.axes) for name, tree in trees.items()))


def of_model(
    name: str,
    state: PyTree,
    *,
    step: int,
    metrics: Iterable[str],
    devices: Sequence[Any],
    history: Json,
) -> str:
    """A model: what it is made of, how far it was trained, and its state, where it has one."""
    named = ", ".join(metrics)
    facts = [f"metrics {named}"] if named else []
    facts.append(plural(len(devices), f"{devices[0].platform} device"))
    if state is None:
        facts.append("no weights yet: call fit or load")
        return card(name, facts)
    facts = [f"{count(n_numbers(state.params))} params", *facts]
    parts = [] if history is None else [history._repr_html_()]
    trees = {"params": state.params, "model_state": state.model_state}
    parts += [arrays(part, tree, state.axes) for part, tree in trees.items()]
    return card(f"{name} at step {count(step)}", facts, *parts)


def n_numbers(tree: PyTree) -> int:
    """How many numbers the arrays of a tree hold together."""
    return sum(math.prod(_shape(leaf)) for leaf in flat(tree).values())


def _n_bytes(tree: PyTree) -> int:
    return sum(
        math.prod(_shape(leaf)) * getattr(getattr(leaf, "dtype", None), "itemsize", 8)
        for leaf in flat(tree).values()
    )


def _shape(leaf: ArrayLike) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

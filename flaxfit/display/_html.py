"""Static HTML for notebooks, in the colors of the page."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

import jax

from flaxfit.display._numbers import count, plural, size
from flaxfit.tree import ArrayLike, Device, Json, PyTree, flat

_MOST_ROWS = 200  # In a table of arrays.
# Outside Jupyter, pages may put no space between cells, or center tables.
_TABLE = '<table cellpadding="5" style="margin:0.5em 0">'


def card(title: str, facts: Iterable[str], *parts: str) -> str:
    """Puts a title and a line of facts, both text, above parts in HTML."""
    line = html.escape(" · ".join(filter(None, facts)))
    head = f'<b>{html.escape(title)}</b><br/><small style="opacity:0.65">{line}</small>'
    return f"<div>{head}{''.join(parts)}</div>"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Makes a table of texts."""
    lines = [_row(head, "th")] if head else []
    content = "".join([*lines, *(_row(row, "td") for row in rows)])
    return f"{_TABLE}{content}</table>"


def arrays(title: str, tree: PyTree, axes: Mapping[str, Iterable[object]] | None = None) -> str:
    """Lists paths, dtypes and shapes of the arrays of a tree below a title that unfolds them.

    `axes` has names of dimensions by path, beginning with the title. Lazy arrays are not read.
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
    """Shows the facts of a training or inference state, and its arrays by field."""
    fields = ("params", "model_state", "opt_state")
    trees = {name: getattr(state, name, {}) for name in fields}
    facts = [f"{count(n_numbers(state.params))} params"]
    facts += [f"{name} {size(_n_bytes(tree))}" for name, tree in trees.items() if flat(tree)]
    step, title = step_of(state), type(state).__name__
    title += "" if step is None else f" at step {count(step)}"
    return card(title, facts, *(arrays(name, tree, state.axes) for name, tree in trees.items()))


def step_of(state: PyTree) -> int | None:
    """Returns the step of a state; None if it is abstract or was donated."""
    try:
        return int(state.step)
    except (TypeError, RuntimeError):
        return None


def of_model(
    name: str,
    state: PyTree,
    *,
    step: int,
    metrics: Iterable[str],
    devices: Sequence[Device],
    history: Json,
) -> str:
    """Shows the facts of a model, its history, and the arrays of its state, if it has one."""
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
    """Returns the total number of elements in a tree."""
    return sum(math.prod(_shape(leaf)) for leaf in jax.tree.leaves(tree))


def _n_bytes(tree: PyTree) -> int:
    return sum(
        math.prod(_shape(leaf)) * getattr(getattr(leaf, "dtype", None), "itemsize", 8)
        for leaf in flat(tree).values()
    )


def _shape(leaf: ArrayLike) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

"""A table of a model's layers: output shapes, numbers of parameters, and what is trained."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import linen as nn

from flaxfit.data._batch import call
from flaxfit.modules._layers import Layer, layers_of
from flaxfit.modules._switch import functions_of
from flaxfit.tree import PyTree, Variables, flat, match, shapes_of, single_replica_of_any_axis

_WIDTH, _GAP = 80, "  "
_LONGEST_SHAPE = 30


def summarize(
    module: Any,
    inputs: PyTree,
    *,
    name: str | None = None,
    variables: Variables | None = None,
    freeze: Sequence[str] = (),
    rngs: Sequence[str] = (),
    count_flops: Callable[..., float] | None = None,
) -> str:
    """Makes a table of a module's layers with their output shapes and numbers of parameters.

    The parameters of a layer do not include those of nested layers. No line is longer than 80
    columns.

    >>> print(summarize(nn.Dense(3), (jax.ShapeDtypeStruct((1, 2), "float32"),)))
    Dense · 9 params
    <BLANKLINE>
    layer  output  params
    Dense  (1, 3)       9  trained
    <BLANKLINE>
    9 trained · 0 frozen

    Args:
      module: a Linen or NNX module.
      inputs: the model's inputs, a tuple or a dict; only shapes and dtypes matter.
      name: what to call the module; None: its class.
      variables: its variables by collection; None: initializes them for these inputs.
      freeze: patterns of the parameters that are not trained.
      rngs: the random streams that a call in evaluation draws from.
      count_flops: returns the floating-point operations of `(function, *shapes)`; adds the number
        for a call with these inputs to the table.

    Raises:
      TypeError: the model is a pair of functions, which has no layers to show.
    """
    if isinstance(module, tuple):
        raise TypeError("summary() shows the layers of a Linen or NNX module, not of functions.")
    functions = functions_of(module, train=False)
    shapes = shapes_of(inputs)
    streams = {"params", "dropout", *rngs} if isinstance(module, nn.Module) else set(rngs)
    key = jax.random.key(0)
    if variables is None:
        keys = dict.fromkeys(streams | {"params", "dropout"}, key)
        init = single_replica_of_any_axis(functions.init)
        variables = jax.eval_shape(lambda inputs: call(init, keys, inputs), shapes)

    def evaluate(variables: PyTree, inputs: PyTree) -> PyTree:
        keys = dict.fromkeys(streams, key) or None
        return call(single_replica_of_any_axis(functions.apply), variables, inputs, rngs=keys)

    held: dict[str, PyTree] = dict(shapes_of(variables))
    layers, output = layers_of(module, evaluate, held, shapes)
    kind = layers[0].kind if layers else type(module).__name__
    if not layers or layers[0].path:
        layers.insert(0, Layer("", kind, output))
    name = name or kind
    sizes = {path: math.prod(leaf.shape) for path, leaf in flat(held.get("params", {})).items()}
    frozen = {path for path in sizes if match([(each, True) for each in freeze], path)}
    n, n_frozen = sum(sizes.values()), sum(sizes[path] for path in frozen)
    others = {c: _size(tree) for c, tree in held.items() if c != "params"}
    ends = [f"{n - n_frozen:,} trained", f"{n_frozen:,} frozen"]
    ends += [f"{size:,} in {c}" for c, size in others.items() if size and not c.endswith("_axes")]
    lines = [f"{name} · {n:,} params", "", *_rows(layers, sizes, frozen), "", *_joined(ends)]
    flops = count_flops(evaluate, held, shapes) if count_flops is not None else math.nan
    if math.isfinite(flops):
        n_rows = next((x.shape[0] for x in jax.tree.leaves(shapes) if x.shape), 1)
        lines.append(f"forward pass: {_amount(flops)}FLOP for a batch of {n_rows:,}")
    return "\n".join(lines)


def _rows(layers: Sequence[Layer], sizes: dict[str, int], frozen: set[str]) -> list[str]:
    """Returns the header, and a line for each layer with its own parameters."""
    own: dict[str, list[str]] = {layer.path: [] for layer in layers}
    for path in sizes:
        place = path
        while place not in own:
            place = place.rpartition("/")[0]
        own[place].append(path)
    cells = [("layer", "output", "params", "")]
    for layer in layers:
        n = sum(sizes[path] for path in own[layer.path])
        states = {path in frozen for path in own[layer.path]}
        word = {0: "", 1: "frozen" if True in states else "trained", 2: "partly"}[len(states)]
        cells.append((_title(layer, own), _shapes(layer.output), f"{n:,}" if n else "", word))
    shape, params, word = (max(len(row[i]) for row in cells) for i in (1, 2, 3))
    shape = min(shape, _LONGEST_SHAPE)
    room = _WIDTH - shape - params - word - 3 * len(_GAP)
    first = min(max(len(row[0]) for row in cells), room)
    return [
        _GAP.join(
            (f"{_cut(a, first):<{first}}", f"{_cut(b, shape):<{shape}}", f"{c:>{params}}", d)
        ).rstrip()
        for a, b, c, d in cells
    ]


def _title(layer: Layer, paths: Iterable[str]) -> str:
    """Returns the layer's name relative to its parent, with its class, indented by depth."""
    if not layer.path:
        return layer.kind
    holders = [path for path in paths if path and layer.path.startswith(f"{path}/")]
    name = layer.path.removeprefix(max(holders, key=len, default="")).removeprefix("/")
    title = name if name.startswith(f"{layer.kind}_") else f"{name} ({layer.kind})"
    return "  " * (len(holders) + 1) + title


def _shapes(output: PyTree) -> str:
    return ", ".join(str(tuple(leaf.shape)) for leaf in jax.tree.leaves(output))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _size(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape"))


def _joined(parts: Sequence[str]) -> list[str]:
    """Joins parts to lines that are not wider than the table."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], longer] if len(longer) <= _WIDTH else [*lines, part]
    return lines


def _amount(number: float) -> str:
    """Formats a number with 3 digits and an SI prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "

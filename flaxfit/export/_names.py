"""Names of inputs and outputs, for formats without nested ones."""

import re
from collections.abc import Mapping

import jax

from flaxfit.export._spec import Specs
from flaxfit.tree import PyTree, flat


def input_names(specs: Specs) -> list[str]:
    """Returns the names of a method's inputs, in the order of the leaves.

    >>> input_names((1,)), input_names((1, [2, 3])), input_names({"x": 1}), input_names(({"x": 1},))
    (['inputs'], ['inputs_0', 'inputs_1_0', 'inputs_1_1'], ['x'], ['x'])
    """
    only = specs[0] if isinstance(specs, tuple) and len(specs) == 1 else specs
    return _names(only, "inputs")


def output_names(outputs: PyTree) -> list[str]:
    """Returns the names of a method's outputs, in the order of the leaves.

    >>> output_names(1), output_names((1, 2)), output_names({"logits": 1, "state": [2]})
    (['outputs'], ['outputs_0', 'outputs_1'], ['logits', 'state_0'])
    """
    return _names(outputs, "outputs")


def from_names(specs: Specs, named: Mapping[str, PyTree]) -> PyTree:
    """Converts named inputs to the tree of inputs."""
    leaves = [named[name] for name in input_names(specs)]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


def _names(tree: PyTree, kind: str) -> list[str]:
    names = [re.sub(r"\W", "_", path.replace("/", "_")) or kind for path in flat(tree)]
    names = [f"{kind}_{name}" if name[0].isdigit() else name for name in names]
    if len(set(names)) < len(names):
        raise ValueError(f"Two {kind} would have the same name: {', '.join(names)}. Rename one.")
    return names

"""Labels out of range, met inside of a compiled step: counted there, refused when it is read."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from flaxfit.display import plural
from flaxfit.losses._checks import labels_for, out_of_range
from flaxfit.tree._types import ArrayLike

_PREFIX = "labels out of range: "


def count_labels(
    loss: Any, weights: ArrayLike, outputs_and_targets: tuple[Any, ...], of: str = ""
) -> dict[str, tuple[Any]]:
    """The number of labels that a loss does not take, by a name that says which it does.

    Examples of weight 0 may have any.

    >>> from flaxfit.losses import crossentropy
    >>> count_labels(crossentropy, jnp.ones(2), (jnp.ones((2, 3)), jnp.array([0, 3])))
    {'labels out of range: they must be 0..2 for 3 outputs': (Array(1., dtype=float32),)}

    Args:
      loss: the loss of a model, or of one of its outputs.
      weights: those of the examples.
      outputs_and_targets: what the loss is called with.
      of: the output that it is the loss of.
    """
    wrong = out_of_range(loss, *outputs_and_targets)
    labels = labels_for(loss, outputs_and_targets[0])
    if wrong is None or labels is None:
        return {}
    counts = weights.reshape(-1, *(1,) * (wrong.ndim - 1)) != 0
    of = f" (output {of!r})" if of else ""
    name = f"{_PREFIX}they must be {labels.allowed} for {labels.owner}{of}"
    return {name: (jnp.sum(wrong & counts, dtype=float),)}


def check_counts(sums: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The sums without the counts of labels, which must be 0.

    >>> check_counts({"a/labels out of range: they must be 0..2": (3,)}, " in step 7")
    Traceback (most recent call last):
    ValueError: Met 3 labels of task 'a' out of range in step 7: they must be 0..2. Correct ...

    Raises:
      ValueError: a step has met labels that are out of range.
    """
    rest = {}
    for name, value in sums.items():
        task, found, allowed = name.partition(_PREFIX)
        if not found:
            rest[name] = value
        elif n := int(value[0]):
            of_task = f" of task {task.removesuffix('/')!r}" if task else ""
            raise ValueError(
                f"Met {plural(n, 'label')}{of_task} out of range{where}: {allowed}. Correct the "
                "data, or give these examples a weight of 0. They were left out: the state is as "
                "if their loss were 0."
            )
    return rest

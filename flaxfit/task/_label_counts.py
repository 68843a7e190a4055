"""Labels out of range: counted in a compiled step, and refused when the counts are read."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxfit.display import plural
from flaxfit.losses import Loss
from flaxfit.losses._checks import labels_for, out_of_range
from flaxfit.tree import PyTree, Sums, which_count

_PREFIX = "labels out of range: "
_WEIGHTS = "weights that are none"


def count_labels(
    loss: Loss, weights: jax.Array, outputs_and_targets: tuple[PyTree, ...], of: str = ""
) -> dict[str, Sums]:
    """Counts invalid labels of nonzero weight, under a name that states the valid range.

    `of` is the name of the output, if there are several.
    """
    wrong = out_of_range(loss, *outputs_and_targets)
    labels = labels_for(loss, outputs_and_targets[0])
    if wrong is None or labels is None:
        return {}
    counts = which_count(weights, wrong.shape)
    of = f" (output {of!r})" if of else ""
    name = f"{_PREFIX}they must be {labels.allowed} for {labels.owner}{of}"
    return {name: (jnp.sum(wrong & counts, dtype=float),)}


def count_weights(weights: PyTree) -> dict[str, Sums]:
    """Counts the weights returned by a loss that are negative or not finite."""
    bad = [jnp.sum(~_is_weight(each), dtype=float) for each in jax.tree.leaves(weights)]
    return {_WEIGHTS: (sum(bad, jnp.zeros(())),)} if bad else {}


def valid_weights(weights: PyTree) -> PyTree:
    """Replaces invalid weights, which are negative or not finite, by 0."""
    return jax.tree.map(lambda each: jnp.where(_is_weight(each), each, 0), weights)


def check_counts(sums: Mapping[str, Sums], where: str = "") -> dict[str, Sums]:
    """Removes the counts of invalid labels and weights from sums, and checks that they are 0.

    >>> check_counts({"a/labels out of range: they must be 0..2": (3,)}, " in step 7")
    Traceback (most recent call last):
    ValueError: Found 3 labels of task 'a' out of range in step 7: they must be 0..2. Correct ...
    """
    rest = {}
    for name, value in sums.items():
        task, found, allowed = name.partition(_PREFIX)
        if name.endswith(_WEIGHTS):
            if n := int(value[0]):
                raise ValueError(
                    f"The loss returned {plural(n, 'weight')} that are negative, NaN or infinite"
                    f"{where}. They were left out: the state is as if they were 0."
                )
        elif not found:
            rest[name] = value
        elif n := int(value[0]):
            of_task = f" of task {task.removesuffix('/')!r}" if task else ""
            raise ValueError(
                f"Found {plural(n, 'label')}{of_task} out of range{where}: {allowed}. Correct the "
                "data, or give these examples a weight of 0. They were left out: the state is as "
                "if their loss were 0."
            )
    return rest


def _is_weight(weights: jax.Array) -> jax.Array:
    return (weights >= 0) & jnp.isfinite(weights)

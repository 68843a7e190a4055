"""Outputs in the form that metrics of classes take: scores, with the classes on the last axis."""

import jax
import jax.numpy as jnp

from flaxfit.tree import Array, Function, Sums


def arranged(measure: Function, name: str, num_classes: int | None, axis: int) -> Function:
    """Measures predicted labels as scores, and scores whose classes are on another axis."""
    if num_classes is None and axis == -1:
        return measure
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"The metric {name!r} has no num_classes={num_classes}: give 1 or more.")

    def measured(outputs: Array, targets: Array, *, weights: Array | None = None) -> Sums:
        outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
        is_labels = jnp.issubdtype(outputs.dtype, jnp.integer) and outputs.shape == targets.shape
        if num_classes is not None and is_labels:
            is_label = (outputs >= 0) & (outputs < num_classes)
            outputs = jnp.where(is_label[..., None], jax.nn.one_hot(outputs, num_classes), jnp.nan)
        elif axis != -1:
            is_onehot = outputs.shape == targets.shape
            outputs = jnp.moveaxis(outputs, axis, -1)
            targets = jnp.moveaxis(targets, axis, -1) if is_onehot else targets
        if num_classes is not None and outputs.shape[-1] != num_classes:
            raise ValueError(
                f"The metric {name!r} has num_classes={num_classes}, but got outputs of shape "
                f"{outputs.shape}: they need a score for each class on the last axis, or are "
                "integer labels of the shape of the targets."
            )
        return measure(outputs, targets, weights=weights)

    return measured

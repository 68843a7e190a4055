"""Invalid labels and outputs of classification metrics: they give NaN and a warning."""

import warnings

import jax
import jax.numpy as jnp

from flaxfit.metrics._labels import Answers, is_share
from flaxfit.metrics._metric import weights_of
from flaxfit.tree import Array, ArrayLike

# Fewer scores may all lie in [0, 1] by chance.
_ENOUGH = 10


def counted_weights(
    answers: Answers, weights: Array | None, *, from_logits: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weights of answers, NaN if invalid, and counts of invalid and doubtful ones.

    A NaN weight makes every sum that includes the answer NaN. Answers of weight 0 are ignored.
    """
    outputs, is_label = answers.outputs, answers.is_label
    by_class = outputs.ndim > is_label.ndim
    # `max` propagates NaN.
    is_number = ~jnp.isnan(outputs.max(-1) if by_class else outputs)
    weights = weights_of(is_label, weights)

    def count(each: jax.Array) -> jax.Array:
        return jnp.sum(each & (weights != 0), dtype=weights.dtype)

    is_valid, doubts = is_label & is_number, {"labels": count(~is_label)}
    if not from_logits:
        is_sound = is_share(outputs).all(-1) if by_class else is_share(outputs)
        is_valid, doubts["outputs"] = is_valid & is_sound, count(~is_sound & is_number)
    if (may_be := answers.is_probable) is not None:
        is_inside = may_be & (outputs != 0)  # Untrained models output exactly 0.
        may_be, is_inside = (x.all(-1) if by_class else x for x in (may_be, is_inside))
        doubts |= {"probable": count(is_inside), "improbable": count(~may_be & is_number)}
    return jnp.where(is_valid | (weights == 0), weights, jnp.nan), doubts


def warn_of(doubts: dict[str, ArrayLike], name: str) -> None:
    """Warns of the invalid labels and outputs that `counted_weights` counted for a metric."""
    if doubts["labels"]:
        _warn(
            f"The metric {name!r} is NaN: some labels are not valid classes. Integer labels count "
            "the classes from 0, the labels of a single score lie between 0 and 1, and one-hot "
            "labels add up to 1 for each example. Give an example that has no label the weight 0, "
            f"or leave out the label that marks it: {name}(ignore_label=-100). "
            "Where an example may have several labels, use binary_accuracy, or precision, recall "
            "or f1 with multilabel=True."
        )
    if doubts.get("outputs"):
        _warn(
            f"The metric {name!r} is NaN: with from_logits=False it takes probabilities, and got "
            "outputs below 0 or above 1."
        )
    if doubts.get("probable", 0) >= _ENOUGH and not doubts["improbable"]:
        _warn(
            f"The metric {name!r} takes logits, and all outputs lie between 0 and 1, as "
            f"probabilities do: for these, pass {name}(from_logits=False)."
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)

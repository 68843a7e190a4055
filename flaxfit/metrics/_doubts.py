"""What a classification metric cannot count: it makes the value NaN, and is said in words."""

import warnings
from typing import Any

import jax.numpy as jnp

from flaxfit.metrics._labels import Answers, is_share
from flaxfit.metrics._metric import weights_of
from flaxfit.tree._types import ArrayLike

# So many scores lie between 0 and 1 by chance only if a model says next to nothing.
_ENOUGH = 10


def weighed(
    answers: Answers, weights: ArrayLike, *, from_logits: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The weights of answers, NaN where one cannot be counted; and counts of what was doubtful.

    NaN outputs and labels that are none have no weight but NaN, so they spoil every sum that
    they are part of. What has the weight 0 leaves no mark. Only what can occur is counted.
    """
    outputs, is_label = answers.outputs, answers.is_label
    by_class = outputs.ndim > is_label.ndim
    # The largest of several is NaN if one of them is.
    is_number = ~jnp.isnan(outputs.max(-1) if by_class else outputs)
    weights = weights_of(is_label, weights)

    def count(each: Any) -> Any:
        return jnp.sum(each & (weights != 0), dtype=weights.dtype)

    is_counted, doubts = is_label & is_number, {"labels": count(~is_label)}
    if not from_logits:
        is_sound = is_share(outputs).all(-1) if by_class else is_share(outputs)
        is_counted, doubts["outputs"] = is_counted & is_sound, count(~is_sound & is_number)
    if (may_be := answers.is_probable) is not None:
        is_inside = may_be & (outputs != 0)  # Exactly 0 is what an untrained model gives, too.
        may_be, is_inside = (x.all(-1) if by_class else x for x in (may_be, is_inside))
        doubts |= {"probable": count(is_inside), "improbable": count(~may_be & is_number)}
    return jnp.where(is_counted | (weights == 0), weights, jnp.nan), doubts


def say(doubts: dict[str, Any], name: str | None) -> None:
    """Warns of labels that are none, and of outputs that are not what the metric takes them for.

    Args:
      doubts: the sums of what `weighed` counted.
      name: of the metric.
    """
    if doubts["labels"]:
        _warn(
            f"The metric {name!r} is NaN: it got labels that name no class. Integer labels count "
            "the classes from 0, the labels of a single score lie between 0 and 1, and one-hot "
            "labels add up to 1 for each example. Give an example that has no label the weight 0. "
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

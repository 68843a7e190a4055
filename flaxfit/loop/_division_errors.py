"""Error messages about dividing or padding batches where that would change results."""

from flaxfit.display import first_line
from flaxfit.modules._functions import WRITTEN
from flaxfit.step import MODEL, OBJECTIVE, Difference


def about_change(
    changed: Difference, text: str, n_parts: int, axis: str | None, *, pad: bool
) -> str:
    """Describes the result that a division would change, with alternatives; "" if none.

    `text` is the option that divides the batch, `axis` the mapped axis of replicas, if any.
    """
    advice = _instead(text, n_parts)
    if axis is not None and n_parts == 1:
        advice += f", or reduce over the replicas in the module: jax.lax.psum(x, {axis!r})"
    if changed.rows.startswith(MODEL):
        how = "such as by a batch mean"
        if n_parts > 1:
            how += ", or by a state that one part of the batch updates and the next one reads"
        where = changed.rows.removeprefix(MODEL)
        return (
            f"This model mixes examples of a batch{where}, {how}, so dividing the batch would "
            f"change its outputs or gradients. Use {advice}. BatchNorm with running statistics is "
            "allowed."
        )
    if changed.rows:
        return about_rows(changed.rows, text, pad=pad)
    if path := (changed.state or changed.chained).removeprefix(f"{WRITTEN}/"):
        why = "neither the mean over the parts of the batch nor equal in all of them"
        if not changed.state:
            why = "not the one after its parts in sequence"
        return (
            f"Cannot divide a batch, with {text}: the model updates the state {path!r} to a value "
            f"that is {why}. Use {advice}."
        )
    if changed.shared:
        return (
            f"Cannot divide a batch, with {text}: {changed.shared[0].lower()}{changed.shared[1:]} "
            "returns one value for the whole batch, which differs from the mean over the parts "
            f"that the loss would receive. Return one value per example, or use {advice}."
        )
    if changed.penalty:
        return (
            f"Cannot divide a batch, with {text}: the penalty that the model adds to the loss is "
            "not the mean of the penalties of the parts. Return or sow a mean over the examples "
            f"instead of a sum. Or use {advice}."
        )
    return ""


def about_rows(owner: str, text: str, *, pad: bool) -> str:
    """Explains that a loss or metric has rows that depend on other rows; see `about_change`."""
    if owner == OBJECTIVE:
        where = f"with {text}" if text else "with batches that may be padded"
        return (
            f"Cannot compute this objective {where}: the value of an example depends on the other "
            "examples of the batch, or on the batch size. Return one value per example that "
            "depends on that example alone. Or compute whole batches: pad=False on one device or "
            "with strategy=Sharded(), without accumulate and virtual_replicas. With pad=False an "
            "objective may also gather the rows of all devices itself: "
            "jax.lax.all_gather(x, 'replica', tiled=True)."
        )
    if owner.endswith("sums"):
        return (
            f"{owner.removesuffix(', whose sums')} cannot be measured "
            f"{f'with {text}' if text else 'with batches that may be padded'}: its sums over the "
            "parts of a batch do not add up to its sums over the batch, or count examples of "
            "weight 0. Return sums over the examples, each times its weight."
        )
    if not pad and not owner.startswith("The metric"):
        return (
            f"{owner} cannot be computed with {text}: the value of an example depends on the other "
            "examples of the batch, so the mean over the parts is not the loss of the batch. "
            "Return one value per example that depends on that example alone, or "
            f"{_whole(owner, text)}."
        )
    return (
        f"{owner} gives each example a value that depends on the other examples of its batch, or "
        "on the batch size, so dividing or padding the batch would change it. If it is meant to "
        f"compare examples of a batch, {_whole(owner, text)}."
    )


def _whole(owner: str, text: str) -> str:
    """Returns how to compute a loss or metric from whole batches."""
    by_batch = "set across='batch' in the task"
    undivided = "on one device or with strategy=Sharded()"
    if text and owner.startswith("The metric"):
        return f"set pad=False in the task, {undivided}, without accumulate and virtual_replicas"
    if text == "example_grads_hook":
        return f"use {_instead(text, 1)}"
    if text and " of output " in owner:
        return f"{by_batch}, {undivided}"
    if text.startswith("virtual_replicas"):
        return f"{by_batch}, without virtual_replicas"
    return by_batch if text.startswith("accumulate") else f"{by_batch}, or pad=False"


def about_size(n: int, error: Exception, text: str, n_parts: int) -> str:
    """Explains that a pass accepts the whole batch, but not a part of `n` examples."""
    return (
        f"Cannot divide a batch, with {text}: a part of it has {n} examples, which the model or "
        f"the loss does not accept ({first_line(error)}). If the model keeps an array with a row "
        f"per example, such as a carry, pass it as an input. Or use {_instead(text, n_parts)}."
    )


def _instead(text: str, n_parts: int) -> str:
    """Returns what to use instead of the option that divides the batch."""
    if n_parts > 1:
        return "accumulate=1"
    if text == "example_grads_hook":
        return "grads_hook, which receives the gradient of the whole batch"
    return "strategy=Sharded(), or one device"


def about_targets(owner: str, *, is_by_output: bool) -> str:
    """Explains that `owner` compares examples, though targets of weight 0 are replaced."""
    why = (
        "compares the examples of a batch, but targets of weight 0 may be invalid and are "
        "replaced: other examples would be compared with wrong targets."
    )
    if owner == OBJECTIVE:
        return (
            f"This objective {why} Pass the compared arrays as inputs, which are kept, or remove "
            "the examples of weight 0 from the data."
        )
    way_out = "Pass one weight per example" if is_by_output else "Set across='batch' in the task"
    return (
        f"{owner} {why} {way_out}, which keeps all targets, or remove the examples of weight 0 "
        "from the data."
    )

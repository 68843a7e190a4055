"""Messages about divisions and padding that would change results, with the ways out."""

from flaxfit.step import MODEL, OBJECTIVE, Difference


def about_change(
    changed: Difference, text: str, n_parts: int, axis: str | None, *, pad: bool
) -> str:
    """Says what a division would change; "" if nothing.

    Args:
      changed: what was found.
      text: the option that divides the batch.
      n_parts: the parts that a replica computes one after the other.
      axis: the name of the axis of replicas, if one is mapped.
      pad: whether the task allows padding.
    """
    if changed.rows:
        return about_rows(changed.rows, text, n_parts, pad=pad)
    advice = "accumulate=1" if n_parts > 1 else "strategy=Sharded(), or one device"
    if axis is not None and n_parts == 1:
        advice += f", or reduce over the replicas in the module: jax.lax.psum(x, {axis!r})"
    if path := changed.state or changed.chained:
        return (
            f"Cannot divide a batch, with {text}: the state {path!r} that the model updates would "
            "differ from that of the whole batch, as it is neither the mean of those of its parts "
            f"nor the same in all. Use {advice}."
        )
    if changed.shared:
        return (
            f"Cannot divide a batch, with {text}: the output {changed.shared} of the model, one "
            "for a batch, is not the mean of those of the parts, which the loss would be given. "
            f"Return one value per example, or use {advice}."
        )
    if changed.penalty:
        return (
            f"Cannot divide a batch, with {text}: the penalty that the model adds to the loss is "
            "not the mean of those of the parts of a batch. Return or sow a mean over the "
            f"examples instead of a sum. Or use {advice}."
        )
    return ""


def about_rows(owner: str, text: str, n_parts: int, *, pad: bool) -> str:
    """Says what computes rows that depend on other rows; the arguments are as above."""
    if owner == MODEL:
        advice = "accumulate=1" if n_parts > 1 else "strategy=Sharded(), or one device"
        return (
            "This model mixes examples of a batch, such as by a batch mean, so dividing the batch "
            f"would change its results. Use {advice}. BatchNorm with running statistics is allowed."
        )
    if owner == OBJECTIVE:
        where = f"with {text}" if text else "with batches that may be padded"
        return (
            f"Cannot compute this objective {where}: the value of an example depends on the other "
            "examples of the batch, or on their number. Return one value per example, which "
            "depends on that example alone. Or compute batches whole: pad=False, one device or "
            "strategy=Sharded(), without accumulate and virtual_replicas. With pad=False an "
            "objective may also gather the rows of all devices itself: "
            "jax.lax.all_gather(x, 'replica', tiled=True)."
        )
    if owner.endswith("sums"):
        return (
            f"{owner.removesuffix(', whose sums')} cannot be measured "
            f"{f'with {text}' if text else 'with batches that may be padded'}: the sums that it "
            "returns for a batch are not those of its parts added up, or count examples of weight "
            "0. Return sums over the examples, each times its weight."
        )
    if not pad and owner.startswith("The metric"):
        return (
            f"Cannot measure {owner.removeprefix('The metric ')} with {text}: the value of an "
            "example depends on the other examples of the batch, and each part would be measured "
            "by itself. Use one device, or strategy=Sharded(), without accumulate and "
            "virtual_replicas."
        )
    if not pad:
        return (
            f"{owner} cannot be computed with {text}: the value of an example depends on the other "
            "examples of the batch, and the mean over the parts of a batch is not the loss of the "
            "batch. Return one value per example, which depends on that example alone, or set "
            "across='batch' in the task, which computes such a loss from the outputs of all parts."
        )
    return (
        f"{owner} gives each example a value that depends on the other examples of its batch, or "
        "on their number. Padding, and batches of another size, would change it. If it is meant to "
        "look across the batch, set across='batch' in the task."
    )


def about_targets(owner: str, *, is_by_output: bool) -> str:
    """Says that what computes a value compares targets, of which some are replaced."""
    why = (
        "compares the examples of a batch, and targets of weight 0 are replaced, as they may be "
        "invalid: the others would be compared with wrong ones."
    )
    if owner == OBJECTIVE:
        return (
            f"This objective {why} Pass what it compares as inputs, which are kept, or leave the "
            "examples of weight 0 out of the data."
        )
    way_out = "Pass one weight per example" if is_by_output else "Set across='batch' in the task"
    return (
        f"{owner} {why} {way_out}, which keeps all targets, or leave the examples of weight 0 out "
        "of the data."
    )

"""Compares the arrays of a file with a model's: all arrays, or a selected part."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

import jax

from flaxfit.checkpoints._tree import Description, describe
from flaxfit.display import say
from flaxfit.tree import ArrayLike

_ADVICE = (
    "Build the model and the optimizer that wrote it, with the same freeze, ema, clip_norm and "
    "skip_above, or start in another folder."
)


def check_fits(
    on_disk: Mapping[str, Description],
    here: Mapping[str, Description],
    source: object,
    *,
    advice: str = _ADVICE,
    frozen: Sequence[str] | None = None,
) -> None:
    """Checks names, shapes and dtypes of a file's arrays; the error lists every difference.

    Differences in the optimizer's state that repeat a parameter's are only counted. `frozen` are
    the paths of parameters frozen in the saved run, if known.
    """
    found = differences(on_disk, here)
    if found:
        lines = "".join(f"\n  {line}" for line in _without_repeated(found))
        if frozen is not None and any(line.startswith("opt_state/") for line in found):
            advice += f" Frozen in the saved run: {_few([*frozen]) or 'nothing'}."
        if all(line.startswith("opt_state/") for line in found):
            advice += " Model.load_weights(folder) takes its weights alone, for another optimizer."
        noun = "difference" if len(found) == 1 else "differences"
        raise ValueError(
            f"The checkpoint {source} does not fit this model ({len(found)} {noun}):{lines}\n"
            f"{advice}"
        )


def differences(on_disk: Mapping[str, Description], here: Mapping[str, Description]) -> list[str]:
    """Lists the differences between two sets of described arrays, one per line."""
    only_disk = [path for path in on_disk if path not in here]
    only_here = [path for path in here if path not in on_disk]
    lines = [
        f"{path} is {_words(on_disk[path])} on disk, {_words(here[path])} here"
        for path in on_disk
        if path in here and _words(on_disk[path]) != _words(here[path])
    ]
    lines += [f"{path} is here, not on disk{nearest(path, only_disk)}" for path in only_here]
    lines += [f"{path} is on disk, not here{nearest(path, only_here)}" for path in only_disk]
    return lines


def _without_repeated(lines: list[str]) -> list[str]:
    """Replaces opt_state lines that repeat a params line by their number."""
    facts = [line.partition(" (nearest: ")[0] for line in lines]
    known = {line.removeprefix("params/") for line in facts if line.startswith("params/")}
    kept = []
    for line, fact in zip(lines, facts, strict=True):
        path, _, words = fact.partition(" is ")
        parts = path.split("/") if path.startswith("opt_state/") else []
        if not any(f"{'/'.join(parts[i:])} is {words}" in known for i in range(len(parts))):
            kept.append(line)
    n = len(lines) - len(kept)
    return [*kept, f"and {n} of these parameters in opt_state"] if n else kept


def nearest(name: str, others: Sequence[str]) -> str:
    """Returns " (nearest: ...)" with the most similar other name, or ""."""
    if len(others) >= 500:  # The search would be slow.
        return ""
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (nearest: {close[0]})" if close else ""


def choose(
    on_disk: Mapping[str, Description],
    here: Mapping[str, ArrayLike],
    patterns: str | Sequence[str],
    source: object,
    path_in_model: Callable[[str], str | None],
) -> list[str]:
    """Returns the names of the weights to read; prints how many are read and which are kept.

    The patterns match whole paths within the model. `path_in_model(name)` returns such a path, or
    None for a name that is no weight.
    """
    all_names = {**on_disk, **here}
    paths = {name: path for name in all_names if (path := path_in_model(name)) is not None}
    matches: set[str] = set()
    for pattern in _valid(patterns):
        found = {name for name, path in paths.items() if re.fullmatch(pattern, path)}
        matches |= found
        if not found:
            known = sorted({path.split("/")[0] for path in paths.values()})
            raise ValueError(
                f"partial={pattern!r} matches no weight of {source}, nor of the target. Paths "
                f"within the model begin with {', '.join(known)}."
            )
    check_fits(
        {name: description for name, description in on_disk.items() if name in matches},
        {name: describe(leaf) for name, leaf in here.items() if name in matches},
        source,
        advice="Change partial=, which chose these, or the model.",
    )
    kept = [name for name in here if name not in matches]
    absent = [name for name in kept if isinstance(here[name], jax.ShapeDtypeStruct)]
    if absent:
        raise ValueError(
            f"partial= does not cover {', '.join(absent)}, and the target only describes them. "
            "Pass a target that holds values, or more patterns."
        )
    taken = [name for name in here if name in matches]
    weights = [paths[name] for name in kept if name in paths]
    say(
        f"took {len(taken)} of {len(taken) + len(weights)} weights from {source}; kept "
        f"{_few(weights) or 'none'}"
    )
    return taken


def path_in_state(name: str) -> str | None:
    """Returns the path within the model of "params/<path>" or "model_state/<collection>/<path>"."""
    found = re.fullmatch("(params|model_state/[^/]+)/(.*)", name, re.DOTALL)
    return found and found[2]


def _words(description: Description) -> str:
    return f"{description['dtype']} {tuple(description['shape'])}"


def _valid(patterns: str | Sequence[str]) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ValueError("partial= names no pattern, so nothing would be read.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"partial={pattern!r} is not a regular expression: {error}."
            ) from error
    return patterns


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown

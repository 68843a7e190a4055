"""restore_from_t5: the weights, and the optimizer's state, of a T5 checkpoint."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax
import numpy as np
import optax
from numpy.typing import DTypeLike

from flaxfit.importers._fill import fill_from
from flaxfit.importers._load import load
from flaxfit.importers._t5 import PREFIX, t5_translator
from flaxfit.importers._translator import CheckpointTranslator, Translation
from flaxfit.importers._unreadable import UnreadableFile
from flaxfit.optim._freeze import merge
from flaxfit.state import InferenceState, TrainState
from flaxfit.tree import ArrayLike, PyTree, flat, path_of

Target = TypeVar("Target", TrainState, InferenceState, dict[str, PyTree])
_KEPT = "hyperparams|hyperparams_states|mini_step|skip_state|acc_grads|loss_scale"
"""Parts of an optimizer's state that are not statistics, so no checkpoint has them."""
_SLOTS = {"v": "v", "v_row": "v_row", "v_col": "v_col", "ema": "m"}
"""T5X's names of statistics by Optax name."""


def restore_from_t5(
    target: Target,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    lazy: bool = False,
    translator: CheckpointTranslator | None = None,
    optimizer_state: bool = True,
    dtype: DTypeLike | None = None,
    **opts: object,
) -> Target:
    """Returns a copy of a state with the content of a T5 checkpoint, to continue training.

    Compares everything before it reads anything. The result can start a loop:
    `TrainLoop(init=restore_from_t5(state, path), ...)`.

    >>> import jax.numpy as jnp, numpy as np, optax, tempfile
    >>> path = tempfile.mkdtemp() + "/t5.npz"
    >>> np.savez(path, **{"shared/embedding": np.ones((4, 2)), "global_step": np.int64(1000)})
    >>> variables = {"params": {"token_embedder": {"embedding": jnp.zeros((4, 2))}}}
    >>> state = restore_from_t5(TrainState.create(optax.sgd(0.1), variables), path)
    >>> int(state.step), float(state.params["token_embedder"]["embedding"].sum())
    (1000, 8.0)

    Args:
      target: a state whose parameters have T5X's names, or a dict in the layout of
        `TrainState.state_dict`.
      path: a checkpoint with the names of mesh-TensorFlow, in any format that `load` reads.
      strict: False skips arrays that have no rule or no leaf in the target; nothing else.
      lazy: whether to leave `LazyArray`s in the result instead of reading them.
      translator: the rules; None is `t5_translator`.
      optimizer_state: whether to import Adafactor's statistics as well; the optimizer must then be
        Optax's Adafactor (or keep no statistics). Its counts become the step; hyperparameters and
        accumulated gradients stay. False keeps the target's optimizer state. In either case, a
        moving average of the parameters starts at the imported ones.
      dtype: the dtype to cast floating arrays to; None: the dtype of the target.
      **opts: passed to the rules. Unless given, `relative_bias` is as in the target.

    Raises:
      ValueError: names or shapes do not match; it lists all of them.
      UnreadableFile: the checkpoint is damaged.
    """
    tree = _layout(target, optimizer_state)
    names = flat(tree)
    opts.setdefault("relative_bias", _relative_bias(names))
    translator = t5_translator if translator is None else translator
    translation = _rename_statistics(translator.translate(load(path), **opts), names)
    kept = rf"flax_mutables/.*|{PREFIX}(.*/)?({_KEPT})(/.*)?"
    try:
        filled = fill_from(translation, tree, strict=strict, partial=kept, dtype=dtype, lazy=lazy)
    except UnreadableFile:
        raise
    except ValueError as error:
        if PREFIX not in str(error):
            raise
        raise ValueError(
            f"{error}\nTo take the weights without the optimizer's state, pass "
            "optimizer_state=False."
        ) from error
    if "param_states" in filled["state"]:
        whole = _layout(target, True)["state"]["param_states"]
        filled["state"]["param_states"] = merge(filled["state"]["param_states"], whole)
    if isinstance(target, dict):
        return {**target, **filled, "state": {**target.get("state", {}), **filled["state"]}}
    fields = {"params": filled["target"], "step": filled["state"]["step"]}
    if "param_states" in filled["state"]:
        fields["opt_state"] = filled["state"]["param_states"]
    return target.replace(**fields)


def _layout(target: Target, optimizer_state: bool) -> dict[str, PyTree]:
    """Returns the parts of the target that a checkpoint may fill, in T5X's layout."""
    if isinstance(target, Mapping):
        state = dict(target["state"])
        parts: dict[str, PyTree] = {"target": target["target"], "state": state}
    else:
        state = {"step": target.step}
        parts = {"target": target.params, "state": state}
        if isinstance(target, TrainState):
            state["param_states"] = target.opt_state
    if not optimizer_state and "param_states" in state:
        # A moving average of the parameters starts at the imported ones.
        state["param_states"] = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf if "average" in path_of(path).split("/") else optax.MaskedNode()
            ),
            state["param_states"],
        )
    return parts


def _relative_bias(names: Iterable[str]) -> dict[str, str]:
    """Returns for each tower of the target whether its layers share a relative bias."""
    found = {}
    for name in names:
        match = re.fullmatch(r"target/(encoder|decoder)/(layers_\d+/)?relpos_bias/.*", name)
        if match:
            found[match[1]] = "per_layer" if match[2] else "shared"
    return found


def _rename_statistics(translation: Translation, leaves: Mapping[str, ArrayLike]) -> Translation:
    """Renames the statistics to the target's names: T5X's, or paths in Optax's state.

    Optax keeps one tree per kind of statistic somewhere in its state, and counts its steps there. A
    moving average of the parameters starts as the parameters. A target without statistics takes
    none.
    """
    values, sources = dict(translation.values), dict(translation.sources)
    # The single zero of an unused statistic must not fill a statistic that the target uses.
    for name in list(values):
        leaf = leaves.get(name)
        if leaf is not None and _is_unused(values[name]) and np.shape(leaf) != (1,):
            del values[name]
    wanted = [name for name in leaves if name.startswith(PREFIX)]
    used = set()
    for name in wanted:
        source = _source(name, values)
        if source and _is_unused(values[source]) and np.shape(leaves[name]) != (1,):
            continue
        if source is not None and source != name:
            values[name] = values[source]
            sources[name] = sources.get(source, source)
            used.add(source)
    no_statistic = rf"{PREFIX}(.*/)?(count|gradient_step|({_KEPT}|average)(/.*)?)"
    keeps_none = all(re.fullmatch(no_statistic, name) for name in wanted)
    for name, value in translation.values.items():
        if not name.startswith(PREFIX) or name in leaves:
            continue
        if name in used or keeps_none or (used and _is_unused(value)):
            values.pop(name, None)
    return dataclasses.replace(translation, values=values, sources=sources)


def _is_unused(value: ArrayLike) -> bool:
    """Returns whether a statistic is a single zero that the rules added; others are lazy."""
    return isinstance(value, np.ndarray) and value.shape == (1,)


def _source(name: str, values: Mapping[str, ArrayLike]) -> str | None:
    """Returns T5X's name of an array of the target, or None if the checkpoint lacks it."""
    if name in values:
        return name
    parts = name.split("/")
    if parts[-1] in ("count", "gradient_step"):
        return "state/step" if "state/step" in values else None
    for number, part in enumerate(parts):
        if part == "average":
            source = f"target/{'/'.join(parts[number + 1 :])}"
            return source if source in values else None
        if part in _SLOTS:
            source = f"{PREFIX}{'/'.join(parts[number + 1 :])}/{_SLOTS[part]}"
            if source in values:
                return source
    return None

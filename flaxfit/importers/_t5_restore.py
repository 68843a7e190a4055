"""restore_from_t5: the weights, and the optimizer's state, of a T5 checkpoint."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import optax

from flaxfit.importers._fill import fill_from
from flaxfit.importers._load import load
from flaxfit.importers._t5 import t5_translator
from flaxfit.importers._t5_slots import KEPT, PREFIX, as_in
from flaxfit.importers._translator import CheckpointTranslator
from flaxfit.importers._unreadable import UnreadableFile
from flaxfit.optim._freeze import merge
from flaxfit.state._train_state import InferenceState, TrainState
from flaxfit.tree._paths import flat, path_of
from flaxfit.tree._types import PyTree

Target = TypeVar("Target", TrainState, InferenceState, dict[str, Any])


def restore_from_t5(
    target: Target,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    lazy: bool = False,
    translator: CheckpointTranslator | None = None,
    optimizer_state: bool = True,
    dtype: Any = None,
    **opts: Any,
) -> Target:
    """A copy of a state with what a T5 checkpoint holds, to go on training from.

    Everything is compared before anything is read. The result can start a loop:
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
      path: a checkpoint under the names of mesh-TensorFlow, in any format that `load` knows.
      strict: False leaves out what has no rule or no place in the target; nothing else.
      lazy: whether to leave `LazyArray`s in the place of arrays.
      translator: the rules; None is `t5_translator`.
      optimizer_state: whether to take Adafactor's statistics as well; the optimizer has to be
        optax's Adafactor then (or keep no statistics). Its counts become the step; hyperparameters
        and gathered gradients stay. False keeps the target's optimizer state. In either case, a
        moving average of the parameters begins at the imported ones.
      dtype: what floating arrays are cast to; None is the dtype of the target.
      **opts: handed to the rules. Unless given, `relative_bias` is as in the target.

    Raises:
      ValueError: names or shapes do not fit; all are listed.
      UnreadableFile: the checkpoint is damaged.
    """
    tree = _layout(target, optimizer_state)
    names = flat(tree)
    opts.setdefault("relative_bias", _relative_bias(names))
    translator = t5_translator if translator is None else translator
    translation = as_in(names, translator.translate(load(path), **opts))
    kept = rf"flax_mutables/.*|{PREFIX}(.*/)?({KEPT})(/.*)?"
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
        whole = _optimizer_state(target)
        filled["state"]["param_states"] = merge(filled["state"]["param_states"], whole)
    if isinstance(target, dict):
        return {**target, **filled, "state": {**target.get("state", {}), **filled["state"]}}
    fields = {"params": filled["target"], "step": filled["state"]["step"]}
    if "param_states" in filled["state"]:
        fields["opt_state"] = filled["state"]["param_states"]
    return target.replace(**fields)


def _layout(target: PyTree, optimizer_state: bool) -> dict[str, Any]:
    """The parts of the target that a checkpoint may fill, in T5X's layout."""
    if isinstance(target, Mapping):
        state = dict(target["state"])
        parts: dict[str, Any] = {"target": target["target"], "state": state}
    else:
        state = {"step": target.step}
        parts = {"target": target.params, "state": state}
        if isinstance(target, TrainState):
            state["param_states"] = target.opt_state
    if not optimizer_state and "param_states" in state:
        # A moving average is of the parameters, and begins at them.
        state["param_states"] = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf if "average" in path_of(path).split("/") else optax.MaskedNode()
            ),
            state["param_states"],
        )
    return parts


def _optimizer_state(target: PyTree) -> Any:
    return target["state"]["param_states"] if isinstance(target, Mapping) else target.opt_state


def _relative_bias(names: Iterable[str]) -> dict[str, str]:
    """Which towers of the target have a bias for all layers, and which one for each."""
    found = {}
    for name in names:
        match = re.fullmatch(r"target/(encoder|decoder)/(layers_\d+/)?relpos_bias/.*", name)
        if match:
            found[match[1]] = "per_layer" if match[2] else "shared"
    return found

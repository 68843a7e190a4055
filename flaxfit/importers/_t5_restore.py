"""restore_from_t5: the weights, and the optimizer's state, of a T5 checkpoint."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from flaxfit._rules import flat
from flaxfit._state import InferenceState, TrainState
from flaxfit.importers._fill import fill_from
from flaxfit.importers._load import load
from flaxfit.importers._t5 import t5_translator
from flaxfit.importers._t5_slots import as_in
from flaxfit.importers._translator import CheckpointTranslator

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
        optax's Adafactor then (or keep no statistics). Its counts become the step. False keeps the
        target's optimizer state.
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
    translation = as_in(names.keys(), translator.translate(load(path), **opts))
    filled = fill_from(
        translation, tree, strict=strict, partial="flax_mutables/.*", dtype=dtype, lazy=lazy
    )
    if isinstance(target, dict):
        return {**target, **filled, "state": {**target.get("state", {}), **filled["state"]}}
    fields = {"params": filled["target"], "step": filled["state"]["step"]}
    if "param_states" in filled["state"]:
        fields["opt_state"] = filled["state"]["param_states"]
    return target.replace(**fields)


def _layout(target: Any, optimizer_state: bool) -> dict[str, Any]:
    """The parts of the target that a checkpoint may fill, in T5X's layout."""
    if isinstance(target, Mapping):
        state = dict(target["state"])
        parts: dict[str, Any] = {"target": target["target"], "state": state}
    else:
        state = {"step": target.step}
        parts = {"target": target.params, "state": state}
        if isinstance(target, TrainState):
            state["param_states"] = target.opt_state
    if not optimizer_state:
        state.pop("param_states", None)
    return parts


def _relative_bias(names: Iterable[str]) -> dict[str, str]:
    """Which towers of the target have a bias for all layers, and which one for each."""
    found = {}
    for name in names:
        match = re.fullmatch(r"target/(encoder|decoder)/(layers_\d+/)?relpos_bias/.*", name)
        if match:
            found[match[1]] = "per_layer" if match[2] else "shared"
    return found

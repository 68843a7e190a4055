"""t5_translator: from the names that mesh-TensorFlow gave to T5's variables to T5X's.

It serves T5 and T5 v1.1, models of a decoder alone, and Adafactor's statistics.

Parameters become `target/...`, statistics `state/param_states/.../v | v_row | v_col | m`, the
step `state/step`; where there are statistics, those that Adafactor keeps as a single zero are
added. The option `relative_bias` says whether the layers of a tower share their relative position
bias: "shared", "per_layer", or a dict of these by tower ("encoder", "decoder"). Without it, a bias
in the first layer alone is shared. `t5_translator.inverse` gives parameters their old names.

>>> t5_translator.dry_run({"shared/embedding": np.zeros((32, 8)), "global_step": np.array(10)})
shared/embedding  -> target/token_embedder/embedding  (32, 8)  float64
global_step       -> state/step                       ()       int32
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flaxfit.importers._t5_slots import SLOTS, add_dummies, turn_squares
from flaxfit.importers._translator import CheckpointTranslator
from flaxfit.tree._types import PyTree

t5_translator = CheckpointTranslator()
_TOWERS = {"encoder": "encoder", "decoder": "decoder", "transformer": "decoder"}
_TOWER = "(encoder|decoder|transformer)"
_LAYER = rf"{_TOWER}/block_(\d+)/layer_(\d+)"
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
_ATTENTIONS = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
_NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
    "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}


def _add(pattern: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Adds a rule for a parameter, given how its new path is made, and for its statistics."""

    def register(path_of: Callable[..., str]) -> Callable[..., str]:
        @t5_translator.add(f"{pattern}({'|'.join(SLOTS)})?")
        def rule(opts: Any, name: str, value: Any, *groups: str) -> tuple[str, Any]:
            *rest, slot = groups
            path = path_of(*rest)
            if slot:
                return f"state/param_states/{path}/{SLOTS[slot]}", value
            return f"target/{path}", value

        return path_of

    return register


@t5_translator.add("global_step")
def _step(opts: Any, name: str, value: Any) -> tuple[str, Any]:
    return "state/step", np.asarray(value).astype(np.int32)


@_add("shared/embedding")
def _shared_embedding() -> str:
    return "token_embedder/embedding"


@_add(f"{_TOWER}/embedding")
def _embedding(tower: str) -> str:
    return f"{_TOWERS[tower]}/token_embedder/embedding"


@_add(rf"{_LAYER}/SelfAttention/relative_attention_bias")
def _relative_bias(tower: str, block: str, layer: str) -> str:
    return f"{_TOWERS[tower]}/layers_{int(block)}/relpos_bias/rel_embedding"


@_add(rf"{_LAYER}/(SelfAttention|EncDecAttention)/([qkvo])")
def _attention(tower: str, block: str, layer: str, kind: str, matrix: str) -> str:
    attention = "attention" if tower == "encoder" else _ATTENTIONS[kind]
    return f"{_TOWERS[tower]}/layers_{int(block)}/{attention}/{_MATRICES[matrix]}/kernel"


@_add(rf"{_LAYER}/DenseReluDense/(wi|wi_\d+|wo)/kernel")
def _mlp(tower: str, block: str, layer: str, matrix: str) -> str:
    return f"{_TOWERS[tower]}/layers_{int(block)}/mlp/{matrix}/kernel"


@_add(r"(encoder|transformer)/block_(\d+)/layer_00([01])/(?:layer|rms)_norm/scale")
@_add(r"(decoder)/block_(\d+)/layer_00([012])/(?:layer|rms)_norm/scale")
def _norm(tower: str, block: str, layer: str) -> str:
    return f"{_TOWERS[tower]}/layers_{int(block)}/{_NORMS[tower][int(layer)]}/scale"


@_add(f"{_TOWER}/(?:final_layer|rms)_norm/scale")
def _final_norm(tower: str) -> str:
    return f"{_TOWERS[tower]}/{_TOWERS[tower]}_norm/scale"


@_add("(?:decoder|transformer)/logits/kernel")
def _logits() -> str:
    return "decoder/logits_dense/kernel"


@t5_translator.add_last_step
def _share_relative_bias(
    opts: Mapping[str, Any], values: Mapping[str, PyTree]
) -> Mapping[str, Any]:
    """Takes a bias that all layers share out of the first of them."""
    asked = opts.get("relative_bias")
    for tower in ("encoder", "decoder"):
        in_layer = rf"(.*/)?{tower}/layers_(\d+)/relpos_bias/(.*)"
        layers = {m[2] for m in (re.fullmatch(in_layer, name) for name in values) if m}
        choice = asked.get(tower) if isinstance(asked, Mapping) else asked
        if choice not in (None, "shared", "per_layer"):
            raise ValueError(
                f"relative_bias={choice!r} is unknown: use 'shared' or 'per_layer', or a dict of "
                "these by tower."
            )
        if choice == "shared" and len(layers) > 1:
            raise ValueError(
                f"The layers of the {tower} cannot share a relative bias: the checkpoint has one "
                f"in each of {len(layers)} layers. Use relative_bias='per_layer'."
            )
        if choice == "shared" or (choice is None and layers == {"0"}):
            new = rf"\g<1>{tower}/relpos_bias/\g<3>"
            values = {re.sub(rf"^{in_layer}$", new, name): value for name, value in values.items()}
    return values


t5_translator.add_last_step(turn_squares)
t5_translator.add_last_step(add_dummies)


_BACK = t5_translator.inverse


@_BACK.add("state/step")
def _step_back(opts: Any, name: str, value: Any) -> tuple[str, Any]:
    return "global_step", value


@_BACK.add("target/token_embedder/embedding")
def _embedding_back(opts: Any, name: str, value: Any) -> tuple[str, Any]:
    return "shared/embedding", value


@_BACK.add("target/decoder/token_embedder/embedding")
def _decoder_embedding_back(opts: Any, name: str, value: Any) -> tuple[str, Any]:
    return "decoder/embedding", value


@_BACK.add(r"target/(encoder|decoder)/(?:layers_(\d+)/)?relpos_bias/rel_embedding")
def _bias_back(opts: Any, name: str, value: Any, tower: str, layer: str | None) -> tuple[str, Any]:
    block = f"{tower}/block_{int(layer or 0):03d}"
    return f"{block}/layer_000/SelfAttention/relative_attention_bias", value


@_BACK.add(r"target/(encoder|decoder)/layers_(\d+)/(\w*attention)/(query|key|value|out)/kernel")
def _attention_back(
    opts: Any, name: str, value: Any, tower: str, layer: str, attention: str, matrix: str
) -> tuple[str, Any]:
    is_cross = attention == "encoder_decoder_attention"
    kind = "EncDecAttention" if is_cross else "SelfAttention"
    letter = "o" if matrix == "out" else matrix[0]
    return f"{tower}/block_{int(layer):03d}/layer_{int(is_cross):03d}/{kind}/{letter}", value


@_BACK.add(r"target/(encoder|decoder)/layers_(\d+)/mlp/(\w+)/kernel")
def _mlp_back(
    opts: Any, name: str, value: Any, tower: str, layer: str, matrix: str
) -> tuple[str, Any]:
    number = len(_NORMS[tower]) - 1
    block = f"{tower}/block_{int(layer):03d}/layer_{number:03d}"
    return f"{block}/DenseReluDense/{matrix}/kernel", value


@_BACK.add(r"target/(encoder|decoder)/layers_(\d+)/(pre_\w+_layer_norm)/scale")
def _norm_back(
    opts: Any, name: str, value: Any, tower: str, layer: str, norm: str
) -> tuple[str, Any]:
    number = _NORMS[tower].index(norm)
    return f"{tower}/block_{int(layer):03d}/layer_{number:03d}/rms_norm/scale", value


@_BACK.add(r"target/(encoder|decoder)/\w+_norm/scale")
def _final_norm_back(opts: Any, name: str, value: Any, tower: str) -> tuple[str, Any]:
    return f"{tower}/rms_norm/scale", value


@_BACK.add("target/decoder/logits_dense/kernel")
def _logits_back(opts: Any, name: str, value: Any) -> tuple[str, Any]:
    return "decoder/logits/kernel", value


@_BACK.add_last_step
def _decoder_alone(opts: Any, values: Mapping[str, PyTree]) -> Mapping[str, Any]:
    """Names a decoder alone, which has embeddings of its own and no cross attention."""
    if "decoder/embedding" not in values:
        return values

    def named(name: str) -> str:
        name = re.sub(r"^decoder/(block_\d+)/layer_002/", r"decoder/\1/layer_001/", name)
        return re.sub("^decoder/", "transformer/", name)

    return {named(name): value for name, value in values.items()}

"""t5_translator: from mesh-TensorFlow's names of T5's variables to T5X's.

It covers T5 and T5 v1.1, decoder-only models, and Adafactor's statistics.

Parameters become `target/...`, statistics `state/param_states/.../v | v_row | v_col | m`, the
step `state/step`; where a parameter has statistics, those that Adafactor keeps as a single zero
are added. The option `relative_bias` says whether the layers of a tower share their relative
position bias: "shared", "per_layer", or a dict of these by tower ("encoder", "decoder"). Without
it, a bias in the first layer only is shared. `t5_translator.inverse` restores the old names of
parameters.

>>> t5_translator.dry_run({"shared/embedding": np.zeros((32, 8)), "global_step": np.array(10)})
shared/embedding  -> target/token_embedder/embedding  (32, 8)  float64
global_step       -> state/step                       ()       int32
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from flaxfit.importers._translator import CheckpointTranslator
from flaxfit.tree import ArrayLike

Arrays: TypeAlias = Mapping[str, ArrayLike]
Naming: TypeAlias = Callable[..., str]

SLOTS = {"_slot_v": "v", "_slot_vr": "v_row", "_slot_vc": "v_col", "_slot_m": "m"}
"""T5X's names of statistics by suffix of mesh-TensorFlow's names."""
PREFIX = "state/param_states/"

t5_translator: CheckpointTranslator = CheckpointTranslator()
_TOWERS = {"encoder": "encoder", "decoder": "decoder", "transformer": "decoder"}
_TOWER = "(encoder|decoder|transformer)"
_LAYER = rf"{_TOWER}/block_(\d+)/layer_(\d+)"
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
_ATTENTIONS = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
_SINGLE = {
    "shared/embedding": "token_embedder/embedding",
    "encoder/embedding": "encoder/token_embedder/embedding",
    "(?:decoder|transformer)/embedding": "decoder/token_embedder/embedding",
    "encoder/(?:final_layer|rms)_norm/scale": "encoder/encoder_norm/scale",
    "(?:decoder|transformer)/(?:final_layer|rms)_norm/scale": "decoder/decoder_norm/scale",
    "(?:decoder|transformer)/logits/kernel": "decoder/logits_dense/kernel",
}
_OLD_SINGLE = {
    "state/step": "global_step",
    "target/token_embedder/embedding": "shared/embedding",
    "target/decoder/token_embedder/embedding": "decoder/embedding",
    r"target/(encoder|decoder)/\w+_norm/scale": "{}/rms_norm/scale",
    "target/decoder/logits_dense/kernel": "decoder/logits/kernel",
}
_NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
    "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}


def _add(pattern: str) -> Callable[[Naming], Naming]:
    """Adds a rule for a parameter and its statistics, given the function that names it."""

    def register(path_of: Naming) -> Naming:
        @t5_translator.add(f"{pattern}({'|'.join(SLOTS)})?")
        def rule(opts: object, name: str, value: ArrayLike, *groups: str) -> tuple[str, ArrayLike]:
            *rest, slot = groups
            path = path_of(*rest)
            return f"{PREFIX}{path}/{SLOTS[slot]}" if slot else f"target/{path}", value

        return path_of

    return register


def _add_inverse(pattern: str) -> Callable[[Naming], Naming]:
    """Adds a rule for the inverse, given the function that names the array."""

    def register(old_name: Naming) -> Naming:
        @t5_translator.inverse.add(pattern)
        def rule(opts: object, name: str, value: ArrayLike, *groups: str) -> tuple[str, ArrayLike]:
            return old_name(*groups), value

        return old_name

    return register


@t5_translator.add("global_step")
def _step(opts: object, name: str, value: ArrayLike) -> tuple[str, ArrayLike]:
    return "state/step", np.asarray(value).astype(np.int32)


for _pattern, _name in _SINGLE.items():
    _add(_pattern)(_name.format)
for _pattern, _name in _OLD_SINGLE.items():
    _add_inverse(_pattern)(_name.format)


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


@t5_translator.add_last_step
def _share_relative_bias(opts: Mapping[str, object], values: Arrays) -> Arrays:
    """Moves a bias that all layers share from the first layer to the tower."""
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


@t5_translator.add_last_step
def _swap_square_statistics(opts: object, values: Arrays) -> Arrays:
    """Swaps the statistics of rows and columns of square matrices.

    In mesh-TensorFlow, `vr` lacks the largest dimension, the first one if both are equal. In T5X
    and Optax, `v_row` lacks the second one. The shapes are equal, so no other check would notice.
    """
    swapped = dict(values)
    for name, value in values.items():
        row, column = f"{_statistics_of(name)}/v_row", f"{_statistics_of(name)}/v_col"
        is_square = len(value.shape) == 2 and value.shape[0] == value.shape[1]
        if name.startswith("target/") and is_square and row in values and column in values:
            swapped[row], swapped[column] = values[column], values[row]
    return swapped


@t5_translator.add_last_step
def _add_unused_statistics(opts: object, values: Arrays) -> Arrays:
    """Adds the single zeros that Adafactor keeps for statistics that it does not use."""
    added = dict(values)
    for name in values:
        statistics = [f"{_statistics_of(name)}/{slot}" for slot in SLOTS.values()]
        if name.startswith("target/") and any(each in values for each in statistics):
            for each in statistics:
                added.setdefault(each, np.zeros(1, np.float32))
    return added


def _statistics_of(name: str) -> str:
    return PREFIX + name.removeprefix("target/")


@_add_inverse(r"target/(encoder|decoder)/(?:layers_(\d+)/)?relpos_bias/rel_embedding")
def _old_relative_bias(tower: str, layer: str | None) -> str:
    return f"{_block(tower, layer or 0)}/layer_000/SelfAttention/relative_attention_bias"


@_add_inverse(r"target/(encoder|decoder)/layers_(\d+)/(\w*attention)/(query|key|value|out)/kernel")
def _old_attention(tower: str, layer: str, attention: str, matrix: str) -> str:
    is_cross = attention == "encoder_decoder_attention"
    kind = "EncDecAttention" if is_cross else "SelfAttention"
    letter = "o" if matrix == "out" else matrix[0]
    return f"{_block(tower, layer)}/layer_{int(is_cross):03d}/{kind}/{letter}"


@_add_inverse(r"target/(encoder|decoder)/layers_(\d+)/mlp/(\w+)/kernel")
def _old_mlp(tower: str, layer: str, matrix: str) -> str:
    number = len(_NORMS[tower]) - 1
    return f"{_block(tower, layer)}/layer_{number:03d}/DenseReluDense/{matrix}/kernel"


@_add_inverse(r"target/(encoder|decoder)/layers_(\d+)/(pre_\w+_layer_norm)/scale")
def _old_norm(tower: str, layer: str, norm: str) -> str:
    return f"{_block(tower, layer)}/layer_{_NORMS[tower].index(norm):03d}/rms_norm/scale"


@t5_translator.inverse.add_last_step
def _name_decoder_only(opts: object, values: Arrays) -> Arrays:
    """Names a decoder-only model, which has its own embeddings and no cross attention."""
    if "decoder/embedding" not in values:
        return values

    def named(name: str) -> str:
        name = re.sub(r"^decoder/(block_\d+)/layer_002/", r"decoder/\1/layer_001/", name)
        return re.sub("^decoder/", "transformer/", name)

    return {named(name): value for name, value in values.items()}


def _block(tower: str, layer: str | int) -> str:
    return f"{tower}/block_{int(layer):03d}"

"""Pretrained weights from other libraries' files: read lazily, renamed by rules, checked."""

from flaxfit.importers._fill import fill as fill
from flaxfit.importers._lazy import LazyArray as LazyArray
from flaxfit.importers._lazy import LazyAwaitableArray as LazyAwaitableArray
from flaxfit.importers._lazy import LazyThreadPoolArray as LazyThreadPoolArray
from flaxfit.importers._load import load as load
from flaxfit.importers._msgpack import load_msgpack as load_msgpack
from flaxfit.importers._npz import load_npz as load_npz
from flaxfit.importers._orbax import load_orbax as load_orbax
from flaxfit.importers._safetensors import load_safetensors as load_safetensors
from flaxfit.importers._t5 import t5_translator as t5_translator
from flaxfit.importers._t5_restore import restore_from_t5 as restore_from_t5
from flaxfit.importers._t5x import load_t5x as load_t5x
from flaxfit.importers._tf_bundle import load_tf_ckpt as load_tf_ckpt
from flaxfit.importers._translator import CheckpointTranslator as CheckpointTranslator
from flaxfit.importers._unreadable import UnreadableFile as UnreadableFile

__all__ = [
    "CheckpointTranslator",
    "LazyArray",
    "LazyAwaitableArray",
    "LazyThreadPoolArray",
    "UnreadableFile",
    "fill",
    "load",
    "load_msgpack",
    "load_npz",
    "load_orbax",
    "load_safetensors",
    "load_t5x",
    "load_tf_ckpt",
    "restore_from_t5",
    "t5_translator",
]

"""Pretrained weights from other libraries' files: read lazily, renamed by rules, checked."""

from flaxfit.importers._fill import fill
from flaxfit.importers._lazy import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
from flaxfit.importers._load import load
from flaxfit.importers._msgpack import load_msgpack
from flaxfit.importers._npz import load_npz
from flaxfit.importers._orbax import load_orbax
from flaxfit.importers._safetensors import load_safetensors
from flaxfit.importers._t5 import t5_translator
from flaxfit.importers._t5_restore import restore_from_t5
from flaxfit.importers._t5x import load_t5x
from flaxfit.importers._tf_bundle import load_tf_ckpt
from flaxfit.importers._translator import CheckpointTranslator
from flaxfit.importers._unreadable import UnreadableFile

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

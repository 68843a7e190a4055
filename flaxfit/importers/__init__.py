"""Pretrained weights from other libraries' files: read lazily, renamed by rules, checked."""

from flaxfit.importers._fill import fill as fill
from flaxfit.importers._lazy import LazyArray as LazyArray
from flaxfit.importers._lazy import LazyAwaitableArray as LazyAwaitableArray
from flaxfit.importers._lazy import LazyThreadPoolArray as LazyThreadPoolArray
from flaxfit.importers._tf_bundle import load_tf_ckpt as load_tf_ckpt
from flaxfit.importers._translator import CheckpointTranslator as CheckpointTranslator
from flaxfit.importers._unreadable import UnreadableFile as UnreadableFile

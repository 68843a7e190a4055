"""Checkpoints on disk: written in the background, verified when read, never half there."""

from flaxfit.checkpoints._file import CheckpointFile as CheckpointFile
from flaxfit.checkpoints._reader import CheckpointFileReader as CheckpointFileReader
from flaxfit.checkpoints._reader import best as best
from flaxfit.checkpoints._reader import latest as latest
from flaxfit.checkpoints._reader import list_steps as list_steps
from flaxfit.checkpoints._reader import restore as restore
from flaxfit.checkpoints._save import save as save
from flaxfit.checkpoints._weights import load_weights as load_weights
from flaxfit.checkpoints._weights import save_weights as save_weights
from flaxfit.checkpoints._writer import CheckpointFileWriter as CheckpointFileWriter

__all__ = [
    "CheckpointFile",
    "CheckpointFileReader",
    "CheckpointFileWriter",
    "best",
    "latest",
    "list_steps",
    "load_weights",
    "restore",
    "save",
    "save_weights",
]

"""Checkpoints on disk: written in the background, verified when read, never half there."""

from flaxfit.checkpoints._file import CheckpointFile
from flaxfit.checkpoints._reader import CheckpointFileReader, best, latest, list_steps, restore
from flaxfit.checkpoints._save import save
from flaxfit.checkpoints._weights import load_weights, save_weights
from flaxfit.checkpoints._writer import CheckpointFileWriter

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

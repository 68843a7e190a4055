"""Data as streams of batches, with a position that training can resume from."""

from flaxfit.data._adapters import as_stream, one_pass
from flaxfit.data._arrays import ArrayStream
from flaxfit.data._packing import pack
from flaxfit.data._prefetch import prefetch
from flaxfit.data._stream import DataStream, take

__all__ = ["ArrayStream", "DataStream", "as_stream", "one_pass", "pack", "prefetch", "take"]

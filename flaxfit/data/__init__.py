"""Data as streams of batches, with a position that training can resume from."""

from flaxfit.data._adapters import as_stream as as_stream
from flaxfit.data._adapters import one_pass as one_pass
from flaxfit.data._arrays import ArrayStream as ArrayStream
from flaxfit.data._packing import pack as pack
from flaxfit.data._prefetch import prefetch as prefetch
from flaxfit.data._stream import DataStream as DataStream
from flaxfit.data._stream import take as take

__all__ = [
    "ArrayStream",
    "DataStream",
    "as_stream",
    "one_pass",
    "pack",
    "prefetch",
    "take",
]

"""CRC-32C checksums, which TensorFlow stores for every tensor."""

import numpy as np

_CHUNK = 1 << 24
"""Bytes that are copied at a time."""


def crc32c(data: bytes | np.ndarray) -> int:
    """Returns the CRC-32C of bytes, or of an array of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    content, checksum, start = np.frombuffer(data, np.uint8), 0, 0
    while start < len(content):
        # The short chunk is the first one, so that each later one has four bytes or more.
        end = start + ((len(content) - start - 1) % _CHUNK + 1)
        chunk = content[start:end].copy()
        # Continuing from a checksum equals mixing it into the first four bytes.
        chunk[:4] ^= np.frombuffer(checksum.to_bytes(4, "little"), np.uint8)[: len(chunk)]
        checksum, start = _checksum_of(chunk), end
    return checksum


def _checksum_of(chunk: np.ndarray) -> int:
    """Writes a chunk to a Zarr array in memory, whose codec appends the checksum."""
    import tensorstore

    metadata = {
        "shape": chunk.shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk.shape}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    spec = {"driver": "zarr3", "metadata": metadata, "store_data_equal_to_fill_value": True}
    memory = tensorstore.KvStore.open("memory://").result()
    store = tensorstore.open(spec, kvstore=memory, create=True).result()
    store.write(chunk).result()
    return int.from_bytes(memory.read("c/0").result().value[-4:], "little")


def unmasked(stored: int) -> int:
    """Returns the checksum that TensorFlow and LevelDB store in a masked form.

    >>> hex(unmasked(0xA282EAD8))
    '0x0'
    """
    rotated = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF

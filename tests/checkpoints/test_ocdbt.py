"""An honest index passes; one that would take much more memory than it has bytes is refused."""

import numpy as np
import pytest
import tensorstore

from flaxfit.checkpoints._ocdbt import MANIFEST, check_index
from flaxfit.importers._crc32c import crc32c

MOST_MEMORY = 200_000_000
ZARRAY = b'{"chunks":[32],"compressor":null,"dtype":"<f4","shape":[2048],"zarr_format":2}'


def write_store(folder, values, **config):
    """Has TensorStore itself write values by name, as Orbax has it do."""
    folder.mkdir(exist_ok=True)
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000} | config
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "config": config}
    store = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as transaction:
        for name, value in values.items():
            store.with_transaction(transaction)[name] = value


HONEST = {
    "many arrays": {f"params/block_{i}/{part}": ZARRAY for i in range(2000) for part in "ab"},
    "shards of zeros": {f"mu/{i}/kernel/{j}.0": bytes(32) for i in range(60) for j in range(512)},
    "long names": {"/".join([f"{i:03}"] * 200): ZARRAY for i in range(500)},
    "small and large values": {f"a{i}": bytes([i % 256]) * i for i in range(0, 4000, 7)},
    "any bytes": {bytes([i, 255, i]): bytes([i]) for i in range(256)},
    "nothing": {},
}


@pytest.mark.parametrize(
    "config",
    [{}, {"compression": None}, {"max_decoded_node_bytes": 5000}],
    ids=["one node", "not compressed", "many nodes"],
)
@pytest.mark.parametrize("name", HONEST)
def test_what_tensorstore_wrote_passes(tmp_path, name, config):
    write_store(tmp_path, HONEST[name], **config)
    if not HONEST[name]:
        write_store(tmp_path, {"a": b"1"}, **config)
        write_store(tmp_path, {"a": None}, **config)
    inline = sum(len(value) for value in HONEST[name].values() if len(value) <= 1024)
    assert check_index(tmp_path) == inline


def test_what_several_saves_wrote_passes(tmp_path):
    for i in range(20):
        write_store(tmp_path, {f"a{i}": b"x" * 100, "b": b"y" * (i + 2000)})
    assert check_index(tmp_path) == 2000


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def varints(*numbers):
    return b"".join(map(varint, numbers))


def repeated(*runs):
    """A Zstandard frame of bytes, each of them repeated."""
    frame = bytes.fromhex("28b52ffd0058")
    pieces = [(b, min(1 << 17, n - at)) for b, n in runs for at in range(0, n, 1 << 17)]
    for i, (byte, n) in enumerate(pieces):
        header = (i == len(pieces) - 1) | 1 << 1 | n << 3
        frame += header.to_bytes(3, "little") + bytes([byte])
    return frame


def spelled(content, *runs):
    """A Zstandard frame of some bytes as they are, and of others that are repeated."""
    frame = repeated(*runs)
    return frame[:6] + (len(content) << 3).to_bytes(3, "little") + content + frame[6:]


def sealed(magic, content, is_packed=False):
    """A node or manifest whose checksum is right."""
    length = (14 + len(content) + 4).to_bytes(8, "little")
    data = bytes.fromhex(magic) + length + bytes([0, is_packed]) + content
    return data + crc32c(data).to_bytes(4, "little")


MANIFEST_MAGIC, NODE_MAGIC = "0cdb3a2a", "0cdb20de"
CONFIG = bytes(16) + varints(0, 1024, 100_000_000) + bytes([4]) + varint(0)
PATH = b"d/data"
FILES = varints(1, len(PATH), 0) + PATH


def manifest(length, height=0, place=0, files=FILES):
    root = varints(1, 1) + bytes([height]) + varints(0, place, length, 1, 1, 1) + bytes(8)
    return sealed(MANIFEST_MAGIC, CONFIG + files + root + varint(0))


def leaf(names, sizes, is_outside=0):
    """A leaf; of the names only the lengths, each with what it shares with the one before."""
    n = len(names)
    lengths = varints(*(begin for begin, _ in names[1:]), *(end for _, end in names))
    kinds = bytes([is_outside]) * n
    text = b"".join(b"a" * (end - 3) + i.to_bytes(3, "big") for i, (_, end) in enumerate(names))
    return b"\0" + FILES + varint(n) + lengths + text + varints(*sizes) + kinds


def write_hostile(folder, kind):
    """An index whose checksums are right, and that would take much memory, or leads elsewhere."""
    (folder / "d").mkdir(parents=True, exist_ok=True)
    outside, node, top = 0, b"", None
    match kind:
        case "a manifest that unpacks to very much":
            frame = spelled(CONFIG + varint(1 << 40), (0, 1 << 30))
            top = sealed(MANIFEST_MAGIC, frame, True)
        case "a node that unpacks to very much":
            frame = spelled(b"\0" + varint(1 << 40), (0, 1 << 30))
            node = sealed(NODE_MAGIC, frame, True)
        case "a node of very many entries":
            node = sealed(NODE_MAGIC, b"\0" + FILES + varint(1 << 21))
        case "very long names in a few bytes":
            node = sealed(NODE_MAGIC, leaf([(0, 60_000)] + [(60_000, 3)] * 9000, [0] * 9001))
        case "very long paths in a few bytes":
            n = 20_000
            lengths = varints(n, *[60_000] * (n - 1), 60_000, *[1] * (n - 1), *[0] * n)
            node = sealed(NODE_MAGIC, b"\0" + lengths + b"a" * (60_000 + n))
        case "very large values in a few bytes":
            content = leaf([(0, 3)] * 201, [1 << 20] * 201)
            node = sealed(NODE_MAGIC, spelled(content, (0, 201 << 20)), True)
        case "the same bytes as the values of many names":
            node = sealed(NODE_MAGIC, leaf([(0, 3)] * 51, [1000] * 51, is_outside=1))
            outside = 1000
        case "the same branch again and again":
            n, below, place = 100, sealed(NODE_MAGIC, leaf([(0, 3)], [0])), 0
            for height in (1, 2, 3):
                place, node = len(node), node + below
                names = varints(*[0] * (n - 1), *[1] * n, *[1] * n) + bytes(range(n))
                below_all = varints(*[0] * n, *[place] * n, *[len(below)] * n, *[1] * 3 * n)
                content = bytes([height]) + FILES + varint(n) + names + below_all
                below = sealed(NODE_MAGIC, content)
            place, node = len(node), node + below
            top = manifest(len(below), height, place)
        case "a node far behind its file":  # Farther than a file can be sought in.
            top = manifest(0, place=1 << 63)
        case "a file outside of the folder":
            path = b"../d/data"
            files = varints(1, len(path), 0) + path
            top = manifest(100, files=files)
        case "a manifest in several files":
            top = sealed(MANIFEST_MAGIC, CONFIG[:16] + b"\1" + CONFIG[17:] + varint(0))
    (folder / "d" / "data").write_bytes(node + bytes(outside))
    (folder / MANIFEST).write_bytes(top or manifest(len(node)))


MORE = "its index would take far more memory than it has bytes"
TWICE = "its index refers to more bytes than the files hold"
HOSTILE = {
    "a manifest that unpacks to very much": MORE,
    "a node that unpacks to very much": MORE,
    "a node of very many entries": MORE,
    "very long names in a few bytes": MORE,
    "very long paths in a few bytes": MORE,
    "very large values in a few bytes": MORE,
    "the same bytes as the values of many names": TWICE,
    "the same branch again and again": TWICE,
    "a node far behind its file": "a node of its index lies behind the end of its file",
    "a file outside of the folder": "of its index lies outside of the folder",
    "a manifest in several files": "its index is in several files",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_index_that_is_made_to_mislead_is_refused_without_memory(tmp_path, kind, memory_within):
    write_hostile(tmp_path, kind)
    with memory_within(MOST_MEMORY), pytest.raises(ValueError, match=HOSTILE[kind]):
        check_index(tmp_path)


@pytest.mark.parametrize("n", [300, pytest.param(5000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("compression", [None, {"id": "zstd"}], ids=["plain", "packed"])
def test_damage_whose_checksum_is_right_is_refused_or_harmless(
    tmp_path, compression, n, memory_within
):
    values = {f"params/{i}/kernel": bytes([i]) * 40 * i for i in range(40)}
    write_store(tmp_path, values, compression=compression, max_decoded_node_bytes=2000)
    nodes = [path for path in (tmp_path / "d").iterdir() if b"\x0c\xdb" in path.read_bytes()]
    files, rng, n_refused = [tmp_path / MANIFEST, *nodes], np.random.default_rng(n), 0
    for i in range(n):
        path = files[i % len(files)]
        whole = path.read_bytes()
        data = bytearray(whole)
        for position in rng.integers(len(data), size=rng.integers(1, 4)):
            data[position] = rng.choice([0, 1, 127, 128, 255, data[position] ^ 1])
        path.write_bytes(data)
        with memory_within(MOST_MEMORY):
            try:
                check_index(tmp_path)
            except ValueError as error:
                n_refused += 1
                assert "index" in str(error) or "Zstandard" in str(error)
        path.write_bytes(whole)
    assert n_refused > n / 10
    check_index(tmp_path)

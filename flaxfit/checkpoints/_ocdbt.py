"""What the index of a folder of arrays, in TensorStore's OCDBT format, would take to be read.

TensorStore believes an index: a few bytes can have it take any memory, by what they unpack to and
by the lengths that they state. So these are added up here before it opens the folder.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flaxfit.checkpoints import _zstd

MANIFEST = "manifest.ocdbt"
"""The file in which the index begins."""
_DATA = "d"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_ALWAYS_FINE = 1 << 27
# An entry takes less than what it tells of: values of more than 1 KB lie outside, in files. Smaller
# ones lie among the entries, and are as hard to pack as numbers are. Only zeros, such as those of
# an optimizer that has just begun, pack well: half a million of them are fine in any case, and
# beyond that names and devices stand in plain words beside the index.
_MOST_GROWTH = 32
_ENTRY_BYTES = 128
"""What TensorStore takes for an entry of the index, names and values aside."""
_NOWHERE = 2**64 - 1


def check_index(folder: Path) -> int:
    """Refuses what TensorStore must not open; how many bytes of values lie in the index itself.

    Raises:
      ValueError: the index is damaged, leads out of the folder, or would take far more memory than
        it has bytes.
    """
    try:
        return _Index(folder).inline
    except (LookupError, OSError, OverflowError) as error:
        if isinstance(error, PermissionError):
            raise  # No fault of the file.
        raise ValueError(f"its index is damaged ({error})") from error


class _Node(NamedTuple):
    """A node of the tree: its place, and what is known of it from the one above."""

    file: "_File"
    offset: int
    length: int
    height: int
    n_prefix: int


class _File(NamedTuple):
    """A file of a table of files: its path, and the part of it that those below begin with."""

    path: str
    base: str


class _Index:
    """Walks the newest version of an index, and keeps account of what it would take."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        plain = sum(size for file, size in sizes.items() if file.parent.name != _DATA)
        self.stored = sum(sizes.values())
        """What of the bytes in the files nothing has referred to yet."""
        self.room = _ALWAYS_FINE + self.stored + _MOST_GROWTH * plain
        """What memory may still be taken."""
        self.inline = 0
        nodes = list(self._roots((folder / MANIFEST).read_bytes()))
        while nodes:
            nodes += self._children(nodes.pop())

    def _roots(self, data: bytes) -> Iterator[_Node]:
        body = _Body(data, _MANIFEST_MAGIC, self)
        body.take(16)
        kind, _, _ = body.varints(3)
        _require(kind == 0, "its index is in several files")
        body.take(1)
        if body.varint():
            body.take(4)
        files = self._files(body, "")
        n = body.varint()
        _require(n > 0, "its index has no version")
        self.take_memory(n * _ENTRY_BYTES)
        body.varints(n)
        heights = body.take(n)
        ids, offsets, lengths = (body.varints(n) for _ in range(3))
        if (offsets[-1], lengths[-1]) != (_NOWHERE, _NOWHERE):
            yield _Node(files[ids[-1]], offsets[-1], lengths[-1], heights[-1], 0)

    def _children(self, node: _Node) -> Iterator[_Node]:
        self._refer_to(node.length)
        self.room += _MOST_GROWTH * node.length
        path = self.folder / node.file.path
        _require(path.is_file(), f"the file {node.file.path:.100} of its index is missing")
        size = path.stat().st_size
        _require(node.offset <= size, "a node of its index lies behind the end of its file")
        with path.open("rb") as file:
            file.seek(node.offset)
            body = _Body(file.read(node.length), _NODE_MAGIC, self)
        height = body.take(1)[0]
        _require(height == node.height, "a node of its index has another height")
        files = self._files(body, node.file.base)
        n = body.varint()
        _require(n > 0, "a node of its index is empty")
        self.take_memory(n * _ENTRY_BYTES)
        begins, ends = [0, *body.varints(n - 1)], body.varints(n)
        shared = body.varints(n) if height else []
        names, before = [], 0
        for begin, end in zip(begins, ends, strict=True):
            _require(begin <= before, "a name in its index is damaged")
            before = begin + end
            names.append(before)
        # The whole names, as they are when somebody lists them.
        self.take_memory(sum(names) + n * node.n_prefix)
        body.take(sum(ends))
        if height:
            ids, offsets, lengths = (body.varints(n) for _ in range(3))
            for i in range(n):
                _require(shared[i] <= names[i], "a name in its index is damaged")
                prefix = node.n_prefix + shared[i]
                yield _Node(files[ids[i]], offsets[i], lengths[i], height - 1, prefix)
        else:
            sizes = body.varints(n)
            self._values(sizes, body.take(n))

    def _values(self, sizes: Sequence[int], is_outside: bytes) -> None:
        outside = sum(size for size, where in zip(sizes, is_outside, strict=True) if where)
        self._refer_to(outside)
        inside = sum(sizes) - outside
        self.take_memory(inside)
        self.inline += inside

    def _files(self, body: "_Body", above: str) -> list[_File]:
        n = body.varint()
        self.take_memory(n * _ENTRY_BYTES)
        begins, ends, bases = [0, *body.varints(n - 1)], body.varints(n), body.varints(n)
        self.take_memory(sum(begins) + sum(ends) + n * len(above))
        files, path = [], b""
        for begin, end, base in zip(begins, ends, bases, strict=True) if n else ():
            path = path[:begin] + body.take(end)
            text = above + path.decode(errors="replace")
            _require("\0" not in text, "the name of a file of its index is damaged")
            is_inside = (self.folder / text).resolve().is_relative_to(self.folder)
            _require(is_inside, f"the file {text:.100} of its index lies outside of the folder")
            files.append(_File(text, above + path[:base].decode(errors="replace")))
        return files

    def _refer_to(self, n_bytes: int) -> None:
        self.stored -= n_bytes
        _require(self.stored >= 0, "its index refers to more bytes than the files hold")

    def take_memory(self, n_bytes: int) -> None:
        """Counts memory that TensorStore would take."""
        self.room -= n_bytes
        _require(self.room >= 0, "its index would take far more memory than it has bytes")


class _Body:
    """What a manifest or a node holds, unpacked as far as it is read."""

    def __init__(self, data: bytes, magic: int, index: _Index) -> None:
        is_whole = int.from_bytes(data[4:12], "little") == len(data) > 14
        is_known = int.from_bytes(data[:4], "big") == magic
        _require(is_whole and is_known, "a node of its index is damaged")
        version, is_packed, content = data[12], data[13], data[14:-4]
        _require(version == 0 and is_packed < 2, "a node of its index is of an unknown kind")
        self.index, self.at = index, 0
        self.data = bytearray(b"" if is_packed else content)
        self.more = _zstd.unpack(content, self.data) if is_packed else iter(())

    def take(self, n: int) -> bytes:
        """The next bytes."""
        while len(self.data) < self.at + n:
            before = len(self.data)
            _require(next(self.more, "end") is None, "a node of its index is cut short")
            self.index.take_memory(len(self.data) - before)
        self.at += n
        return bytes(self.data[self.at - n : self.at])

    def varint(self) -> int:
        """The next integer, of seven bits a byte."""
        value, shift = 0, 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            _require(shift < 70, "a number in its index is damaged")

    def varints(self, n: int) -> list[int]:
        """The next integers."""
        return [self.varint() for _ in range(n)]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)

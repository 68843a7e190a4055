"""TensorFlow's checkpoints, read without TensorFlow: those it wrote itself, and damaged ones."""

import asyncio
import json
import shutil
import struct
import sys

import numpy as np
import pytest
from weight_files import assert_holds

from flaxfit.importers import UnreadableFile, load_tf_ckpt
from flaxfit.importers._crc32c import crc32c
from flaxfit.importers._table import read_table

INDEX = "model.ckpt-1000.index"
DATA = "model.ckpt-1000.data-00000-of-00002"


@pytest.mark.parametrize("name", ["small_t5", "partitioned", "dtypes"])
def test_a_kept_checkpoint_is_read_exactly(kept, truth, name):
    assert_holds(load_tf_ckpt(kept / name), truth[name]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["small_t5", "bfloat16", "per_layer", "factored", "decoder_only", "dtypes", "partitioned"],
)
def test_what_tensorflow_writes_is_read_exactly(written, truth, name):
    assert_holds(load_tf_ckpt(written / name), truth[name]())


def test_arrays_can_be_read_at_the_same_time(kept, truth):
    async def read_all():
        arrays = load_tf_ckpt(kept / "small_t5")
        return dict(
            zip(
                arrays,
                await asyncio.gather(*(a.get_async() for a in arrays.values())),
                strict=True,
            )
        )

    for name, array in asyncio.run(read_all()).items():
        np.testing.assert_array_equal(array, truth["small_t5"]()[name])


@pytest.mark.parametrize("name", ["model.ckpt-1000", INDEX, DATA])
def test_a_prefix_or_any_of_its_files_names_the_checkpoint(kept, name):
    assert "global_step" in load_tf_ckpt(kept / "small_t5" / name)
    assert "global_step" in load_tf_ckpt(str(kept / "small_t5" / name))


def test_a_copied_folder_is_read_even_where_the_original_still_exists(kept, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    shutil.copytree(kept / "small_t5", original)
    text = f'model_checkpoint_path: "{original}/model.ckpt-1000"\n'
    (original / "checkpoint").write_text(text)
    shutil.copytree(original, copy)
    damage(original / DATA, 0)
    assert load_tf_ckpt(copy)["global_step"].get() == 1000


def test_a_folder_without_a_checkpoint_file_is_read_if_there_is_no_choice(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / "checkpoint").unlink()
    assert "global_step" in load_tf_ckpt(folder)
    shutil.copy(folder / INDEX, folder / "model.ckpt-2000.index")
    with pytest.raises(FileNotFoundError, match="one of these: model.ckpt-1000, model.ckpt-2000"):
        load_tf_ckpt(folder)


def test_a_missing_checkpoint_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder, or a prefix"):
        load_tf_ckpt(tmp_path / "model.ckpt-1")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in the folder"):
        load_tf_ckpt(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "../../etc/model"')
    with pytest.raises(FileNotFoundError, match="model.index"):
        load_tf_ckpt(tmp_path)


def damage(path, position, bits=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def test_a_changed_bit_in_the_data_is_found(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    for data in folder.glob("*.data-*"):
        damage(data, data.stat().st_size // 2)
    arrays = load_tf_ckpt(folder)
    failures = 0
    for array in arrays.values():
        try:
            array.get()
        except UnreadableFile as error:
            assert "checksum" in str(error)
            failures += 1
    assert failures == 2


def test_a_data_file_that_is_cut_short_is_found(kept, tmp_path):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-1])
    arrays = load_tf_ckpt(folder)
    with pytest.raises(UnreadableFile, match="cut short"):
        for array in arrays.values():
            array.get()


@pytest.mark.parametrize("size", [0, 7, 47, 48, 500, 4000])
def test_an_index_that_is_cut_short_is_unreadable(kept, tmp_path, size):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:size])
    with pytest.raises(UnreadableFile, match="TensorFlow checkpoint"):
        load_tf_ckpt(folder)


@pytest.mark.slow
def test_it_imports_no_tensorflow(kept, run_child):
    script = (
        "import json, sys\nfrom flaxfit.importers import load_tf_ckpt\n"
        f"step = load_tf_ckpt({str(kept / 'small_t5')!r})['global_step'].get()\n"
        "print(json.dumps([int(step), 'tensorflow' in sys.modules]))"
    )
    done = run_child([sys.executable, "-c", script])
    assert json.loads(done.stdout) == [1000, False]


# An own writer of the parts that TensorFlow 2.21 does not write: compressed blocks.


def varint(number):
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def snappy(data):
    """Compresses with literals and copies of all three kinds, some into their own output."""
    result, at, literal = bytearray(varint(len(data))), 0, bytearray()

    def flush():
        if literal:
            size = len(literal) - 1
            result.extend([size << 2] if size < 60 else [61 << 2, size & 0xFF, size >> 8])
            result.extend(literal)
            literal.clear()

    while at < len(data):
        start = data[: at + 3].rfind(data[at : at + 4]) if at else -1
        length = 0
        while start >= 0 and length < 64 and at + length < len(data):
            if data[start + length] != data[at + length]:
                break
            length += 1
        if length < 4:
            literal.append(data[at])
            at += 1
            continue
        flush()
        offset = at - start
        if length < 12 and offset < 2048:
            result.extend([(offset >> 8) << 5 | (length - 4) << 2 | 1, offset & 0xFF])
        elif at % 2:
            result.extend([(length - 1) << 2 | 2, *struct.pack("<H", offset)])
        else:
            result.extend([(length - 1) << 2 | 3, *struct.pack("<I", offset)])
        at += length
    flush()
    return bytes(result)


def block_of(entries):
    """A block with shared prefixes and one restart point."""
    block, last = bytearray(), b""
    for key, value in entries:
        same = 0
        while same < min(len(key), len(last)) and key[same] == last[same]:
            same += 1
        block += varint(same) + varint(len(key) - same) + varint(len(value)) + key[same:] + value
        last = key
    return bytes(block) + struct.pack("<II", 0, 1)


def table_of(entries, compress, block_size=20):
    """A table in several blocks."""
    file, index = bytearray(), []

    def append(block):
        content = compress(block) + bytes([compress is snappy])
        handle = varint(len(file)) + varint(len(content) - 1)
        checksum = crc32c(content)
        masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
        file.extend(content + struct.pack("<I", masked))
        return handle

    for start in range(0, len(entries), block_size):
        part = entries[start : start + block_size]
        index.append((part[-1][0], append(block_of(part))))
    footer = append(block_of([])) + append(block_of(index))
    return bytes(file) + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


@pytest.mark.parametrize("compress", [bytes, snappy])
def test_tables_of_several_blocks_compressed_or_not_are_read(kept, tmp_path, truth, compress):
    folder = shutil.copytree(kept / "small_t5", tmp_path / "copy")
    entries = list(read_table((folder / INDEX).read_bytes()))
    table = table_of(entries, compress)
    assert list(read_table(table)) == entries
    (folder / INDEX).write_bytes(table)
    assert_holds(load_tf_ckpt(folder), truth["small_t5"]())


def test_compressed_tables_are_smaller_here(kept):
    entries = list(read_table((kept / "small_t5" / INDEX).read_bytes()))
    assert len(table_of(entries, snappy)) < len(table_of(entries, bytes))


def entry(*, dtype=1, shape=(), size=4, offset=0):
    dims = b"".join(b"\x12" + varint(len(varint(n)) + 1) + b"\x08" + varint(n) for n in shape)
    content = b"\x08" + varint(dtype) + b"\x12" + varint(len(dims)) + dims
    return content + b"\x20" + varint(offset) + b"\x28" + varint(size)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (entry(shape=(10**6, 10**6), size=4), "the size of a is wrong"),
        (entry(shape=(2**64 - 1,), size=4), "the size of a is wrong"),
        (entry(shape=(10**6, 10**6), size=4 * 10**12), None),
        (entry(dtype=99), "dtype number 99"),
        (b"\x08" + b"\xff" * 12, "64 bits"),
        (b"\x12\xff\xff\xff\xff\x0f", "cut short"),
    ],
)
def test_sizes_that_the_files_cannot_hold_are_refused(tmp_path, value, words):
    table = table_of([(b"", b"\x08\x01"), (b"a", value)], bytes)
    (tmp_path / "m.index").write_bytes(table)
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(4))
    with pytest.raises(UnreadableFile, match=words or "cut short"):
        load_tf_ckpt(tmp_path / "m")["a"].get()

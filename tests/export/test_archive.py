import json
import random
import zipfile
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from marks import slow

from flaxfit import export
from flaxfit.export import InputSpec, JaxModule, _archive

pytestmark = pytest.mark.skipif(
    find_spec("flatbuffers") is None, reason="flatbuffers is not installed"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file that loads."""
    path = tmp_path_factory.mktemp("archive") / "net.stablehlo"
    params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    module = JaxModule(params, lambda p, x: x @ p["w"] + p["b"], input_spec=InputSpec(("b", 3)))
    export.save(module, path, gradients=False)
    return path


def parts_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_parts(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x05\x06" + bytes(18)])
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="Cannot load .*not written by flaxfit.export.save"):
        export.load(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match="net.stablehlo"):
        export.load(path)


def test_a_later_format_asks_for_a_later_flaxfit(whole, monkeypatch):
    monkeypatch.setattr(_archive, "VERSION", 0)
    with pytest.raises(ValueError, match="version 1.*up to 0.*newer flaxfit"):
        export.load(whole)


def test_a_compressed_bomb_is_refused_before_it_is_read(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("description.json", "{}" + " " * 10_000_000)
    with pytest.raises(ValueError, match="compressed"):
        export.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 40]},
        slow({"shape": [-1]}),
        slow({"shape": [1 << 70, 0, 5]}),
        slow({"shape": "x"}),
        {"dtype": "O"},
        slow({"dtype": "i4,i4"}),
        slow({"dtype": "nope"}),
        {"name": ["a"]},
    ],
)
def test_a_lying_description_is_refused(whole, path, change):
    parts = parts_of(whole)
    record = json.loads(parts["description.json"])
    record["arrays"][0].update(change)
    write_parts(path, {**parts, "description.json": json.dumps(record)})
    with pytest.raises(ValueError, match="Cannot load"):
        export.load(path)


def test_a_damaged_file_never_loads(whole, path):
    content = whole.read_bytes()
    with zipfile.ZipFile(whole) as archive:
        members = archive.infolist()
    chance = random.Random(0)
    for member in members * 10:
        n_extra = int.from_bytes(content[member.header_offset + 28 :][:2], "little")
        start = member.header_offset + 30 + len(member.filename) + n_extra
        at = start + chance.randrange(member.file_size)
        bad = bytearray(content)
        bad[at] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="Cannot load"):
            export.load(path)
    for size in (chance.randrange(len(content)) for _ in range(30)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="Cannot load"):
            export.load(path)


@pytest.mark.parametrize(
    "program", [slow(b""), slow(bytes(200)), slow(b"\xff" * 200), b"\x10\0\0\0" + bytes(40)]
)
def test_a_program_that_is_none_is_refused(whole, path, program):
    write_parts(path, {**parts_of(whole), "programs/0": program})
    with pytest.raises(ValueError, match=f"Cannot load .*which jax {jax.__version__} wrote"):
        export.load(path)

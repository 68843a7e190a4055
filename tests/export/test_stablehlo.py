import json
import os
import random
import sys
import zipfile
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit import export
from flaxfit.export import InputSpec, JaxModule, _archive
from flaxfit.export import _stablehlo as stablehlo

needs_flatbuffers = pytest.mark.skipif(
    find_spec("flatbuffers") is None, reason="flatbuffers is not installed"
)
pytestmark = needs_flatbuffers


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.stablehlo"


@pytest.mark.slow
def test_what_is_loaded_computes_the_same(module, path, net, variables, x, capsys):
    report = export.save(module, path)
    loaded = export.load(path)
    for n in (1, 2, 4):
        np.testing.assert_allclose(loaded(x[:n]), net.apply(variables, x[:n]), rtol=1e-5, atol=1e-6)
    assert report.max_error < 1e-6
    assert report.inputs == ("batch=1", "batch=5")
    assert str(report) in capsys.readouterr().err
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.fixture
def endless():
    """A method that JAX cannot differentiate: how long it runs depends on the values."""

    def double(params, x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: params * y, x)

    return JaxModule(np.float32(2), double, input_spec=InputSpec((2,)))


def test_a_method_without_a_gradient_is_saved_without(endless, path):
    with pytest.raises(ValueError, match=r"while_loop.* Pass gradients=False"):
        export.save(endless, path)
    with pytest.raises(ValueError, match=r"while_loop.* Pass gradients=False"):
        export.save(endless, path, stablehlo_version=None)
    export.save(endless, path, gradients=False)
    assert export.load(path)(np.float32([1, 2])).tolist() == [64, 128]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A method of real numbers, small whole numbers and a pair."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.stablehlo"
    specs = (InputSpec(("n", 2)), InputSpec(("n",), "uint8"), [InputSpec(()), InputSpec(())])
    module = JaxModule({}, lambda p, x, i, ab: x.sum(1) + i + ab[0] - ab[1], input_spec=specs)
    export.save(module, path)
    return export.load(path)


def test_inputs_are_cast_to_the_dtypes_of_the_method(mixed):
    assert mixed([[1, 2], [3, 4]], [7, 9], [5, np.float64(3)]).tolist() == [12, 18]
    assert mixed(np.ones((1, 2), bool), jnp.int32([255]), [True, jnp.bfloat16(1)])[0] == 257
    assert jax.grad(lambda a: mixed.apply({}, [[0, 0]], [1], [a, 0]).sum())(1.0) == 1


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (([[1, 2]], [1.0], [0, 0]), TypeError, r"takes uint8, got float64.*astype\('uint8'\)"),
        (([[1, 2]], [256], [0, 0]), ValueError, "takes uint8, which does not hold .* 256 to 256"),
        (([["a", "b"]], [1], [0, 0]), TypeError, "takes float32, got <U1"),
        ((np.ones((0, 2)), np.ones(0, int), [0, 0]), ValueError, r"1 or more, .* \(0, 2\)"),
        (([[1, 2]], [1]), ValueError, r"takes float32\[n, 2\], uint8\[n\].*, got \("),
        ((np.ones((1, 2)), [1], (0, 0)), ValueError, r"got \('float64\[1, 2\]'"),
    ],
)
def test_inputs_that_a_method_does_not_take_are_named(mixed, inputs, error, message):
    with pytest.raises(error, match=message):
        mixed(*inputs)


@pytest.mark.slow
def test_the_file_stands_alone(module, path, x, run_child):
    export.save(module, path)
    script = (
        "import sys\nsys.modules['flax'] = None\n"
        "import numpy as np\nfrom jax import export\nimport json, zipfile\n"
        f"archive = zipfile.ZipFile({str(path)!r})\n"
        "about = json.loads(archive.read('description.json'))\n"
        "raw, params, at = archive.read('weights'), {}, 0\n"
        "for a in about['arrays']:\n"
        "    n = int(np.prod(a['shape']))\n"
        "    params[a['name']] = np.frombuffer(raw, a['dtype'], n, at).reshape(a['shape'])\n"
        "    at += params[a['name']].nbytes\n"
        "program = export.deserialize(bytearray(archive.read('programs/0')))\n"
        f"x = np.array({x.tolist()}, np.float32)\n"
        "print(json.dumps(np.asarray(program.call(params, (x,))).tolist()))\n"
    )
    done = run_child([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    want = module.jax_methods[JaxModule.DEFAULT_METHOD_KEY](x)
    np.testing.assert_allclose(json.loads(done.stdout), want, rtol=1e-5, atol=1e-6)


def test_it_runs_on_several_platforms_and_says_who_wrote_it(module, path):
    export.save(module, path)
    loaded = export.load(path)
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    assert loaded.versions["jax"] == jax.__version__
    assert "float32[batch, 3]" in repr(loaded)


def test_a_file_for_another_platform_is_written_but_not_compared(module, path, capsys):
    export.save(module, path, platforms=("tpu",))
    assert "not compared" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tpu"):
        export.load(path)(np.ones((1, 3)))


@pytest.mark.slow
def test_gradients_are_those_of_the_source(module, path, net, variables, x):
    export.save(module, path)
    loaded = export.load(path)
    got = jax.grad(lambda p: loaded.apply(p, x).sum())(loaded.params)
    want = jax.jit(jax.grad(lambda v: net.apply(v, x).sum()))(variables)
    for (name, g), w in zip(sorted(got.items()), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5, err_msg=name)


def test_gradients_may_be_left_out(module, path, x):
    with_gradients = export.save(module, path).n_bytes
    assert export.save(module, path, gradients=False).n_bytes < with_gradients
    loaded = export.load(path)
    with pytest.raises(ValueError, match="VJP|vjp"):
        jax.grad(lambda p: loaded.apply(p, x).sum())(loaded.params)


@pytest.mark.slow
def test_other_weights_and_methods_can_be_used(path):
    module = JaxModule(
        {"w": np.float32(2)},
        {"double": lambda p, x: p["w"] * x, "both": lambda p, *, x, y: {"sum": x + p["w"] * y}},
        input_spec={"double": InputSpec(("b",)), "both": dict.fromkeys("xy", InputSpec(("b",)))},
    )
    export.save(module, path)
    loaded = export.load(path)
    one = np.ones(2, np.float32)
    assert loaded.methods["both"](x=one, y=one)["sum"].tolist() == [3, 3]
    assert loaded.apply({"w": np.float32(5)}, one, method="double").tolist() == [5, 5]
    with pytest.raises(ValueError, match="Name one of the methods.*double, both"):
        loaded(one)
    with pytest.raises(ValueError, match="no method 'triple', only double, both"):
        loaded.apply({}, one, method="triple")


def test_integers_halves_and_several_dimensions_go_through(path):
    params = {"table": jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3), "count": np.int32(7)}
    module = JaxModule(
        params,
        lambda p, ids: (p["table"][ids], ids + p["count"]),
        input_spec=InputSpec(("b", "t"), "int32", constraints=("t >= 2",)),
    )
    export.save(module, path)
    rows, counts = export.load(path)(np.array([[3, 1]]))
    assert rows.dtype == jnp.bfloat16
    assert rows[0].tolist() == [[9, 10, 11], [3, 4, 5]]
    assert counts.tolist() == [[10, 8]]


def test_a_wrong_shape_is_an_error_that_shows_both(module, path):
    export.save(module, path)
    with pytest.raises(ValueError, match=r"\(batch, 3\).*\(2, 4\)"):
        export.load(path)(np.ones((2, 4)))


@pytest.mark.parametrize(
    "apply",
    [lambda p, x: x if x.shape[0] > 8 else p * x, lambda p, x: p * x.reshape(len(x), -1)],
    ids=["comparison", "len"],
)
def test_code_that_depends_on_a_symbolic_size_is_refused_in_words(path, apply):
    module = JaxModule(1.0, apply, input_spec=InputSpec(("batch",)))
    with pytest.raises(ValueError, match="symbolic dimensions \\['batch'\\].*fixed sizes"):
        export.save(module, path)
    assert not path.exists()


def test_a_file_that_differs_from_its_source_is_removed(module, path, monkeypatch):
    def wrong(temporary):
        loaded = export.load(temporary)
        loaded.params["params.Dense_1.bias"] += 1e-2
        return loaded

    monkeypatch.setattr(stablehlo, "load", wrong)
    with pytest.raises(ValueError, match="Nothing was written.*rtol=0.0001"):
        export.save(module, path)
    assert list(path.parent.iterdir()) == []


def test_a_failed_export_leaves_the_old_file(module, path, monkeypatch):
    path.write_text("old")
    monkeypatch.setattr(stablehlo, "load", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.save(module, path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_samples_take_the_place_of_random_inputs(module, path, x):
    report = export.save(module, path, samples=[x[:2], (x,)])
    assert report.inputs == ("sample 0", "sample 1")


def test_a_folder_is_not_overwritten_by_a_file(module, tmp_path):
    with pytest.raises(FileExistsError, match="it is a folder"):
        export.save(module, tmp_path)


def test_old_versions_of_stablehlo_are_written(module, path):
    export.save(module, path)
    with zipfile.ZipFile(path) as archive:
        assert b"StableHLO_v1.13.0" in archive.read("programs/0")
    export.save(module, path, stablehlo_version=None)
    assert float(export.load(path)(np.zeros((1, 3))).sum()) != 0
    with pytest.raises(ValueError, match="StableHLO 0.0.1 cannot express"):
        export.save(module, path, stablehlo_version="0.0.1")


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x05\x06" + bytes(18)])
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="Cannot load .*not written by flaxfit.export.save"):
        export.load(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match="net.stablehlo"):
        export.load(path)


def test_a_later_format_asks_for_a_later_flaxfit(module, path, monkeypatch):
    monkeypatch.setattr(_archive, "VERSION", 2)
    export.save(module, path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2.*newer flaxfit"):
        export.load(path)


def test_a_compressed_bomb_is_refused_before_it_is_read(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("description.json", "{}" + " " * 10_000_000)
    with pytest.raises(ValueError, match="compressed"):
        export.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 40]},
        {"shape": [-1]},
        {"shape": [1 << 70, 0, 5]},
        {"shape": "x"},
        {"dtype": "O"},
        {"dtype": "i4,i4"},
        {"dtype": "nope"},
        {"name": ["a"]},
    ],
)
def test_a_lying_description_is_refused(module, path, change):
    export.save(module, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    record = json.loads(parts["description.json"])
    record["arrays"][0].update(change)
    parts["description.json"] = json.dumps(record).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(ValueError, match="Cannot load"):
        export.load(path)


@pytest.mark.parametrize("program", [b"", bytes(200), b"\xff" * 200, b"\x10\0\0\0" + bytes(40)])
def test_a_program_that_is_none_is_refused(module, path, program):
    export.save(module, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["programs/0"] = program
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(ValueError, match=f"Cannot load .*which jax {jax.__version__} wrote"):
        export.load(path)


def test_a_damaged_file_never_loads(module, path):
    export.save(module, path, gradients=False)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        contents = [
            (m.header_offset + 30 + len(m.filename), m.file_size) for m in archive.infolist()
        ]
    chance = random.Random(0)
    for start, size in contents * 10:
        at = start + chance.randrange(size)
        bad = bytearray(whole)
        bad[at] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="Cannot load"):
            export.load(path)
    for size in (chance.randrange(len(whole)) for _ in range(30)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="Cannot load"):
            export.load(path)


def test_without_flatbuffers_the_extra_is_named(module, path, monkeypatch):
    monkeypatch.setattr(stablehlo, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'flaxfit\[export\]'"):
        export.save(module, path)
    with pytest.raises(ImportError, match=r"pip install 'flaxfit\[export\]'"):
        export.load(os.devnull)

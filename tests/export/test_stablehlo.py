import json
import os
import sys
import zipfile
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit import export
from flaxfit.export import InputSpec, JaxModule
from flaxfit.export import _stablehlo as stablehlo

pytestmark = pytest.mark.skipif(
    find_spec("flatbuffers") is None, reason="flatbuffers is not installed"
)


@pytest.fixture(scope="module")
def saved(net, variables, tmp_path_factory):
    """The path and the report of a file that is written once."""
    path = tmp_path_factory.mktemp("stablehlo") / "net.stablehlo"
    module = JaxModule(variables, net.apply, input_spec=InputSpec(("batch", 3)))
    return path, export.save(module, path)


@pytest.mark.slow
def test_what_is_loaded_computes_the_same_and_says_who_wrote_it(saved, apply, variables, x):
    path, report = saved
    loaded = export.load(path)
    for n in (1, 2, 4):
        np.testing.assert_allclose(loaded(x[:n]), apply(variables, x[:n]), rtol=1e-5, atol=1e-6)
    assert report.max_error < 1e-6 and report.inputs == ("batch=1", "batch=5")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    assert loaded.versions["jax"] == jax.__version__
    assert "float32[batch, 3]" in repr(loaded)


@pytest.mark.slow
def test_gradients_are_those_of_the_source(saved, net, variables, x):
    loaded = export.load(saved[0])
    got = jax.grad(lambda p: loaded.apply(p, x).sum())(loaded.params)
    want = jax.jit(jax.grad(lambda v: net.apply(v, x).sum()))(variables)
    for (name, g), w in zip(sorted(got.items()), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_gradients_may_be_left_out_and_samples_given(saved, module, path, x, capsys):
    report = export.save(module, path, gradients=False, samples=[x[:2], (x,)])
    assert report.inputs == ("sample 0", "sample 1")
    assert str(report) in capsys.readouterr().err
    assert report.n_bytes < saved[1].n_bytes
    loaded = export.load(path)
    with pytest.raises(ValueError, match="VJP|vjp"):
        jax.grad(lambda p: loaded.apply(p, x).sum())(loaded.params)


@pytest.mark.slow
def test_old_versions_of_stablehlo_are_written(saved, module, path):
    with zipfile.ZipFile(saved[0]) as archive:
        assert b"StableHLO_v1.13.0" in archive.read("programs/0")
    export.save(module, path, stablehlo_version=None)
    assert float(export.load(path)(np.zeros((1, 3))).sum()) != 0
    with pytest.raises(ValueError, match="StableHLO 0.0.1 cannot express"):
        export.save(module, path, stablehlo_version="0.0.1")


@pytest.mark.slow
def test_the_file_stands_alone(saved, apply, variables, x, run_child):
    script = (
        "import sys\nsys.modules['flax'] = None\n"
        "import numpy as np\nfrom jax import export\nimport json, zipfile\n"
        f"archive = zipfile.ZipFile({str(saved[0])!r})\n"
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
    want = apply(variables, x)
    np.testing.assert_allclose(json.loads(done.stdout), want, rtol=1e-5, atol=1e-6)


@pytest.fixture
def endless():
    """A method that JAX cannot differentiate: how long it runs depends on the values."""

    def double(params, x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: params * y, x)

    return JaxModule(np.float32(2), double, input_spec=InputSpec((2,)))


def test_a_method_without_a_gradient_is_saved_without(endless, path):
    for version in ("1.13.0", None):
        with pytest.raises(ValueError, match=r"while_loop.* Pass gradients=False"):
            export.save(endless, path, stablehlo_version=version)
    export.save(endless, path, gradients=False)
    assert export.load(path)(np.float32([1, 2])).tolist() == [64, 128]


def test_a_file_for_another_platform_is_written_but_not_compared(double, path, capsys):
    export.save(double, path, platforms=("tpu",))
    assert "not compared" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tpu"):
        export.load(path)(np.ones(1))


@pytest.mark.slow
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


def test_a_file_that_differs_from_its_source_is_removed(double, path, monkeypatch):
    def wrong(temporary):
        loaded = export.load(temporary)
        loaded.params["params"] += 1e-2
        return loaded

    monkeypatch.setattr(stablehlo, "load", wrong)
    with pytest.raises(ValueError, match="Nothing was written.*rtol=0.0001"):
        export.save(double, path)
    assert list(path.parent.iterdir()) == []


def test_a_failed_export_leaves_the_old_file(double, path, monkeypatch):
    path.write_text("old")
    monkeypatch.setattr(stablehlo, "load", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.save(double, path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_not_overwritten_by_a_file(module, tmp_path):
    with pytest.raises(FileExistsError, match="it is a folder"):
        export.save(module, tmp_path)


def test_without_flatbuffers_the_extra_is_named(module, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[export\]"'):
        export.save(module, path)
    with pytest.raises(ImportError, match=r'pip install "flaxfit\[export\]"'):
        export.load(os.devnull)

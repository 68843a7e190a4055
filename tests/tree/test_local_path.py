"""URLs in the place of paths: refused wherever something would be read or written."""

from pathlib import Path

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit import callbacks, checkpoints, export, importers
from flaxfit.loop._compilation_cache import use_compilation_cache
from flaxfit.tree._checks import local_path

URL = "gs://bucket/run.safetensors"
MODEL = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse")
X = np.ones((4, 2), np.float32)
MODULE = export.JaxModule({}, lambda params, x: x, input_spec=export.InputSpec((2,)))


@pytest.mark.parametrize("path", ["run", "~/run", "./a:b/run", "C:/run", Path("x/gs:")])
def test_paths_of_this_machine_are_taken(path):
    assert local_path(path) == Path(path).expanduser()


@pytest.mark.parametrize(
    "use",
    [
        lambda: local_path(Path("s3://bucket/run")),
        lambda: MODEL.fit(X, X[:, :1], checkpoint_dir=URL, verbose=0),
        lambda: MODEL.load(URL),
        lambda: MODEL.load_weights(URL),
        lambda: checkpoints.save_weights(URL, {"w": X}),
        lambda: checkpoints.CheckpointFileWriter(URL),
        lambda: checkpoints.CheckpointFileReader(URL, lambda: None),
        lambda: checkpoints.latest(URL),
        lambda: importers.load(URL),
        lambda: export.save(MODULE, URL),
        lambda: export.load(URL),
        lambda: callbacks.CSVLogger(URL),
        lambda: callbacks.JSONLogger(URL),
        lambda: callbacks.Profiler(URL),
        lambda: callbacks.TensorBoardLogger(URL),
        lambda: callbacks.Export(URL),
        lambda: use_compilation_cache(URL),
        lambda: importers.load_msgpack(URL),
        lambda: importers.load_npz(URL),
        lambda: importers.load_orbax(URL),
        lambda: importers.load_safetensors(URL),
        lambda: importers.load_t5x(URL),
        lambda: importers.load_tf_ckpt(URL),
    ],
)
def test_a_url_is_refused_before_anything_is_made(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Cannot use the URL '(gs|s3):.*Mount the store"):
        use()
    assert not list(tmp_path.iterdir())

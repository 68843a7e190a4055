"""Tables of embeddings, read back with the projector of TensorBoard."""

import sys
import types
from importlib.util import find_spec

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from marks import diagonal

import flaxfit as ff
from flaxfit.callbacks import TensorBoardLogger

# Not imported yet, as it imports torch.
pytestmark = pytest.mark.skipif(
    find_spec("tensorboardX") is None, reason="tensorboardX is not installed"
)

tokens = np.arange(8, dtype=np.int32).reshape(4, 2) % 3
y = np.ones((4, 1), np.float32)
WORDS = ["a", "b\tc", ""]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        kind = nn.Embed(2, 2, name="kind")(x % 2)
        return nn.Dense(1)(nn.Embed(3, 2, name="word")(x).mean(1) + kind.mean(1))


class Text(nnx.Module):
    def __init__(self, rngs):
        self.word = nnx.Embed(3, 2, rngs=rngs)
        self.kind = nnx.Embed(2, 2, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.word(x).mean(1) + self.kind(x % 2).mean(1))


MAKE = {"linen": Linen, "nnx": lambda: Text(nnx.Rngs(0))}


def read(folder):
    """The tables and labels that the projector reads, by the names of the tables."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    plugin = pytest.importorskip("tensorboard.plugins.projector.projector_plugin")
    text_format = pytest.importorskip("google.protobuf.text_format")
    path = folder / "projector_config.pbtxt"
    config = text_format.Parse(path.read_text(), plugin.ProjectorConfig())
    found = {}
    for each in config.embeddings:
        table = plugin._read_tensor_tsv_file(
            plugin._rel_to_abs_asset_path(each.tensor_path, str(path))
        )
        found[each.tensor_name] = table, each.metadata_path
    return found


STRATEGIES = {
    "one device": lambda: ff.DataParallel(jax.devices()[:1]),
    "data parallel": ff.DataParallel,
    "sharded": lambda: ff.Sharded(
        {"data": -1, "model": 2}, rules=[(".*/embedding", PartitionSpec(None, "model"))]
    ),
}


@pytest.mark.parametrize(("strategy", "kind"), diagonal(STRATEGIES, MAKE))
def test_tables_are_those_of_the_last_epoch_by_the_paths_of_layers(tmp_path, kind, strategy):
    log = TensorBoardLogger(tmp_path, embeddings_freq=1, embeddings_metadata={"word": WORDS})
    model = ff.Model(MAKE[kind](), optax.sgd(0.1), "mse", strategy=STRATEGIES[strategy]())
    model.fit(tokens, y, batch_size=4, epochs=2, verbose=0, callbacks=[log])
    params, found = model.state.params, read(tmp_path)
    assert set(found) == {"word", "kind"}
    for name, (table, _) in found.items():
        np.testing.assert_allclose(table, params[name]["embedding"], rtol=1e-6)
    assert found["kind"][1] == ""
    assert (tmp_path / found["word"][1]).read_text() == "a\nb c\n''\n"
    assert not list(tmp_path.rglob("*.new"))


def test_a_lone_layer_has_the_labels_of_a_file_beside_the_events(
    tmp_path, make_loop, checkpoint_at
):
    options = {"embeddings_freq": 2, "embeddings_metadata": "words.tsv"}
    log = TensorBoardLogger(tmp_path, split=True, **options)
    state = ff.InferenceState(np.int32(1), {"embedding": np.ones((3, 2))}, {})
    log.attach(make_loop(state=state))
    log(checkpoint_at(1, state=state))
    log.close()
    ((name, (table, labels)),) = read(tmp_path / "train").items()
    assert (name, table.shape, labels) == ("embedding", (3, 2), "words.tsv")


@pytest.mark.parametrize(
    ("module", "metadata", "words"),
    [
        (nn.Dense(1), None, "embeddings_freq=1 needs an Embed layer: this model has no parameter"),
        (Linen(), {"words": WORDS}, "names 'words', but the Embed layers are 'kind', 'word'"),
        (Linen(), {"word": ["a"]}, "has 1 labels for the 3 rows of 'word'"),
        (Linen(), WORDS, "has 3 labels for the 2 rows of 'kind'"),
    ],
    ids=["no layer", "unknown", "few", "all"],
)
def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path, module, metadata, words):
    log = TensorBoardLogger(tmp_path / "run", embeddings_freq=1, embeddings_metadata=metadata)
    x = tokens if isinstance(module, Linen) else tokens.astype(np.float32)
    with pytest.raises(ValueError, match=words):
        ff.Model(module, optax.sgd(0.1), "mse").fit(x, y, verbose=0, callbacks=[log])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "n_labels", "split"),
    [
        ("a\nb\nc", 3, True),
        ("a\n\nb\nc\r\n\n", 3, False),
        ("word\tkind\na\t0\nb\t1\nc\t2\n", 3, False),
        ("a\nb\n", 2, True),
        ("a\nb\nc\nd\n", 4, False),
        ("a\t0\nb\t1\nc\t2\n", 2, False),
        ("", 0, False),
    ],
)
def test_a_file_has_a_label_for_each_row(
    tmp_path, make_loop, checkpoint_at, capsys, text, n_labels, split
):
    folder = tmp_path / "train" if split else tmp_path
    folder.mkdir(exist_ok=True)
    options = {"embeddings_freq": 1, "embeddings_metadata": {"word": "words.tsv"}, "split": split}
    log = TensorBoardLogger(tmp_path, **options)
    state = ff.InferenceState(np.int32(1), {"word": {"embedding": np.ones((3, 2))}}, {})
    log.attach(make_loop(state=state))
    (folder / "words.tsv").write_text(text, newline="")
    if n_labels != 3:
        words = f"has {n_labels} labels for the 3 rows of 'word': .*tsv"
        with pytest.raises(ValueError, match=words):
            log.attach(make_loop(state=state))
    assert [path.name for path in folder.iterdir()] == ["words.tsv"]
    # As the file came after the first `attach`, training goes on without it.
    log(checkpoint_at(1, state=state))
    log.close()
    assert (folder / "projector_config.pbtxt").exists() == (n_labels == 3)
    assert (f"has {n_labels} labels" in capsys.readouterr().err) == (n_labels != 3)


def test_labels_need_tables(tmp_path):
    with pytest.raises(ValueError, match="embeddings_metadata needs embeddings_freq"):
        TensorBoardLogger(tmp_path, embeddings_metadata=WORDS)
    with pytest.raises(ValueError, match="embeddings_freq must be 0 or more"):
        TensorBoardLogger(tmp_path, embeddings_freq=-1)

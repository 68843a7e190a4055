"""The index of a checkpoint that mesh-TensorFlow itself wrote, where it lies beside the project."""

from pathlib import Path

import pytest
from flax.traverse_util import flatten_dict
from t5_models import T5, variables

from flaxfit.importers import UnreadableFile, load_tf_ckpt, t5_translator

FOLDER = Path(__file__).parents[3] / "shared" / "fixtures" / "mtf_tiny_t5"


def variables_of_model():
    sizes = {"vocab": 32128, "d_model": 32, "d_ff": 64, "n_heads": 2, "d_kv": 64, "n_layers": 2}
    params = variables(T5(**sizes))["params"]
    return {path: leaf.shape for path, leaf in flatten_dict(params, sep="/").items()}


# The folder is not part of the project, so that there is nothing to skip where it is absent.
if FOLDER.exists():
    # A missing install is a skip that shows, unlike a missing folder.
    pytestmark = pytest.mark.usefixtures("tensorflow")

    def test_the_index_lists_what_its_writer_says_of_it():
        arrays = load_tf_ckpt(FOLDER)
        listed = {}
        for line in (FOLDER / "model-info.txt").read_text().splitlines():
            words = line.split()
            if words and words[0] == "Variable":
                dimensions = line[line.index("Shape[") + 6 : line.index("]")].split(",")
                listed[words[1]] = tuple(int(each.split("=")[1]) for each in dimensions)
        found = {name: x.shape for name, x in arrays.items() if "_slot_" not in name}
        assert found.pop("global_step") == ()
        assert found == listed
        assert len(arrays) == 105

    def test_every_variable_has_its_place_in_the_model():
        translation = t5_translator.translate(load_tf_ckpt(FOLDER))
        assert not translation.problems()
        values = translation.values
        assert {
            name.removeprefix("target/"): value.shape
            for name, value in values.items()
            if name.startswith("target/")
        } == variables_of_model()

    def test_what_is_there_is_read_and_what_is_not_is_named():
        arrays = load_tf_ckpt(FOLDER)
        assert arrays.pop("global_step").get() == 0
        with pytest.raises(UnreadableFile, match="its data files are missing"):
            arrays["shared/embedding"].get()

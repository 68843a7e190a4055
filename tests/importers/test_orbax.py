"""Orbax checkpoints, read without their tree."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from weight_files import ARRAYS, assert_holds

from flaxfit.importers import load, load_orbax


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_orbax_folders_are_read_without_their_tree(tmp_path, options):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    arrays = {name: value for name, value in ARRAYS.items() if value.size}
    tree = unflatten_dict(arrays, sep="/") | {"n": 3, "name": "text", "none": None, "empty": {}}
    tree["pair"] = (jnp.arange(4.0), [np.ones(2, np.uint16)])
    folder = tmp_path / "step" / "default"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    expected = arrays | {
        "n": np.array(3),
        "pair/0": np.arange(4, dtype=np.float32),
        "pair/1/0": np.ones(2, np.uint16),
    }
    for path in (folder, folder.parent):
        assert_holds(load_orbax(path), expected)
        assert_holds(load(path), expected)


def test_a_checkpoint_of_flaxfit_is_read_by_the_paths_of_its_state(tmp_path):
    import optax

    import flaxfit as ff

    variables = {"params": {"w": jnp.arange(3.0)}}
    state = ff.TrainState.create(optax.adam(0.1), variables)
    ff.checkpoints.save(tmp_path / "run", state)
    (step,) = [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
    np.testing.assert_array_equal(load(step)["params/w"].get(), np.arange(3.0))

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import abstract, make_state, replicated
from loops import assert_identical

from flaxfit.checkpoints import _safetensors, load_weights, save_weights

PARAMS = {
    "encoder": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 2), jnp.bfloat16)},
}


def names_in(path):
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return sorted(header.keys() - {"__metadata__"})


def test_weights_come_back_bit_for_bit_with_and_without_a_target(tmp_path):
    path = save_weights(tmp_path / "new" / "w.safetensors", PARAMS)
    assert names_in(path) == ["encoder/bias", "encoder/kernel", "head/kernel"]
    for target in (None, PARAMS, abstract(jax.tree.map(jnp.asarray, PARAMS))):
        assert_identical(load_weights(path, target), PARAMS)


def test_a_state_gives_its_variables_and_takes_them_back(tmp_path):
    state, other = make_state(3), make_state(8)
    path = save_weights(tmp_path / "w.safetensors", replicated(state))
    assert {"params/Dense_0/kernel", "batch_stats/BatchNorm_0/mean"} < set(names_in(path))
    found = load_weights(path, other)
    assert_identical((found.params, found.model_state), (state.params, state.model_state))
    assert_identical((found.step, found.opt_state), (other.step, other.opt_state))
    inference = load_weights(path, abstract(other.for_inference().replace_step(3)))
    assert_identical(inference.params, state.params)
    assert_identical(load_weights(path), state.variables)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float8_e5m2", "complex64"])
def test_every_dtype_and_order_of_elements_survives(tmp_path, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(jnp.dtype(dtype))
    arrays = {"t": values.T, "strided": values[:, ::2, 1:], "scalar": values[1, 1, 1].reshape(())}
    arrays |= {"empty": values[:0], "fortran": np.asfortranarray(values[0])}
    found = load_weights(save_weights(tmp_path / "w.safetensors", arrays), arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_a_random_key_survives(tmp_path):
    tree = {"rngs": jax.random.key(5, impl="rbg"), "w": jnp.ones(1)}
    path = save_weights(tmp_path / "w.safetensors", tree)
    assert_identical(load_weights(path), tree)
    assert_identical(load_weights(path, tree), tree)


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
def test_a_name_of_another_format_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"name the file model\.safetensors"):
        save_weights(tmp_path / name, make_state())


def test_a_dtype_that_the_format_lacks_is_refused_and_no_file_is_left(tmp_path):
    with pytest.raises(ValueError, match=r"Cannot write b/c \(int4\) to a safetensors file"):
        save_weights(tmp_path / "w.safetensors", {"b": {"c": jnp.ones(2, jnp.int4)}, "d": 1})
    assert list(tmp_path.iterdir()) == []


def test_differences_are_one_error_with_both_sides_and_the_nearest_names(tmp_path):
    path = save_weights(tmp_path / "w.safetensors", PARAMS)
    target = {
        "encoder": {"kernel": jnp.ones((2, 4)), "biases": jnp.ones(3)},
        "head": {"kernel": jnp.ones((3, 2))},
        "scale": jnp.ones(()),
    }
    with pytest.raises(ValueError, match=r"w.safetensors does not fit .* \(5 diff") as error:
        load_weights(path, target)
    assert sorted(str(error.value).splitlines()[1:-1]) == [
        "  encoder/bias is on disk, not here (nearest: encoder/biases)",
        "  encoder/biases is here, not on disk (nearest: encoder/bias)",
        "  encoder/kernel is float32 (2, 3) on disk, float32 (2, 4) here",
        "  head/kernel is bfloat16 (3, 2) on disk, float32 (3, 2) here",
        "  scale is here, not on disk",
    ]


def test_a_part_of_the_weights_can_be_taken(tmp_path, capfd):
    path = save_weights(tmp_path / "w.safetensors", PARAMS)
    target = {"encoder": jax.tree.map(jnp.zeros_like, PARAMS["encoder"]), "new": jnp.full(2, 7.0)}
    found = load_weights(path, target, partial=["encoder/.*"])
    assert_identical(found, {"encoder": PARAMS["encoder"], "new": target["new"]})
    assert "took 2 of 3 weights" in capfd.readouterr().err
    with pytest.raises(ValueError, match="needs a target"):
        load_weights(path, partial="encoder/.*")


def test_patterns_leave_out_the_name_of_the_collection(tmp_path):
    state, other = make_state(3), make_state(8)
    path = save_weights(tmp_path / "w.safetensors", state)
    found = load_weights(path, other, partial=("Dense_0/.*", "BatchNorm_0/.*"))
    for name in ("Dense_0", "BatchNorm_0"):
        assert_identical(found.params[name], state.params[name])
    assert_identical(found.params["Dense_1"], other.params["Dense_1"])
    assert_identical(found.model_state["batch_stats"], state.model_state["batch_stats"])
    variables = load_weights(path, other.variables, partial=("Dense_0/.*",))
    assert_identical(variables["params"]["Dense_0"], state.params["Dense_0"])


def test_every_flipped_bit_is_detected(tmp_path):
    path = save_weights(tmp_path / "w.safetensors", {"a": jnp.arange(3.0), "b": jnp.ones(2)})
    content = path.read_bytes()
    n_refused = 0
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(content)):
            place = bit // 8
            os.pwrite(file.fileno(), bytes([content[place] ^ 1 << bit % 8]), place)
            try:
                arrays, _ = _safetensors.read(path)
            except _safetensors.Malformed:
                n_refused += 1
            else:  # A bit of the name of the checksum: the content is as it was.
                assert arrays["a"].tolist() == [0, 1, 2] and arrays["b"].tolist() == [1, 1]
                assert {str(array.dtype) for array in arrays.values()} == {"float32"}
            os.pwrite(file.fileno(), content[place : place + 1], place)
    assert n_refused > 0.9 * 8 * len(content)


def test_sizes_in_a_header_are_not_believed(tmp_path):
    path = tmp_path / "w.safetensors"
    huge = {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    for header, length in ((huge, None), (huge, 2**62), ({}, 2**62), ([], None)):
        text = json.dumps(header).encode()
        path.write_bytes((length or len(text)).to_bytes(8, "little") + text + bytes(64))
        with pytest.raises(ValueError, match="Cannot read weights from .*w.safetensors: its "):
            load_weights(path)


def test_names_of_a_file_are_names_and_no_paths(tmp_path):
    names = {"../../outside": jnp.ones(1), "/etc/x": jnp.ones(1), "a": {"..": jnp.ones(1)}}
    path = save_weights(tmp_path / "w.safetensors", names)
    assert load_weights(path)["a"][".."].shape == (1,)
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_names_that_make_no_tree_need_a_target(tmp_path):
    tree = {"a": jnp.ones(1), "a/b": jnp.ones(2)}
    path = save_weights(tmp_path / "w.safetensors", tree)
    with pytest.raises(ValueError, match="a/b extends the name of another one. Pass a target"):
        load_weights(path)
    assert load_weights(path, tree)["a/b"].shape == (2,)


def test_a_failed_save_leaves_the_file_before_and_nothing_else(tmp_path, monkeypatch):
    path = save_weights(tmp_path / "w.safetensors", PARAMS)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device. .It needs 48 bytes, .* are free"):
        save_weights(path, {**PARAMS, "head": {}, "x": jnp.ones(3)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_files_are_exchanged_with_the_library_of_the_format(tmp_path):
    library = pytest.importorskip("safetensors.flax", reason="safetensors is not installed")
    flat = {"a.weight": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    library.save_file(flat, tmp_path / "theirs.safetensors")
    assert_identical(load_weights(tmp_path / "theirs.safetensors", flat), flat)
    path = save_weights(tmp_path / "ours.safetensors", flat)
    assert_identical(library.load_file(path), flat)


@pytest.mark.slow
def test_weights_need_neither_orbax_nor_the_library_of_the_format(tmp_path, run_child):
    program = (
        "import sys, numpy as np\n"
        "from flaxfit.checkpoints import load_weights, save_weights\n"
        f"load_weights(save_weights({str(tmp_path / 'w')!r}, dict(a=np.ones(2))))\n"
        "sys.exit(bool({'orbax.checkpoint', 'safetensors'} & set(sys.modules)))"
    )
    assert run_child([sys.executable, "-c", program], seconds=120).returncode == 0


def test_what_a_killed_save_has_left_is_removed_by_a_later_one(tmp_path):
    names = [".w.safetensors.0123abcd", ".w.safetensors.89abcdef", ".v.safetensors.0123abcd"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (0, 0))
    save_weights(tmp_path / "w.safetensors", {"a": np.ones(2, np.float32)})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], "w.safetensors"])

"""The record of a step: JSON, validated when it is read."""

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import fill, make_checkpoint, read, rewrite_record

from flaxfit.checkpoints import list_steps, restore, save


def test_what_is_not_json_is_refused_by_name(tmp_path):
    checkpoint = make_checkpoint(1).replace(data_state=b"opaque")
    with pytest.raises(TypeError, match="data position .* as JSON.*bytes"):
        save(tmp_path, checkpoint)
    assert list_steps(tmp_path) == []


def test_numpy_numbers_count_as_json(tmp_path):
    checkpoint = make_checkpoint(1, loss=jnp.float32(0.5)).replace(
        data_state={"next": np.int64(3), "order": np.arange(2)}
    )
    save(tmp_path, checkpoint)
    found = read(tmp_path)
    assert found.data_state == {"next": 3, "order": [0, 1]}
    assert found.metrics == {"loss": 0.5}


@pytest.mark.parametrize("name", ["step", "key"])
def test_a_record_that_leaves_out_what_every_state_has_is_damaged(tmp_path, name):
    fill(tmp_path, 1)
    rewrite_record(tmp_path / "1", lambda record: record["arrays"].pop(name))
    with pytest.raises(ValueError, match=f"1 is damaged: it does not hold {name}"):
        restore(tmp_path, which=1)


@pytest.mark.parametrize("number", [1, 3])
def test_a_record_of_another_format_is_refused_in_words(tmp_path, number):
    fill(tmp_path, 1)
    rewrite_record(tmp_path / "1", lambda record: record.update(format=number))
    with pytest.raises(ValueError, match=f"has format {number}, .* reads 2.* that wrote it"):
        restore(tmp_path, which=1)


def test_a_renamed_step_is_damaged(tmp_path, capfd):
    fill(tmp_path, 1, 3)
    (tmp_path / "3").rename(tmp_path / "9")
    assert int(restore(tmp_path).step) == 1
    assert "its record is that of step 3" in capfd.readouterr().err

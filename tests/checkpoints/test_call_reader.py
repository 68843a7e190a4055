"""CallReader: the checkpoints of one call of fit among those of others."""

import numpy as np
import pytest
from checkpoint_files import SMALL, data_files

from flaxfit import Checkpoint
from flaxfit.checkpoints import CheckpointFileWriter, list_steps
from flaxfit.checkpoints._call_reader import CallReader


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of a loop, of a call that began at step 0 and of one that began at step 4."""
    with CheckpointFileWriter(tmp_path, keep=None) as writer:
        for step, began in {1: None, 2: 0, 4: 0, 5: 4, 6: 4}.items():
            history = None if began is None else {"first_step": began}
            checkpoint = Checkpoint(step=step, state=SMALL.replace(step=np.int32(step)), metrics={})
            writer.save(checkpoint, history=history)
    return tmp_path


def test_the_newest_checkpoint_is_that_of_the_call(folder):
    first, later = CallReader(folder, 0, is_fresh=True), CallReader(folder, 4, is_fresh=False)
    assert (first.newest(), first.read(SMALL).step, first.others()) == (4, 4, [4])
    assert (later.newest(), later.read(SMALL).step, later.others()) == (6, 6, [0])
    assert CallReader(folder, 6, is_fresh=False).newest() is None


def test_a_checkpoint_that_does_not_say_where_it_began_is_that_of_a_fresh_model(folder):
    assert CallReader(folder, 100, is_fresh=True).newest() == 1
    assert CallReader(folder, 100, is_fresh=False).newest() is None


def test_in_the_place_of_a_damaged_checkpoint_another_of_the_same_call_is_read(folder):
    reader = CallReader(folder, 4, is_fresh=False)
    for file in data_files(folder / "6"):
        file.write_bytes(b"")
    assert reader.newest() == 6 and reader.read(SMALL).step == 5
    (folder / "5" / "seal.json").write_text("")
    assert reader.newest() is None
    with pytest.raises(ValueError, match="holds no intact checkpoint, only corrupt-5-0"):
        reader.read(SMALL)
    assert list_steps(folder) == [1, 2, 4]

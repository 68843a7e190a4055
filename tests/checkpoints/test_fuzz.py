"""Whatever happens to a file, reading it gives what was written or an error of our own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import all_files
from damage import mutated
from loops import assert_identical
from marks import thorough

from flaxfit import TrainState
from flaxfit.checkpoints import _seal, load_weights, restore, save, save_weights

WEIGHTS = {
    "encoder": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.zeros(3)},
    "half": np.ones(3, jnp.bfloat16),
    "empty": np.zeros((0, 2), np.int32),
    "key": jax.random.key(1),
}
STATE = TrainState(
    step=jnp.int32(1),
    params={"w": jnp.arange(4.0), "half": jnp.ones((2, 3), jnp.bfloat16)},
    opt_state=(),
    model_state={"empty": jnp.zeros((0, 2))},
    key=jax.random.key(0),
)
WORDS = ("The checkpoint ", "Cannot read the checkpoint ", "Cannot read weights ", "Cannot make ")


@pytest.mark.parametrize("n", [1_000, thorough(20_000)])
def test_a_damaged_file_of_weights_is_refused_or_read_right(tmp_path, n):
    content = save_weights(tmp_path / "whole.safetensors", WEIGHTS).read_bytes()
    path = tmp_path / "w.safetensors"
    rng = np.random.default_rng(n)
    n_refused = 0
    for i in range(n):
        path.write_bytes(mutated(rng, content))
        try:
            assert_identical(load_weights(path, WEIGHTS if i % 2 else None), WEIGHTS)
        except ValueError as error:
            assert str(error).startswith(WORDS)
            n_refused += 1
    assert n_refused > 0.8 * n


@pytest.mark.slow
@pytest.mark.parametrize("n", [500, thorough(10_000)])
def test_a_damaged_file_of_a_step_is_refused_or_read_right(tmp_path, n):
    step = save(tmp_path, STATE)
    files = all_files(step)
    rng = np.random.default_rng(n)
    for i in range(n):
        file = files[i % len(files)]
        content = file.read_bytes()
        damaged = mutated(rng, content)
        file.write_bytes(damaged)
        try:
            assert_identical(restore(tmp_path, STATE, which=1), STATE)
            # All that the seal may lose is white space.
            assert damaged == content or file.name == _seal.SEAL
        except ValueError as error:
            assert str(error).startswith(f"The checkpoint {step} is damaged: its ")
        file.write_bytes(content)


# After a failure, what Orbax still had under way complains that its event loop is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n", [100, thorough(20_000)])
def test_a_step_whose_damage_is_sealed_is_refused_or_read_right(tmp_path, n):
    """As if the damage had come before the checksums: what reads the files must stand it."""
    step = save(tmp_path, STATE)
    seal = (step / _seal.SEAL).read_bytes()
    files = [path for path in all_files(step) if path.name != _seal.SEAL]
    record = step / "record" / "metadata"
    rng = np.random.default_rng(n)
    for i in range(n):
        file, with_target = record if i % 2 else files[i // 2 % len(files)], i % 4 < 2
        content = file.read_bytes()
        file.write_bytes(mutated(rng, content))
        _seal.write(step)
        try:
            found = restore(tmp_path, STATE if with_target else None, which=1)
            if with_target or file != record:
                assert_identical(jax.tree.leaves(found), jax.tree.leaves(STATE))
        except ValueError as error:
            assert str(error).startswith(WORDS)
        file.write_bytes(content)
        (step / _seal.SEAL).write_bytes(seal)

"""The compilation cache: what is compiled once is read again, by this process and by others."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.experimental.compilation_cache import compilation_cache

import flaxfit as ff
from flaxfit.loop import _compilation_cache as own
from flaxfit.loop._compilation_cache import use_compilation_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
X = np.ones((8, 3), np.float32)


@pytest.fixture(autouse=True)
def _restored():
    before = {name: getattr(jax.config, name) for name in NAMES}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    own._prepared_folder.cache_clear()


def test_programs_are_kept_in_a_folder_that_is_made_and_may_change_and_come_again(tmp_path):
    x = jnp.ones(7)
    for i, name in enumerate(("first", "some/where", "some/where")):
        use_compilation_cache(tmp_path / name)
        jax.jit(lambda x, i=i: x * 3 + i)(x).block_until_ready()
    counts = [len([*(tmp_path / name).glob("*-cache")]) for name in ("first", "some/where")]
    assert counts == [1, 2]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Cannot keep compiled programs in .*file"):
        use_compilation_cache(tmp_path / "file")


def test_a_given_folder_that_others_may_write_to_is_warned_about_once(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="will be executed, but other users can"):
        use_compilation_cache(tmp_path)
    use_compilation_cache(tmp_path)  # Warnings are errors here.


def test_a_loop_and_a_model_take_the_folder(tmp_path):
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", (X, X[:, :1]))
    ff.TrainLoop(nn.Dense(1).init, task, 0, stdout=False, compilation_cache=tmp_path / "a")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a")
    ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", compilation_cache=tmp_path / "b")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "b")


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """An own folder for the caches of the user, where JAX has no folder."""
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    monkeypatch.delenv("FLAXFIT_COMPILATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def compile_one(number=0):
    jax.jit(lambda x: x * 5 + number)(jnp.ones(9)).block_until_ready()


def programs_in(folder):
    return [*folder.glob("flaxfit/programs-*/*-cache")]


def test_auto_keeps_programs_in_a_folder_that_only_the_user_may_write_to(caches):
    use_compilation_cache("auto")
    compile_one()
    folder = programs_in(caches)[0].parent
    assert folder.stat().st_mode & 0o077 == 0
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_auto_does_nothing_in_a_run_of_several_processes(caches, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    use_compilation_cache("auto")
    assert jax.config.jax_compilation_cache_dir is None


def test_the_folder_is_trimmed_to_its_bound_and_the_files_used_least_recently_go(
    caches, monkeypatch
):
    folder = own._user_folder()
    (folder / "more").mkdir(parents=True, mode=0o700)
    files = [folder / "a-cache", folder / "more" / "b", folder / "c-cache", folder / "d-cache"]
    for i, file in enumerate(files):
        file.write_bytes(bytes(100))
        os.utime(file, (i, i))
    os.utime(files[0], (9, 0))  # Read after the others were written.
    monkeypatch.setattr(own, "_MOST", 250)
    folder.chmod(0o700)
    use_compilation_cache("auto")
    assert [file.exists() for file in files] == [True, False, False, True]


def test_a_damaged_program_is_compiled_again_with_a_warning(caches):
    use_compilation_cache("auto")
    compile_one(4)
    for path in programs_in(caches):
        path.write_bytes(path.read_bytes()[:-10])
    jax.clear_caches()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert jax.jit(lambda x: x * 5 + 4)(jnp.ones(9)).tolist() == [9] * 9


@pytest.mark.parametrize("value", ["off", "0", "none", "", None])
def test_a_switch_or_none_turns_it_off(caches, monkeypatch, value):
    if value is None:
        use_compilation_cache(None)
    else:
        monkeypatch.setenv("FLAXFIT_COMPILATION_CACHE", value)
        use_compilation_cache("auto")
    compile_one()
    assert [*caches.iterdir()] == []
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1


def test_the_switch_may_name_a_folder(caches, monkeypatch):
    monkeypatch.setenv("FLAXFIT_COMPILATION_CACHE", str(caches / "named"))
    use_compilation_cache("auto")
    compile_one(1)
    assert [path.name for path in caches.iterdir()] == ["named"]
    assert any((caches / "named").iterdir())


def test_the_folder_of_the_user_wins(caches):
    jax.config.update("jax_compilation_cache_dir", str(caches / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    use_compilation_cache("auto")
    compile_one(2)
    assert any((caches / "own").glob("*-cache")) and programs_in(caches) == []


@pytest.mark.parametrize("is_open", [False, True])
def test_a_folder_that_does_not_suit_is_named_once_and_training_goes_on(caches, is_open):
    if is_open:
        own._user_folder().mkdir(parents=True)
        own._user_folder().chmod(0o777)
    else:
        (caches / "flaxfit").write_text("")
    with pytest.warns(UserWarning, match="Compiled programs are not kept in .*flaxfit"):
        use_compilation_cache("auto")
    use_compilation_cache("auto")  # Warnings are errors here.
    compile_one()
    assert programs_in(caches) == []


def test_the_folder_is_another_for_another_processor(monkeypatch):
    here = own._user_folder()
    assert here == own._user_folder()
    monkeypatch.setattr(own, "_processor", lambda: "avx512f")
    assert own._user_folder() != here


STARTS = """
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
import numpy as np, optax
from flax import linen as nn
import flaxfit as ff

def leave(loss):
    print(json.dumps({"loss": loss, **events}))
    events.clear()

x = np.ones((64, 16), np.float32)
module = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])
model = ff.Model(module, optax.adam(1e-3), "crossentropy")
model.fit(x, np.zeros(64, np.int32), batch_size=16, epochs=2, verbose=0)
leave(model.history["loss"][-1])

task = ff.TrainTask(
    module.apply, optax.adam(1e-3), "crossentropy", (x, np.zeros(64, np.int32)), ["accuracy"]
)
loop = ff.TrainLoop(module.init, task, 0, compilation_cache=sys.argv[1], stdout=False)
leave(next(loop).loss)
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_by_default_and_with_a_given_folder(tmp_path, run_child):
    env = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    env["XDG_CACHE_HOME"] = str(tmp_path / "user")
    found = []
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", STARTS, str(tmp_path / "given")]
        done = run_child(command, env=env)
        assert done.returncode == 0, done.stderr
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    for first, second in zip(*found, strict=True):
        assert first["cache_misses"] > 2 and "cache_misses" not in second
        assert second["cache_hits"] == second["compile_requests_use_cache"]
        assert second["loss"] == first["loss"]
    assert any((tmp_path / "given").iterdir())

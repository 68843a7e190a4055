"""The warning of a GPU that is in sight and not used: once, and not where it was asked for."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from flaxfit.loop import _idle_gpu
from flaxfit.loop._idle_gpu import sees_gpu, warn_of_idle_gpu

MESSAGE = "JAX computes on the CPU, though this machine has an NVIDIA GPU"


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """A process that has not warned yet, on the CPU of a machine with a GPU."""
    monkeypatch.setattr(_idle_gpu, "sees_gpu", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    warn_of_idle_gpu.cache_clear()
    yield
    warn_of_idle_gpu.cache_clear()
    jax.config.update("jax_platforms", platforms)


def times_warned(n_calls=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(n_calls):
            warn_of_idle_gpu()
    return sum(MESSAGE in str(each.message) for each in caught)


def test_it_warns_once_in_a_process(beside_a_gpu):
    assert times_warned(n_calls=3) == 1


def test_a_filter_turns_it_off_or_into_an_error(beside_a_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=MESSAGE):
            warn_of_idle_gpu()
        warnings.filterwarnings("ignore", message="JAX computes on the CPU")
        warn_of_idle_gpu()


@pytest.mark.parametrize(
    "choose",
    [
        lambda patch: jax.config.update("jax_platforms", "cpu"),  # As JAX_PLATFORMS does.
        lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", ""),
        lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "-1"),
        lambda patch: patch.setattr(jax, "default_backend", lambda: "gpu"),
        lambda patch: patch.setattr(_idle_gpu, "sees_gpu", lambda: False),
    ],
    ids=["CPU chosen", "none visible", "-1 visible", "in use", "none there"],
)
def test_it_is_silent_where_the_gpu_is_in_use_not_there_or_not_wanted(
    beside_a_gpu, monkeypatch, choose
):
    choose(monkeypatch)
    assert times_warned() == 0


def test_a_gpu_is_seen_by_its_device_file(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not sees_gpu(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert sees_gpu(tmp_path)


LOOP = """
import numpy as np, optax, flaxfit as ff
from flaxfit.loop import _idle_gpu
_idle_gpu.sees_gpu = lambda: True
x = np.ones((4, 1), np.float32)
for _ in range(2):
    task = ff.TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (x, x))
    ff.TrainLoop(lambda rngs, x: {"params": np.ones(1, np.float32)}, task, 0, stdout=False)
"""


@pytest.mark.slow
def test_loops_warn_of_it_once():
    if sees_gpu():
        pytest.skip("this machine has a GPU, which JAX may use")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment.pop("JAX_PLATFORMS", None)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.count(MESSAGE) == 1

"""The notice about bits on a GPU: where they are promised and a flag is missing, once."""

import jax
import numpy as np
import optax
import pytest

import flaxfit as ff
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter
from flaxfit.loop import _determinism
from flaxfit.loop._determinism import is_inexact

EXACT = "--xla_gpu_deterministic_ops"
PART, LEVEL = "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level"


@pytest.mark.parametrize(
    ("platform", "flags", "expected"),
    [
        ("gpu", "", True),
        ("cuda", "--xla_dump_to=/tmp/x", True),
        ("rocm", f"{EXACT}=false", True),
        ("gpu", f"{EXACT}=true", False),
        ("gpu", f"--xla_dump_to=/tmp/x {EXACT}=1", False),
        ("gpu", EXACT, False),
        ("gpu", f"{EXACT}=true {EXACT}=false", True),
        ("gpu", f"{PART}=true", True),
        ("gpu", f"{PART}=true {LEVEL}=4", True),
        ("gpu", f"{PART}=true {LEVEL}=0", False),
        ("cpu", "", False),
        ("tpu", "", False),
    ],
)
def test_a_gpu_needs_a_flag_to_repeat_the_bits(platform, flags, expected):
    assert is_inexact(platform, flags) == expected


@pytest.fixture
def on_gpu(monkeypatch):
    """A process that has said nothing yet, and takes its backend for a GPU."""
    monkeypatch.setattr(_determinism, "_unsaid", [*_determinism._unsaid])
    monkeypatch.setattr(_determinism, "is_inexact", lambda platform, flags: True)


X = np.ones((8, 1), np.float32)


def make_loop(init=None, **options):
    def new(rngs, x):
        return {"params": np.zeros(1, np.float32)}

    task = ff.TrainTask(lambda v, x, **_: (v["params"] * x, {}), optax.sgd(0.1), "mse", (X, X))
    return ff.TrainLoop(init or new, task, 0, **options)


def times_said(capfd):
    return capfd.readouterr().err.count("bit for bit")


def test_it_is_said_once_where_replicas_are_to_give_the_same_bits(on_gpu, capfd):
    make_loop()
    make_loop(strategy=ff.DataParallel(jax.devices()[:1]))
    assert times_said(capfd) == 0
    for _ in range(2):
        make_loop(strategy=ff.DataParallel(jax.devices()[:1], virtual_replicas=2))
    assert times_said(capfd) == 1


def test_it_is_said_when_a_run_is_resumed(on_gpu, tmp_path, capfd):
    with CheckpointFileWriter(tmp_path) as save:
        save(make_loop(callbacks=[save]).next_step())
    capfd.readouterr()

    def new(rngs, x):
        return {"params": np.zeros(1, np.float32)}

    make_loop(CheckpointFileReader(tmp_path, new))
    assert times_said(capfd) == 1

"""The notice about bits on a GPU: where they are promised and a flag is missing, once."""

import jax
import pytest
from loops import make_weight_loop

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


def times_said(capfd):
    return capfd.readouterr().err.count("bit for bit")


def test_it_is_said_once_where_replicas_are_to_give_the_same_bits(on_gpu, capfd):
    one, options = jax.devices()[:1], {"stdout": True}
    make_weight_loop(**options)
    make_weight_loop(strategy=ff.DataParallel(one), **options)
    assert times_said(capfd) == 0
    for _ in range(2):
        make_weight_loop(strategy=ff.DataParallel(one, virtual_replicas=2), **options)
    assert times_said(capfd) == 1


def test_it_is_said_when_a_run_is_resumed(on_gpu, tmp_path, capfd):
    with CheckpointFileWriter(tmp_path) as save:
        loop = make_weight_loop([save], stdout=True, devices=jax.devices()[:1])
        save(loop.next_step())
    capfd.readouterr()
    ff.TrainLoop(CheckpointFileReader(tmp_path, loop.state), loop.task)
    assert times_said(capfd) == 1

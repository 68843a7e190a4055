"""Grain's data sets and loaders part themselves between processes, unless Grain does it."""

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from flaxfit.data import _grain, _shared, as_stream

pytest.importorskip("grain", reason="grain is not installed")
import grain.python as grain


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of two."""

    def become(index):
        for module in (_grain, _shared):
            monkeypatch.setattr(module, "process_count", lambda: 2)
            monkeypatch.setattr(module, "process_index", lambda: index)
        monkeypatch.setattr(_shared, "agree", lambda *_, **options: None)

    return become


ROWS = grain.MapDataset.range(40)


def loader(shards=None, sampler_shards=None):
    """A loader of shuffled rows, in batches of four."""
    none = grain.NoSharding()
    sampler = grain.IndexSampler(40, sampler_shards or none, shuffle=True, num_epochs=1, seed=1)
    return grain.DataLoader(
        data_source=grain.RangeDataSource(0, 40, 1),
        sampler=sampler,
        operations=[grain.Batch(4)],
        shard_options=shards,
    )


WHOLE = {
    "map": lambda: ROWS.shuffle(seed=1).batch(4),
    "iter": lambda: ROWS.shuffle(seed=1).to_iter_dataset().filter(lambda i: i > 3).batch(4),
    "loader": loader,
    "part of the data": lambda: ROWS[:20].batch(4),
    "every third": lambda: ROWS[::3].map(lambda i: i + 1).batch(4),
}
SHARD = grain.ShardOptions(shard_index=1, shard_count=2)
DIVIDED = {
    "slice": lambda: ROWS.shuffle(seed=1)[1::2].batch(4),
    "slice below": lambda: ROWS[1::2].map(lambda i: i).to_iter_dataset().batch(4),
    "one of several": lambda: grain.MapDataset.mix([ROWS[1::2], ROWS[1::2]]).batch(4),
    "loader": lambda: loader(SHARD),
    "sampler": lambda: loader(sampler_shards=SHARD),
}


def flat(batches):
    return np.concatenate([*batches]).tolist()


@pytest.mark.parametrize("name", WHOLE)
def test_each_process_takes_its_rows_of_every_batch(name, as_process):
    parts = []
    for index in (0, 1):
        as_process(index)
        parts.append([*as_stream(WHOLE[name]())])
    both = [batch for pair in zip(*parts, strict=True) for batch in pair]
    assert flat(both) == flat(WHOLE[name]())


@pytest.mark.parametrize("name", DIVIDED)
def test_what_grain_has_divided_is_not_divided_again(name, as_process):
    as_process(1)
    assert _grain.is_divided(DIVIDED[name]())
    assert flat(as_stream(DIVIDED[name]())) == flat(DIVIDED[name]())


def test_options_of_a_single_shard_divide_nothing(as_process):
    as_process(1)
    assert not _grain.is_divided(loader(grain.ShardOptions(shard_index=0, shard_count=1)))


def test_a_slice_that_one_process_takes_for_its_own_is_shared_if_that_is_said(as_process):
    second = ROWS[::2].batch(4)
    shared = []
    for index in (0, 1):
        as_process(index)
        shared.append((hasattr(as_stream(second), "next_rows"), as_stream(second, shared=True)))
    # Which the loop notices: the processes do not come to the same.
    assert [by_default for by_default, _ in shared] == [False, True]
    assert all(hasattr(stream, "next_rows") for _, stream in shared)


def test_a_process_alone_takes_a_slice_for_what_it_is():
    assert not _grain.is_divided(ROWS[0::1].batch(4))


def test_what_is_not_recognised_can_be_said(as_process):
    as_process(1)
    half = ROWS[20:].batch(4)
    assert flat(as_stream(half, shared=False)) == list(range(20, 40))
    assert flat(as_stream(lambda: half)) == list(range(20, 40))
    assert flat(as_stream(iter(half))) == list(range(20, 40))
    assert len(flat(as_stream(half))) == 10
    assert len(flat(as_stream(DIVIDED["slice"](), shared=True))) == 10


@pytest.mark.parametrize("name", WHOLE)
def test_a_run_goes_on_in_another_number_of_processes(name, as_process):
    alone = as_stream(WHOLE[name]())
    next(alone)
    state = alone.get_state()
    rest = flat(alone)
    parts = []
    for index in (0, 1):
        as_process(index)
        stream = as_stream(WHOLE[name]())
        stream.set_state(state)
        parts.append([next(stream)])
        two = stream.get_state()
    assert flat(itertools.chain(*parts)) == rest[:4]
    as_process(0)
    stream = as_stream(WHOLE[name]())
    stream.set_state(two)
    rows = stream.pick(stream.next_rows())
    assert flat([rows]) == rest[4:8]


WITH_WORKERS = """
import multiprocessing, sys, time
import grain.python as grain
from absl import flags
from flaxfit.data import as_stream

def loader():
    return grain.DataLoader(
        data_source=grain.RangeDataSource(0, 4000, 1),
        sampler=grain.IndexSampler(4000, grain.NoSharding(), shuffle=True, num_epochs=1, seed=1),
        operations=[grain.Batch(4)],
        worker_count=2,
    )

def pipeline():
    rows = grain.MapDataset.range(4000).batch(4).to_iter_dataset()
    return rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))

if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    stream = as_stream({"loader": loader, "pipeline": pipeline}[sys.argv[1]]())
    for _ in range(4):
        next(stream)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Where nobody waits for it, what has ended stays as a zombie.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("kind", ["loader", "pipeline"])
def test_workers_end_with_a_parent_that_is_killed(kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITH_WORKERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, script, kind],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    workers = []
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_alive, workers))
        parent.kill()
        parent.wait()
        until = time.monotonic() + 20
        while any(map(is_alive, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_alive, workers))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)

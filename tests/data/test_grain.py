"""Grain: which loaders are divided among processes; packed rows; workers end with their parent."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from marks import thorough

from flaxfit.data import _libraries, as_stream, pack, take
from flaxfit.data._batch import normalize

pytest.importorskip("grain", reason="grain is not installed")
import grain.python as grain
from grain.experimental import FirstFitPackIterDataset

ROWS = grain.MapDataset.range(40)
OWN = grain.ShardOptions(shard_index=1, shard_count=2)


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


@pytest.fixture
def second_of_two(monkeypatch):
    """Makes this process the second of two."""
    monkeypatch.setattr(_libraries, "process_count", lambda: 2)
    monkeypatch.setattr(_libraries, "process_index", lambda: 1)


@pytest.mark.usefixtures("second_of_two")
def test_a_loader_is_divided_by_the_shard_options_of_this_process():
    assert not as_stream(loader(OWN)).shared
    assert not as_stream(loader(sampler_shards=OWN)).shared
    assert not as_stream(loader(OWN)).one_epoch().shared


@pytest.mark.parametrize("is_random", [True, False])
def test_that_a_random_order_repeats_is_said_at_the_second_epoch(is_random, capsys):
    rows = ROWS.seed(0).shuffle() if is_random else ROWS
    stream = as_stream(rows.batch(40), epochs=3)
    batches = [next(stream).tolist()]
    assert not capsys.readouterr().err
    assert [*batches, *(each.tolist() for each in stream)] == 3 * batches
    assert capsys.readouterr().err.count("one random order, which each epoch repeats") == is_random


@pytest.mark.parametrize(
    "data",
    [
        loader(),
        loader(grain.ShardOptions(shard_index=0, shard_count=2)),
        loader(grain.ShardOptions(shard_index=1, shard_count=4)),
        ROWS.batch(4),
        ROWS[1::2].batch(4),
        ROWS.to_iter_dataset().batch(4),
    ],
    ids=["whole", "other shard", "other count", "map", "slice", "iter"],
)
@pytest.mark.usefixtures("second_of_two")
def test_other_data_of_grain_is_divided_only_where_that_is_said(data):
    assert as_stream(data).shared
    assert not as_stream(data, shared=False).shared


SEQUENCES = [np.arange(1, n, dtype=np.int32) for n in (7, 4, 9, 3, 8, 5, 5, 8, 3, 4, 9, 6)]


def packed(n_open, **options):
    """Batches of two rows in the form of `pack`, of which Grain fills `n_open` at a time."""
    sequences = grain.MapDataset.source(SEQUENCES).map(lambda s: {"x": s[:-1], "y": s[1:]})
    rows = FirstFitPackIterDataset(
        sequences.to_iter_dataset(),
        length_struct={"x": 8, "y": 8},
        num_packing_bins=n_open,
        **options,
    )

    def as_batch(row):
        ids = row["x_segment_ids"]
        inputs = {"tokens": row["x"], "segment_ids": ids, "positions": row["x_positions"]}
        return inputs, row["y"], (ids > 0).astype(np.float32)

    return rows.map(as_batch).batch(2)


def test_rows_that_grain_packs_are_those_of_pack():
    fitting = as_stream(packed(len(SEQUENCES), shuffle_bins=False))
    expected = pack(SEQUENCES, 8, batch_size=2, epochs=1)
    for got, wanted in zip(fitting, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, normalize(got), normalize(wanted))


@pytest.mark.parametrize("n", range(3))
def test_rows_that_grain_packs_resume_after_any_batch(n):
    first, second = (as_stream(packed(3, seed=1)) for _ in range(2))
    list(take(first, n))
    second.set_state(json.loads(json.dumps(first.get_state())))
    rest = list(first)
    assert len(rest) > 1
    jax.tree.map(np.testing.assert_array_equal, list(second), rest)


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
@pytest.mark.parametrize("kind", ["loader", thorough("pipeline")])
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

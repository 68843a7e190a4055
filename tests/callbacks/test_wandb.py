"""WandbLogger in offline mode, read back from the file that wandb would synchronise."""

import json
import struct
from typing import Any

import pytest
from loops import make_weight_loop

from flaxfit.callbacks import WandbLogger

wandb: Any = None

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _wandb():
    global wandb
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


def make_log(folder, **options):
    return WandbLogger("tests", mode="offline", dir=str(folder), **options)


def records(path):
    """The records of a file: 32 KiB blocks of chunks, whose type says how they join."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []


def name_of(item):
    return item.key or item.nested_key[0]


def rows(folder):
    """What was logged in each run of a folder, in the order of the runs."""
    wandb.teardown()  # Ends the process that writes the files, and so waits for it.
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                values = {
                    name_of(item): json.loads(item.value_json) for item in record.history.item
                }
                found.append({name: v for name, v in values.items() if not name.startswith("_")})
    return found


def test_the_rows_of_the_run_are_the_metrics_of_the_checkpoints(tmp_path):
    log = make_log(tmp_path, config={"rate": 0.1})
    checkpoints = list(make_weight_loop([log]))
    assert log.run is None  # It is finished.
    assert rows(tmp_path) == [{"step": c.step, **c.scalars} for c in checkpoints]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    configs = [item for r in records(path) for item in r.run.config.update]
    assert ("rate", "0.1") in [(name_of(item), item.value_json) for item in configs]


def test_a_resumed_run_is_the_same_run_and_may_go_back(tmp_path, checkpoint_at):
    first = make_log(tmp_path)
    for step in (1, 2, 3):
        first(checkpoint_at(step, loss=1.0))
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    second = make_log(tmp_path)
    second.set_state(state)
    second(checkpoint_at(3, loss=2.0))
    assert second.run.id == first.run_id
    second.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 3]


def test_a_service_that_cannot_be_reached_is_asked_once(monkeypatch, checkpoint_at, capsys):
    asked = []

    def init(**options):
        asked.append(options)
        raise wandb.errors.CommError("no route")

    monkeypatch.setattr(wandb, "init", init)
    log = WandbLogger("tests")
    for step in (1, 2, 3):
        assert log(checkpoint_at(step, loss=1.0)).step == step
    log.close()
    assert len(asked) == 1 and capsys.readouterr().err.count("no route") == 1

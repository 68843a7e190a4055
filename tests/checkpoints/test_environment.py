import json

import jax
import pytest

from flaxfit.checkpoints import CheckpointFileReader, _seal, restore, save
from flaxfit.checkpoints._environment import changes, environment, versions


def change(step, **facts):
    """Has the record of a step tell of another environment."""
    file = step / "record" / "metadata"
    record = json.loads(file.read_text())
    record["environment"] |= facts.pop("environment", {})
    record["versions"] |= facts.pop("versions", {})
    file.write_text(json.dumps(record))
    _seal.write(step)


def test_a_file_tells_where_it_was_written(tmp_path, tools):
    save(tmp_path, tools.make_state(1))
    found = CheckpointFileReader(tmp_path).read()
    assert found is not None
    assert found.versions["jax"] == jax.__version__
    assert found.environment["devices"] == jax.device_count()
    assert found.environment["platform"] == "cpu"
    assert found.environment["cpu threads"] >= 1
    assert found.environment["python"].startswith("3.")


def test_the_same_environment_is_not_mentioned(tmp_path, tools, capfd):
    state = tools.make_state(1)
    save(tmp_path, state)
    restore(tmp_path, state)
    assert "bit" not in capfd.readouterr().err


def test_another_environment_is_named_in_one_line_and_the_values_are_restored(
    tmp_path, tools, capfd
):
    state = tools.make_state(1)
    path = save(tmp_path, state)
    change(path, environment={"devices": 64}, versions={"jaxlib": "0.1"})
    tools.assert_same(restore(tmp_path, state), state)
    (line,) = capfd.readouterr().err.splitlines()
    assert "may not continue bit for bit" in line
    assert f"devices 64 -> {jax.device_count()}" in line
    assert "jaxlib 0.1 -> " in line


def test_a_warm_start_promises_no_bits(tmp_path, tools, capfd):
    state = tools.make_state(1)
    change(save(tmp_path, state), environment={"devices": 64})
    restore(tmp_path, state, partial=".*")
    assert "bit for bit" not in capfd.readouterr().err


def of_now(**parts):
    """The record of a step that is saved now, with other parts."""
    return {"versions": versions(), "environment": environment(), "running": None, **parts}


@pytest.mark.parametrize("name, value", [("NPROC", "61"), ("XLA_FLAGS", "--xla_some_flag")])
def test_what_xla_reads_from_the_process_environment_counts(monkeypatch, name, value):
    record = of_now()
    assert changes(record) == []
    monkeypatch.setenv(name, value)
    (line,) = changes(record)
    assert line.endswith(f"-> {value}")


def test_options_of_jax_count():
    record = of_now()
    with jax.enable_x64(True):
        assert changes(record) == ["jax_enable_x64 False -> True"]


def test_what_does_no_arithmetic_does_not_count():
    versions, environment = {"orbax-checkpoint": "0.1"}, {"of a later version": 1}
    assert changes(of_now(versions=versions, environment=environment)) == []


def test_threads_count_on_the_cpu_only():
    now = environment()
    record = of_now(environment={"cpu threads": 99, "platform": "cpu"})
    assert changes(record) == [f"cpu threads 99 -> {now['cpu threads']}"]
    record["environment"]["platform"] = "tpu"
    assert "platform tpu -> cpu" in changes(record)


def test_with_virtual_replicas_the_number_of_devices_does_not_count():
    record = of_now(environment=environment() | {"devices": 64, "processes": 8})
    assert [line.split()[0] for line in changes(record)] == ["devices", "processes"]
    assert changes(record | {"running": {"batch_size": 8, "virtual_replicas": 64}}) == []


def test_what_the_number_of_devices_is_set_by_does_not_count_twice(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_some_flag")
    assert environment()["XLA_FLAGS"] == "--xla_some_flag"


def test_there_is_a_thread_for_each_simulated_device(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    assert environment()["cpu threads"] == jax.local_device_count()

import jax
import pytest
from checkpoint_files import SMALL, fill, read, rewrite_record, small_state
from loops import assert_identical

from flaxfit.checkpoints import restore
from flaxfit.checkpoints._environment import changes, environment, versions


def test_a_file_tells_where_it_was_written(tmp_path):
    fill(tmp_path, 1)
    found = read(tmp_path)
    assert found.versions["jax"] == jax.__version__
    assert found.environment["devices"] == jax.device_count()
    assert found.environment["platform"] == "cpu"
    assert found.environment["cpu threads"] >= 1
    assert found.environment["python"].startswith("3.")


def test_another_environment_is_named_in_one_line_and_the_values_are_restored(tmp_path, capfd):
    def change(record):
        record["environment"]["devices"] = 64
        record["versions"]["jaxlib"] = "0.1"

    fill(tmp_path, 1)
    restore(tmp_path, SMALL)
    assert "bit" not in capfd.readouterr().err
    rewrite_record(tmp_path / "1", change)
    assert_identical(restore(tmp_path, SMALL), small_state(1))
    (line,) = capfd.readouterr().err.splitlines()
    assert "may not continue bit for bit" in line
    assert f"devices 64 -> {jax.device_count()}" in line
    assert "jaxlib 0.1 -> " in line
    restore(tmp_path, SMALL, partial=".*")  # A warm start promises no bits.
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


def test_devices_are_counted_once_and_have_a_thread_each(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_some_flag")
    monkeypatch.setenv("NPROC", "1")
    found = environment()
    assert found["XLA_FLAGS"] == "--xla_some_flag"
    assert found["cpu threads"] == jax.local_device_count()

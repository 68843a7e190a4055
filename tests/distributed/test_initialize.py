"""How a process finds out which one it is; that processes join is in test_many_processes."""

import os

import jax
import pytest

from flaxfit import initialize
from flaxfit.distributed import _processes

TORCHRUN = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}
OURS = {
    "FLAXFIT_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "FLAXFIT_NUM_PROCESSES": "8",
    "FLAXFIT_PROCESS_ID": "5",
}

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def joined(monkeypatch):
    """What JAX is called with, which then does nothing."""
    calls = []
    for name in os.environ:
        if name.startswith(("FLAXFIT_", "JAX_", "SLURM_", "OMPI_", "CUDA_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    return calls


def given(calls):
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    return {name: calls[0][name] for name in names if name in calls[0]}


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_arguments_come_first_then_our_variables(joined, monkeypatch):
    set_all(monkeypatch, OURS | TORCHRUN)
    initialize(process_id=3)
    assert given(joined) == {
        "coordinator_address": "10.0.0.1:1234",
        "num_processes": 8,
        "process_id": 3,
    }


def test_torchruns_variables_come_next_and_its_own_port_is_left_to_it(joined, monkeypatch):
    set_all(monkeypatch, TORCHRUN)
    initialize()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    initialize()
    assert given(joined) == {
        "coordinator_address": "node0:29500",
        "num_processes": 4,
        "process_id": 2,
    }
    assert joined[1]["coordinator_address"] == "node0:29501"


def test_torchruns_processes_on_one_machine_take_a_device_each(joined, monkeypatch):
    set_all(monkeypatch, TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    initialize()
    assert given(joined)["local_device_ids"] == 1


def test_the_coordinator_listens_at_its_address_alone_and_timeouts_are_short(joined):
    own = {"coordinator_bind_address": "[::]:1234", "heartbeat_seconds": 7, "shutdown_seconds": 9}
    for options in ({}, own):
        initialize("10.0.0.1:1234", 2, 0, **options)
    names = "coordinator_bind_address", "heartbeat_timeout_seconds", "shutdown_timeout_seconds"
    found = [[options[name] for name in names] for options in joined]
    assert found == [["10.0.0.1:1234", 30, 60], ["[::]:1234", 7, 9]]


def test_a_single_process_or_one_that_nothing_is_known_of_is_alone(joined):
    initialize("10.0.0.1:1234", 1, 0)
    initialize()
    initialize()
    assert not joined
    assert _processes.process_count() == 1


def test_jax_finds_out_what_is_not_given_where_it_can(joined, monkeypatch):
    """As under SLURM, whose variables these are."""
    set_all(monkeypatch, SLURM)
    initialize()
    assert given(joined) == {}


@pytest.mark.parametrize(("asked", "seen"), [("1", "5"), ("a100:2", "4,5"), ("2", "GPU-a,GPU-b")])
def test_a_task_of_slurm_takes_all_devices_where_it_sees_its_own_alone(
    asked, seen, joined, monkeypatch
):
    set_all(monkeypatch, SLURM | {"SLURM_GPUS_PER_TASK": asked, "CUDA_VISIBLE_DEVICES": seen})
    initialize()
    assert given(joined) == {"local_device_ids": list(range(1 + seen.count(",")))}


def test_a_task_of_slurm_that_sees_the_devices_of_others_leaves_the_choice_to_jax(
    joined, monkeypatch
):
    set_all(monkeypatch, SLURM | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1"})
    initialize()
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    initialize()
    assert given(joined) == given(joined[1:]) == {}


def test_torchrun_within_a_task_of_slurm_divides_its_devices(joined, monkeypatch):
    devices = {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    set_all(monkeypatch, devices | TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    initialize()
    assert given(joined)["local_device_ids"] == 1


def test_open_mpi_5_tells_all_but_the_coordinator(joined, monkeypatch):
    names = "SIZE", "RANK", "LOCAL_RANK"
    set_all(monkeypatch, {f"OMPI_COMM_WORLD_{name}": str(i) for i, name in enumerate(names, 2)})
    # As an older JAX, and a newer one where mpi4py is missing.
    monkeypatch.setattr(_processes, "is_in_known_cluster", lambda: False)
    with pytest.raises(ValueError, match=r"coordinator_address is not(.|\n)*FLAXFIT_COORDINATOR"):
        initialize()
    monkeypatch.setenv("FLAXFIT_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    initialize()
    assert given(joined) == {
        "coordinator_address": "10.0.0.1:1234",
        "num_processes": 2,
        "process_id": 3,
        "local_device_ids": 4,
    }


def test_jaxs_own_variable_or_a_way_asked_for_is_left_to_jax(joined, monkeypatch):
    initialize(cluster_detection_method="slurm")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    initialize(num_processes=2, process_id=1)
    assert joined[0]["cluster_detection_method"] == "slurm"
    assert given(joined[1:]) == {"num_processes": 2, "process_id": 1}


@pytest.mark.parametrize(
    "missing", ["coordinator_address", "num_processes", "process_id"], ids=lambda name: name
)
def test_half_known_processes_are_told_what_is_missing(joined, monkeypatch, missing):
    names = dict(zip(("coordinator_address", "num_processes", "process_id"), OURS, strict=True))
    set_all(monkeypatch, {name: text for name, text in OURS.items() if name != names[missing]})
    with pytest.raises(ValueError, match=rf"{missing} is not(.|\n)*{names[missing]}\."):
        initialize()
    assert not joined


def test_called_again_it_does_nothing_unless_it_says_something_else(joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(_processes.global_state, "process_id", 1)
    monkeypatch.setattr(_processes.global_state, "num_processes", 2)
    initialize("10.0.0.1:1234", 2, 1)
    initialize()
    assert not joined
    with pytest.raises(RuntimeError, match=r"joined already(.|\n)*'process_id': 0(.|\n)*once"):
        initialize("10.0.0.1:1234", 2, 0)


def test_a_number_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("FLAXFIT_PROCESS_ID", "first")
    with pytest.raises(ValueError, match="FLAXFIT_PROCESS_ID must be an integer, got 'first'"):
        initialize()

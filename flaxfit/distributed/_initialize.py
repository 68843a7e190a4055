"""initialize: joins the processes of a run; if one fails, all end."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import jax

from flaxfit.distributed import _processes

PEER_FAILED = 88
"""The exit code of a process that ends because another process failed."""

Identity: TypeAlias = dict[str, Any]
"""Arguments that identify a process, by name."""

_POLL_SECONDS = 0.5

_OUR_VARIABLES = {
    "coordinator_address": "FLAXFIT_COORDINATOR_ADDRESS",
    "num_processes": "FLAXFIT_NUM_PROCESSES",
    "process_id": "FLAXFIT_PROCESS_ID",
}

_OPEN_MPI = {
    "num_processes": "OMPI_COMM_WORLD_SIZE",
    "process_id": "OMPI_COMM_WORLD_RANK",
    "local_device_ids": "OMPI_COMM_WORLD_LOCAL_RANK",
}


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    heartbeat_seconds: int = 30,
    connect_seconds: int = 300,
    shutdown_seconds: int = 60,
    patience_seconds: float = 60.0,
    **options: Any,
) -> None:
    """Joins the processes that train together; call it first, before any array is made.

    JAX then knows the devices of all of them: set options such as `jax_num_cpu_devices` before.

    Missing arguments are taken from `FLAXFIT_COORDINATOR_ADDRESS`, `FLAXFIT_NUM_PROCESSES` and
    `FLAXFIT_PROCESS_ID` (`python -m flaxfit.launch` sets them), else from torchrun's `MASTER_ADDR`,
    `MASTER_PORT`, `WORLD_SIZE` and `RANK`, else detected by JAX (SLURM, Open MPI, Kubernetes, TPU
    pods). If nothing is found, the process is alone, and nothing is done. A second call does
    nothing.

    A process that raises ends at once, and the others end within seconds, with code
    `ExitCode.PEER_FAILED` and a message about which one failed and how. A process that is killed
    or stopped counts as failed after `heartbeat_seconds`. Anyone who reaches the coordinator's port
    can join: keep it within the network of the job.

    >>> initialize(num_processes=1)
    >>> _processes.process_count()
    1

    Args:
      coordinator_address: "host:port" of process 0, reached by all.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.
      local_device_ids: the devices of this machine that belong to it; None: all of them.
      coordinator_bind_address: where process 0 listens; None: at `coordinator_address` alone, or
        at every interface if JAX detected that address.
      heartbeat_seconds: after how long without a heartbeat a process counts as failed.
      connect_seconds: how long to wait for the others to start.
      shutdown_seconds: how long to wait for the others to end.
      patience_seconds: how long to wait for the others at points of synchronization, such as the
        end of their data.
      **options: more options of `jax.distributed.initialize`.

    Raises:
      ValueError: only some of the arguments that identify a process are known.
      RuntimeError: this process has already joined, as another one.
    """
    _processes.set_patience(patience_seconds)
    found = _find(
        {
            "coordinator_address": coordinator_address,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    )
    if local_device_ids is not None:
        found["local_device_ids"] = local_device_ids
    if jax.distributed.is_initialized():
        _check_same(found)
        return
    if found.get("num_processes") == 1:
        return
    known = {name: value for name, value in found.items() if name in _OUR_VARIABLES}
    missing = [name for name in _OUR_VARIABLES if name not in known]
    if missing and not _is_in_cluster(options):
        if not known:
            return
        raise ValueError(
            f"Cannot join the other processes: {known} is known, {' and '.join(missing)} is not. "
            f"Pass it, or set {' and '.join(_OUR_VARIABLES[name] for name in missing)}."
        )
    if coordinator_bind_address is None:
        coordinator_bind_address = found.get("coordinator_address")
    jax.distributed.initialize(
        **found,
        coordinator_bind_address=coordinator_bind_address,
        heartbeat_timeout_seconds=heartbeat_seconds,
        initialization_timeout=connect_seconds,
        shutdown_timeout_seconds=shutdown_seconds,
        **options,
    )
    if _processes.process_count() > 1:
        _end_together(shutdown_seconds)
        # All processes must call this now: it waits until every process has.
        jax.devices()


def _find(given: Identity) -> Identity:
    """Completes the arguments that identify this process from environment variables."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, variable in _OUR_VARIABLES.items():
        text = os.environ.get(variable)
        if text and name not in found:
            found[name] = text if name == "coordinator_address" else _number(variable, text)
    return _from_engine() | (found or _from_torchrun())


def _from_engine() -> Identity:
    """Returns what JAX does not detect, or detects wrongly."""
    text = os.environ
    if "OMPI_COMM_WORLD_LOCAL_RANK" in text and "OMPI_MCA_orte_hnp_uri" not in text:
        # Open MPI 5 tells all but the address of process 0, for which JAX needs mpi4py.
        return {name: _number(variable, text[variable]) for name, variable in _OPEN_MPI.items()}
    visible = text.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if text.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == str(len(visible)):
        # Under `--gpus-per-task` it sees its own alone, numbered from 0; JAX expects it to see all.
        return {"local_device_ids": list(range(len(visible)))}
    return {}


def _from_torchrun() -> Identity:
    text = os.environ
    if not all(text.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return {}
    port = _number("MASTER_PORT", text["MASTER_PORT"])
    # torchrun's agent already listens at MASTER_PORT.
    port += text.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found: Identity = {
        "coordinator_address": f"{text['MASTER_ADDR']}:{port}",
        "num_processes": _number("WORLD_SIZE", text["WORLD_SIZE"]),
        "process_id": _number("RANK", text["RANK"]),
    }
    if _number("LOCAL_WORLD_SIZE", text.get("LOCAL_WORLD_SIZE", "1")) > 1:
        found["local_device_ids"] = _number("LOCAL_RANK", text["LOCAL_RANK"])
    return found


def _is_in_cluster(options: Identity) -> bool:
    """Returns whether JAX detects the missing arguments by itself."""
    is_named = "cluster_detection_method" in options or os.environ.get("JAX_COORDINATOR_ADDRESS")
    return bool(is_named) or _processes.is_in_known_cluster()


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} must be an integer, got {text!r}.") from None


def _check_same(found: Identity) -> None:
    here = {
        "num_processes": _processes.process_count(),
        "process_id": _processes.process_index(),
    }
    other = {name: found[name] for name in here if found.get(name, here[name]) != here[name]}
    if other:
        raise RuntimeError(
            f"This process has joined already, as {here}, and cannot join as {other}. "
            "Call initialize once."
        )


def _end_together(shutdown_seconds: float) -> None:
    """Makes this process report its failure to the others, and end if one of them fails."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ended,), daemon=True, name="flaxfit-peers")
    thread.start()

    def end_in_order() -> None:
        ended.set()
        thread.join(10.0)
        if not jax.distributed.is_initialized():
            return
        try:
            _processes.exchange("the end of the program", seconds=shutdown_seconds)
        except TimeoutError as error:
            _fail(str(error), 1)

    # Registered later, so it runs before JAX's shutdown, which does not say which process it
    # waits for.
    atexit.register(end_in_order)
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return  # At a prompt, an exception does not end the process.
    before = sys.excepthook

    def end_at_once(
        kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        before(kind, error, where)
        if jax.distributed.is_initialized():
            is_interrupt = issubclass(kind, KeyboardInterrupt)
            reason = "".join(traceback.format_exception_only(kind, error)).strip()
            _fail(reason, 130 if is_interrupt else 1)

    # A normal exit would first wait for the others, and they wait for this process.
    sys.excepthook = end_at_once


def _watch(ended: threading.Event) -> None:
    own = f"process {_processes.process_index()}:"
    while not ended.wait(_POLL_SECONDS):
        reason = _processes.reported_failure()
        if reason is not None and not reason.startswith(own):
            _say(f"another process failed, so this one ends: {reason}")
            _exit(PEER_FAILED)


def _fail(reason: str, code: int) -> NoReturn:
    """Reports a failure, which ends the other processes, and ends this process."""
    first = _processes.reported_failure()
    _processes.report_failure(reason)
    index, n = _processes.process_index(), _processes.process_count()
    _say(f"process {index} of {n} failed, so all processes end: {reason}")
    if first is not None:
        _say(f"the first to fail was {first}")
    _exit(code)


def _say(text: str) -> None:
    sys.stderr.write(f"flaxfit  {text}\n")


def _exit(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not `sys.exit`: the main thread may be blocked in a collective that never returns.
        os._exit(code)

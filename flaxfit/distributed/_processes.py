"""The processes of a run: their numbers, and messages between them without devices."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax

# JAX has no public API for cluster detection (SLURM, Open MPI, ...), nor for the service that
# connects its processes. Orbax also imports the latter.
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state

Json: TypeAlias = Any
"""A value that the `json` module writes and reads."""

T = TypeVar("T")

_FAILURE = "flaxfit/failure"
_KINDS = [BlockingIOError, FileNotFoundError, OSError, PermissionError, TypeError, ValueError]
_rounds: Counter[str] = Counter()
_patience: dict[str, float] = {"seconds": 60.0}


def process_index() -> int:
    """Returns the index, from 0, of this process among the processes that train together.

    >>> process_index()
    0
    """
    return global_state.process_id if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """Returns the number of processes that train together.

    >>> process_count()
    1
    """
    n = global_state.num_processes if jax.distributed.is_initialized() else 1
    return 1 if n is None else n


def is_main() -> bool:
    """Returns whether this is process 0, which prints, logs and completes files.

    >>> is_main()
    True
    """
    return process_index() == 0


def exchange(topic: str, value: Json = None, *, seconds: float | None = None) -> list[Json]:
    """Waits for all processes and returns their values, in the order of the processes.

    Uses the hosts' network, not the devices: a background thread may call it, and the wait is
    bounded, by default by the patience given to `initialize`. All processes must call it equally
    often for each topic.

    Raises:
      TimeoutError: a process did not arrive in time.
    """
    n = process_count()
    if n == 1:
        return [value]
    client = _client()
    seconds = _patience["seconds"] if seconds is None else seconds
    # A new key per round, so that the value of a faster process is not taken for an older one.
    _rounds[topic] += 1
    number = _rounds[topic]
    place = f"flaxfit/{topic}/{number}"
    client.key_value_set(f"{place}/{process_index()}", json.dumps(value))
    try:
        client.wait_at_barrier(f"{place}/all", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        there = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(place)}
        missing = ", ".join(str(i) for i in range(n) if i not in there) or "unknown"
        raise TimeoutError(
            f"Of {n} processes, number {missing} did not reach {topic!r} within {seconds:g} s, "
            f"where process {process_index()} waited: it hangs, has ended, or is at another step. "
            "See its own output."
        ) from error
    found = {int(k.rpartition("/")[2]): json.loads(v) for k, v in client.key_value_dir_get(place)}
    # Safe: a process reads the previous round before it enters this one.
    client.key_value_delete(f"flaxfit/{topic}/{number - 1}/{process_index()}")
    return [found[i] for i in range(n)]


def is_preempted() -> bool:
    """Returns whether JAX's service has a preemption notice of any process."""
    # JAX's private key: there is no public API.
    return bool(_read("RECEIVED_PREEMPTION_NOTICE"))


def from_main(topic: str, function: Callable[[], T]) -> T:
    """Calls a function on process 0, and returns its JSON result on all processes.

    If it fails, process 0 raises its error, and the others an error of the same built-in type or a
    `RuntimeError`. They wait for an hour.
    """
    if process_count() == 1:
        return function()
    error, outcome = None, None
    if is_main():
        try:
            outcome = {"value": function()}
        except Exception as failure:
            error, outcome = failure, {"kind": type(failure).__name__, "error": str(failure)}
    received = exchange(topic, outcome, seconds=3600)[0]
    if error is not None:
        raise error
    if "error" in received:
        same = [kind for kind in _KINDS if kind.__name__ == received["kind"]]
        kind = same[0] if same else RuntimeError
        raise kind(f"On process 0: {received['error']}")
    return received["value"]


def agree(topic: str, value: Json, *, seconds: float | None = None) -> None:
    """Waits for all processes; raises a ValueError on each if their values differ."""
    values = exchange(topic, value, seconds=seconds)
    if any(other != values[0] for other in values):
        lines = "\n".join(f"  process {i}: {other}" for i, other in enumerate(values))
        raise ValueError(f"The processes do not agree on {topic}:\n{lines}")


def set_patience(seconds: float) -> None:
    """Sets how long `exchange` waits by default."""
    _patience["seconds"] = seconds


def report_failure(reason: str) -> None:
    """Reports a failure, with its reason, to end the other processes."""
    try:
        _client().key_value_set(_FAILURE, f"process {process_index()}: {reason}")
    except jax.errors.JaxRuntimeError:
        return  # An earlier failure is reported, or the service and so the run has ended.


def reported_failure() -> str | None:
    """Returns the first failure that a process has reported, or None."""
    return _read(_FAILURE)


def is_in_known_cluster() -> bool:
    """Returns whether JAX detects a cluster that provides the processes."""
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    return any(kind.is_env_present() for kind in kinds)


def _client() -> Any:
    return global_state.client


def _read(key: str) -> str | None:
    """Returns a value of the service; None if there is no value, or no service."""
    try:
        return _client().key_value_try_get(key) if _client() is not None else None
    except jax.errors.JaxRuntimeError:
        return None

"""Processes: which one of a run this is, and what they tell each other without their devices."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

# JAX has no public door to the service that its processes meet at. Orbax goes through this one.
from jax._src.distributed import global_state

_FAILURE = "flaxfit/failure"
_KINDS = {
    kind.__name__: kind
    for kind in (
        BlockingIOError,
        FileNotFoundError,
        OSError,
        PermissionError,
        TypeError,
        ValueError,
    )
}
_rounds: Counter[str] = Counter()
_patience: dict[str, float] = {"seconds": 60.0}


def process_index() -> int:
    """The number of this process among those that train together, from 0.

    >>> process_index()
    0
    """
    return global_state.process_id if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """How many processes train together.

    >>> process_count()
    1
    """
    n = global_state.num_processes if jax.distributed.is_initialized() else 1
    return 1 if n is None else n


def is_main() -> bool:
    """Whether this is the process that prints, logs and completes files: the one of number 0.

    >>> is_main()
    True
    """
    return process_index() == 0


def exchange(topic: str, value: Any = None, *, seconds: float | None = None) -> list[Any]:
    """What every process says on a topic, in the order of the processes; waits for all of them.

    It goes over the network of the hosts, not over the devices, so that a background thread may
    use it, and it can wait for a bounded time. All processes must come to the same topics equally
    often.

    >>> exchange("greeting", "hello")
    ['hello']

    Args:
      topic: what it is about; part of the message when a process does not come.
      value: JSON.
      seconds: how long to wait; None: the patience given to `initialize`.

    Raises:
      TimeoutError: a process did not come in time.
    """
    n = process_count()
    if n == 1:
        return [value]
    client: Any = global_state.client
    seconds = _patience["seconds"] if seconds is None else seconds
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
            f"Of {n} processes, number {missing} did not come to {topic!r} within {seconds:g} s, "
            f"where process {process_index()} waited: it hangs, has ended, or is at another step. "
            "Its own output says more."
        ) from error
    found = {int(k.rpartition("/")[2]): json.loads(v) for k, v in client.key_value_dir_get(place)}
    # Whoever is here has read the round before.
    client.key_value_delete(f"flaxfit/{topic}/{number - 1}/{process_index()}")
    return [found[i] for i in range(n)]


def is_preempted() -> bool:
    """Whether one of several processes was told to end, as far as JAX's service knows.

    >>> is_preempted()
    False
    """
    client: Any = global_state.client
    if client is None:
        return False
    try:
        # Where the service keeps what it has been told; there is no public way to ask.
        return bool(client.key_value_try_get("RECEIVED_PREEMPTION_NOTICE"))
    except jax.errors.JaxRuntimeError:
        return False


def from_main(topic: str, function: Callable[[], Any], *, seconds: float | None = None) -> Any:
    """What a function returns on process 0, which alone calls it; its failure is everyone's.

    >>> from_main("answer", lambda: 42)
    42

    Args:
      topic: as of `exchange`.
      function: returns JSON.
      seconds: how long the others wait for it; None: an hour.

    Raises:
      RuntimeError: it failed on process 0, which raises its own error; a common built-in error
        keeps its kind.
    """
    if process_count() == 1:
        return function()
    error, said = None, None
    if is_main():
        try:
            said = {"value": function()}
        except Exception as failure:
            error, said = failure, {"kind": type(failure).__name__, "error": str(failure)}
    heard = exchange(topic, said, seconds=3600 if seconds is None else seconds)[0]
    if error is not None:
        raise error
    if "error" in heard:
        kind = _KINDS.get(heard["kind"], RuntimeError)
        raise kind(f"On process 0: {heard['error']}")
    return heard["value"]


def agree(topic: str, value: Any, *, seconds: float | None = None) -> None:
    """Has every process come to a topic with the same value, or fail.

    >>> agree("batch", [8, 3])

    Raises:
      ValueError: their values differ; all processes raise it.
    """
    said = exchange(topic, value, seconds=seconds)
    if any(other != said[0] for other in said):
        lines = "\n".join(f"  process {i}: {other}" for i, other in enumerate(said))
        raise ValueError(f"The processes do not agree on {topic}:\n{lines}")


def set_patience(seconds: float) -> None:
    """How long `exchange` waits where nothing else is said."""
    _patience["seconds"] = seconds


def report_failure(reason: str) -> None:
    """Has the other processes end, and say why."""
    client: Any = global_state.client
    try:
        client.key_value_set(_FAILURE, f"process {process_index()}: {reason}")
    except jax.errors.JaxRuntimeError:
        return  # The first failure stands, or the service is gone, and with it everyone.


def reported_failure() -> str | None:
    """The first failure that a process has reported, or None."""
    client: Any = global_state.client
    if client is None:
        return None
    try:
        return client.key_value_try_get(_FAILURE)
    except jax.errors.JaxRuntimeError:
        return None

"""A launcher for one machine: `python -m flaxfit.launch -n 2 script.py` starts two processes.

All of them end when one fails, and start again up to `--restarts` times. On several machines, use
SLURM, MPI, Kubernetes or Ray instead.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

__all__ = ["main"]

_POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script in several processes and returns their exit code, that of the first failure.

    >>> main(["-n", "1", "-c", "print('hello')"])
    [0] hello
    0
    """
    options = _parser().parse_args(arguments)
    if options.n < 1 or options.restarts < 0:
        _parser().error(f"-n must be 1 or more and --restarts 0 or more, got {options}")
    command = ["-c" if options.c else options.script, *options.arguments]
    if options.c:
        command.insert(1, options.script)
    code = 0
    for attempt in range(options.restarts + 1):
        if attempt:
            _say(f"starting all processes again ({attempt} of {options.restarts})")
        code, is_signaled = _run_once(command, options, attempt)
        if code == 0 or is_signaled:
            return code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m flaxfit.launch", description=__doc__)
    parser.add_argument("-n", type=int, required=True, help="the number of processes")
    parser.add_argument("--restarts", type=int, default=0, help="how often to start again")
    parser.add_argument("--cpu-devices", type=int, help="simulated CPU devices of each process")
    parser.add_argument(
        "--grace", type=float, default=15.0, help="seconds from a failure until the rest is killed"
    )
    parser.add_argument(
        "--patience", type=float, default=90.0, help="seconds from a signal until all are killed"
    )
    parser.add_argument("-c", action="store_true", help="run the script given as text, not a file")
    parser.add_argument("script", help="a Python script that calls flaxfit.initialize()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _run_once(command: list[str], options: argparse.Namespace, attempt: int) -> tuple[int, bool]:
    """Returns the exit code of one attempt, and whether the launcher was signaled to end it."""
    signals: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    try:
        address = f"127.0.0.1:{_free_port()}"
        for index in range(options.n):
            environment = os.environ | {
                "FLAXFIT_COORDINATOR_ADDRESS": address,
                "FLAXFIT_NUM_PROCESSES": str(options.n),
                "FLAXFIT_PROCESS_ID": str(index),
                "FLAXFIT_ATTEMPT": str(attempt),
                "PYTHONUNBUFFERED": "1",
            }
            if options.cpu_devices:
                environment["JAX_NUM_CPU_DEVICES"] = str(options.cpu_devices)
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            processes.append(process)
            readers.append(threading.Thread(target=_show, args=(index, process.stdout)))
            readers[-1].start()
        return _wait(processes, signals, options), bool(signals)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    processes: list[subprocess.Popen[bytes]], signals: list[int], options: argparse.Namespace
) -> int:
    """Waits until all processes have ended; returns the exit code of the first that failed."""
    running = dict(enumerate(processes))
    first, deadline, n_passed_on = 0, float("inf"), 0
    while running:
        for index, process in list(running.items()):
            try:
                code = process.wait(_POLL_SECONDS / len(running))
            except subprocess.TimeoutExpired:
                continue
            del running[index]
            if code:
                name = f" ({signal.Signals(-code).name})" if code < 0 else ""
                _say(f"process {index} has ended with code {code}{name}")
                first = first or (128 - code if code < 0 else code)
                deadline = min(deadline, time.monotonic() + options.grace)
        new_signals = signals[n_passed_on:]
        n_passed_on += len(new_signals)
        for number in new_signals:
            # Ctrl-C in a terminal also reaches the processes by itself.
            _say(f"received {signal.Signals(number).name}, as the processes do")
            for process in running.values():
                process.send_signal(number)
            deadline = min(deadline, time.monotonic() + options.patience)
        if new_signals and n_passed_on > 1:
            deadline = 0.0
        if running and time.monotonic() > deadline:
            names = ", ".join(map(str, running))
            seconds = options.patience if signals else options.grace
            why = (
                "after a second signal"
                if deadline == 0
                else f"which did not end within {seconds:g} s"
            )
            _say(f"killing process {names}, {why}")
            for process in running.values():
                process.kill()
    return first


def _show(index: int, output: IO[bytes]) -> None:
    """Prints the output of a process line by line, each with the number of the process."""
    with output:
        for line in output:
            sys.stdout.write(f"[{index}] {line.decode(errors='replace').rstrip()}\n")
            sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _say(text: str) -> None:
    sys.stderr.write(f"flaxfit.launch  {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

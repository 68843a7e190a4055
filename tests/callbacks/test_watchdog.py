"""Runs that hang, for real: the process ends, with its exit code, and says where it hung."""

import json
import sys
import threading

import pytest
from loops import make_weight_loop

from flaxfit.callbacks import ExitCode, Watchdog

RUN = """
import json, os, signal, sys, threading
import numpy as np, optax
import flaxfit as ff
from flaxfit.callbacks import SaveOnSignal, Watchdog
from flaxfit.checkpoints import CheckpointFileReader, CheckpointFileWriter, save

folder, *cases = sys.argv[1:]
children = {}
for case in cases:  # Processes that share what was imported; JAX has not started any thread.
    children[case] = os.fork()
    if children[case] == 0:
        break
else:
    codes = {case: os.waitstatus_to_exitcode(os.waitpid(n, 0)[1]) for case, n in children.items()}
    print(json.dumps(codes))
    sys.exit()

folder = f"{folder}/{case}"
os.dup2(os.open(f"{folder}.err", os.O_WRONLY | os.O_CREAT), 2)
x = np.ones((8, 1), np.float32)
forever = threading.Event()

def wait_for_the_file_server():
    forever.wait()

def batches():
    for i in range(100):
        if i == 0 and case in ("first", "validation"):
            wait_for_the_file_server()
        if i == (0 if case == "resumed" else 5) and case not in ("signal", "cleanup"):
            if case in ("deadline", "resumed"):
                os.kill(os.getpid(), signal.SIGTERM)
            wait_for_the_file_server()
        if i == 5 and case in ("signal", "cleanup"):
            os.kill(os.getpid(), signal.SIGTERM)
        yield x, x

if case in ("hang", "prefetched", "first", "validation"):
    callbacks = [Watchdog(1.0)]
else:
    grace_seconds = 60.0 if case == "signal" else 1.0
    callbacks = [SaveOnSignal(grace_seconds=grace_seconds), CheckpointFileWriter(folder)]
init = lambda rngs, x: {"params": np.zeros(1, np.float32)}
apply = lambda v, x, **_: (v["params"] * x, {})
if case in ("first", "validation"):
    model = ff.Model((init, apply), optax.sgd(0.1), "mse")
    if case == "first":
        model.fit(batches, callbacks=callbacks, verbose=0)
    model.fit(x, x, batch_size=8, verbose=0)
    # A later call is guarded, too.
    model.fit(x, x, batch_size=8, validation_data=batches, callbacks=callbacks, verbose=0)
data = ff.data.prefetch(batches) if case == "prefetched" else batches
task = ff.TrainTask(apply, optax.sgd(0.1), "mse", data)
if case == "resumed":
    save(folder, ff.init_state(init, task.optimizer, 0, (x,)).replace_step(7))
    init = CheckpointFileReader(folder, init)
try:
    for checkpoint in ff.TrainLoop(init, task, 0, x, 3, callbacks=callbacks):
        pass
except SystemExit:
    if case != "cleanup":
        raise
    del callbacks, checkpoint
if case == "cleanup":  # That of the program, after the loop is gone.
    forever.wait()
"""
CODES = {
    "hang": ExitCode.HUNG,
    "prefetched": ExitCode.HUNG,
    "first": ExitCode.HUNG,
    "validation": ExitCode.HUNG,
    "deadline": ExitCode.UNSAVED,
    "resumed": ExitCode.PREEMPTED,
    "signal": ExitCode.PREEMPTED,
    "cleanup": ExitCode.PREEMPTED,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, run_child):
    """The last words and the exit codes of processes that ran at the same time."""
    folder = tmp_path_factory.mktemp("hangs")
    path = folder / "run.py"
    path.write_text(RUN)
    done = run_child([sys.executable, str(path), str(folder), *CODES], seconds=120)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    return {case: ((folder / f"{case}.err").read_text(), codes[case]) for case in CODES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CODES)
def test_a_process_ends_with_its_code_and_names_the_hung_line_of_a_data_loader(ended, case):
    words, code = ended[case]
    assert code == CODES[case], words
    if case not in ("signal", "cleanup"):
        assert f"the process ends with code {code} ({CODES[case].name})" in words
        assert "in batches\n    wait_for_the_file_server()" in words


@pytest.mark.slow
def test_what_is_said_of_a_signal(ended):
    assert "received SIGTERM: step 6 is saved; the process ends with code 85" in ended["signal"][0]
    assert "SIGTERM arrived 1 s ago" in ended["deadline"][0]
    assert "arrived 1 s ago; step 6 is saved" in ended["cleanup"][0]
    assert "arrived 1 s ago; no step was completed since step 7" in ended["resumed"][0]
    assert "step 6 has not ended for 1." in ended["hang"][0]


@pytest.mark.slow
def test_code_of_ones_own_is_not_watched():
    # Had it been counted, this process would have ended.
    seconds = 0.2
    for _ in make_weight_loop([Watchdog(seconds, slow_seconds=60)]):
        threading.Event().wait(2 * seconds)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "flaxfit-watchdog"]


def test_the_watch_ends_with_the_loop():
    assert [len(threads()) for _ in make_weight_loop([Watchdog(60)])] == [1, 1, 1]
    for thread in threads():
        thread.join(timeout=10)
    assert not threads()


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": 1, "slow_seconds": -1}])
def test_allowances_are_positive(options):
    with pytest.raises(ValueError, match="positive allowances"):
        Watchdog(**options)

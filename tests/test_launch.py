"""The launcher: several processes on one machine start, speak, fail and end together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flaxfit import launch

ROOT = Path(__file__).parents[1]
READ_FOR_EVER = "import os\nos.read(os.pipe()[0], 1)\n"


def run(capfd, *arguments):
    code = launch.main([*arguments])
    captured = capfd.readouterr()
    return code, sorted(captured.out.splitlines()), captured.err


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_each_process_is_told_which_one_it_is_and_one_address_of_this_machine(capfd, tmp_path):
    path = script(
        tmp_path,
        "import os, sys\n"
        "names = 'PROCESS_ID', 'NUM_PROCESSES', 'COORDINATOR_ADDRESS'\n"
        "print(*(os.environ[f'FLAXFIT_{name}'] for name in names))\n"
        "print(os.environ['JAX_NUM_CPU_DEVICES'], sys.argv[1:])\n",
    )
    code, lines, _ = run(capfd, "-n", "2", "--cpu-devices", "3", path, "--lr", "0.1")
    assert code == 0
    address = lines[0].split()[-1]
    assert address.startswith("127.0.0.1:")
    arguments = "3 ['--lr', '0.1']"
    expected = [f"[{i}] {line}" for i in (0, 1) for line in (f"{i} 2 {address}", arguments)]
    assert lines == expected


def test_when_one_fails_the_others_are_killed_and_its_code_is_returned(capfd, tmp_path):
    fails = "import os, sys\nif os.environ['FLAXFIT_PROCESS_ID'] == '1': sys.exit(7)\n"
    code, _, messages = run(
        capfd, "-n", "3", "--grace", "0.2", script(tmp_path, fails + READ_FOR_EVER)
    )
    assert code == 7
    assert "process 1 has ended with code 7" in messages
    assert "killing process 0, 2, which did not end within 0.2 s" in messages


def test_the_code_of_a_killed_process_is_that_of_a_shell(capfd, tmp_path):
    path = script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    code, _, messages = run(capfd, "-n", "1", path)
    assert code == 128 + signal.SIGKILL
    assert "process 0 has ended with code -9 (SIGKILL)" in messages


def test_a_failed_run_starts_again_as_often_as_it_may(capfd, tmp_path):
    path = script(
        tmp_path,
        "import os, sys\n"
        "attempt = int(os.environ['FLAXFIT_ATTEMPT'])\n"
        "print('attempt', attempt)\n"
        "sys.exit(3 if attempt < 2 else 0)\n",
    )
    code, lines, messages = run(capfd, "-n", "1", "--restarts", "2", path)
    assert code == 0
    assert lines == ["[0] attempt 0", "[0] attempt 1", "[0] attempt 2"]
    assert "starting all processes again (2 of 2)" in messages
    assert run(capfd, "-n", "1", "--restarts", "1", path)[0] == 3


@pytest.mark.parametrize("wrong", [("-n", "0"), ("-n", "2", "--restarts", "-1"), ("-n", "two")])
def test_wrong_numbers_are_refused_before_anything_starts(capfd, wrong):
    with pytest.raises(SystemExit, match="2"):
        launch.main([*wrong, "never_read.py"])
    assert wrong[-2] in capfd.readouterr().err


def test_errors_and_unfinished_lines_are_shown_like_the_rest(capfd):
    text = "import sys; sys.stderr.write('to stderr\\n'); sys.stdout.buffer.write(b'caf\\xe9')"
    code, lines, _ = run(capfd, "-n", "1", "-c", text)
    assert code == 0
    assert lines == ["[0] caf\ufffd", "[0] to stderr"]


def test_a_script_that_does_not_exist_fails_with_pythons_own_words(capfd, tmp_path):
    code, lines, _ = run(capfd, "-n", "1", str(tmp_path / "missing.py"))
    assert code == 2
    assert "No such file" in lines[0]


def launched(tmp_path, text, *arguments):
    """A launcher whose two processes have said that they are ready."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "flaxfit.launch", "-n", "2", *arguments, script(tmp_path, text)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    ready = sorted(launcher.stdout.readline() for _ in range(2))
    assert ready == ["[0] ready\n", "[1] ready\n"]
    return launcher


def told(launcher, *signals):
    """Its exit code and its messages, after signals."""
    try:
        for number in signals:
            launcher.send_signal(number)
            # It has read this one when it says so.
            line = launcher.stderr.readline()
            assert f"received {number.name}" in line, line
        messages = launcher.stderr.read()
        launcher.wait(60)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        launcher.stderr.close()
    return launcher.returncode, messages


@pytest.mark.slow
def test_a_launcher_that_is_told_to_end_tells_its_processes_and_does_not_restart(tmp_path):
    ends = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
        "print('ready')\n" + READ_FOR_EVER
    )
    code, messages = told(launched(tmp_path, ends, "--restarts", "5"), signal.SIGTERM)
    assert code == 85
    assert "starting" not in messages


DEAF = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "print('ready')\n" + READ_FOR_EVER
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "signals", "why"),
    [
        (("--patience", "0.2"), [signal.SIGTERM], "which did not end within 0.2 s"),
        ((), [signal.SIGINT] * 2, "after a second signal"),
    ],
    ids=["patience", "twice"],
)
def test_processes_that_do_not_listen_are_killed(tmp_path, options, signals, why):
    code, messages = told(launched(tmp_path, DEAF, *options), *signals)
    assert code == 128 + signal.SIGKILL
    assert f"killing process 0, 1, {why}" in messages

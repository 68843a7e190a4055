"""What every test shares: four simulated devices, and doctests that know the optional packages."""

import atexit
import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from continued_examples import ContinuedExamples

# XLA spends most of its time on optimizing, which small programs do not need, and on the division
# of them among threads. It aborts on flags that it does not know: other versions of JAX, and tests
# with FLAXFIT_TEST_COMPILATION=default, compile as for users.
_UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
QUICK_COMPILATION = {
    (0, 10): f"{_UNOPTIMIZED} --xla_cpu_use_fusion_emitters=false",
    (0, 12): f"{_UNOPTIMIZED} --xla_cpu_emitter_verification_level=0",
}
xla_flags = os.environ.get("XLA_FLAGS", "")  # Those that come later win.
quick_flags = QUICK_COMPILATION.get(jax.__version_info__[:2], "")
if os.environ.get("FLAXFIT_TEST_COMPILATION") != "default" and quick_flags not in xla_flags:
    os.environ["XLA_FLAGS"] = f"{quick_flags} {xla_flags}".strip()

jax.config.update("jax_num_cpu_devices", int(os.environ.get("FLAXFIT_TEST_DEVICES", "4")))

# Tests build the same small programs over and over: each is compiled once in this process, and once
# in all those that tests start, which share a folder.
SCRATCH = Path(tempfile.mkdtemp(prefix="flaxfit-tests-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
PROGRAMS = SCRATCH / "programs"
PROGRAMS.mkdir()
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Else the name of the folder is part of what programs are looked up by, even on a CPU.
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")

# Processes that tests start write nothing into the caches of the user.
os.environ["FLAXFIT_COMPILATION_CACHE"] = "off"

# To write a program and load it again takes half as long as to compile it, so this process keeps
# its own in memory. No setting does this: it replaces two functions of JAX where they are known.
LOADED = {}


def _keep_loaded_programs():
    from jax._src import compilation_cache

    read = compilation_cache.get_executable_and_time
    write = compilation_cache.put_executable_and_time

    def is_ours():  # Not the folder of a test.
        return jax.config.jax_compilation_cache_dir == str(PROGRAMS)

    def get_executable_and_time(key, options, backend, devices, *host_callbacks):
        if not is_ours():
            return read(key, options, backend, devices, *host_callbacks)
        # The key does not tell the functions that a program calls back, which are part of it.
        return (None, None) if any(host_callbacks) else LOADED.get(key, (None, None))

    def put_executable_and_time(key, name, executable, backend, seconds):
        if is_ours():
            LOADED[key] = executable, seconds
        else:
            write(key, name, executable, backend, seconds)

    compilation_cache.get_executable_and_time = get_executable_and_time
    compilation_cache.put_executable_and_time = put_executable_and_time


if jax.__version_info__[:2] in QUICK_COMPILATION:
    _keep_loaded_programs()

# Keras chooses its backend when it is imported first, which other libraries do, too.
os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_HOME"] = str(SCRATCH)

# torch imports Triton, which no test uses, for its first optimizer. That crashes a process that has
# loaded TensorFlow.
sys.modules["triton"] = None

# Tracing makes many objects that live on: to look for garbage among them costs a tenth of a run.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    gc.freeze()  # Modules and tests live to the end: no collection needs to visit them.


# What a test may make the library listen to, and what pytest and Ctrl-C need.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # A shell starts it so in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.pluginmanager.register(ContinuedExamples())


@pytest.fixture(scope="session")
def environment():
    """The environment for processes of Python that are to share what they compile.

    Not for those that are killed at any moment: what they were just writing would be there.
    """
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


@pytest.fixture
def own_environment(environment, tmp_path):
    """The same for processes that are killed between steps: the programs are copied for them."""
    programs = shutil.copytree(PROGRAMS, tmp_path / "programs")
    return {**environment, "JAX_COMPILATION_CACHE_DIR": str(programs)}


# Each compiled program maps a few pieces of memory; Linux allows a process 65,530 of them.
MAPS = Path("/proc/self/maps")
ENOUGH_MAPS = 15_000


def forget_programs():
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > ENOUGH_MAPS:
        LOADED.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    yield
    forget_programs()


@pytest.fixture
def few_programs():
    """For a module with tests of very many programs, which forget them after each."""
    yield
    forget_programs()


@pytest.fixture(autouse=True)
def _same_signal_handlers():
    """Fails the test that leaves a handler of its own, instead of one that comes after it."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    after = {number: signal.getsignal(number) for number in HANDLED}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.fixture(scope="session")
def memory_within():
    """A context in which the process gets so many bytes more, and then `MemoryError`.

    What it has freed and not given back it may use beside these. To trace what Python takes, as
    elsewhere than on Linux, lengthens a test fivefold.
    """

    @contextlib.contextmanager
    def limited(n_bytes):
        pages, soft_and_hard = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(pages.read_bytes().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + n_bytes, soft_and_hard[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, soft_and_hard)

    @contextlib.contextmanager
    def traced(n_bytes):
        tracemalloc.start()
        try:
            yield
            assert tracemalloc.get_traced_memory()[1] < n_bytes
        finally:
            tracemalloc.stop()

    return limited if sys.platform == "linux" else traced


@pytest.fixture(scope="session")
def run_child():
    """Runs a command to its end, as `subprocess.run` with its output captured as text.

    One that does not end in time fails the test with the stacks of all its threads. No process
    that it has started outlives the call.
    """

    def end(process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def run(command, *, seconds=300, cwd=None, env=None):
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # They then print the stacks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            end(process)
            output, errors = process.communicate(timeout=10)
            pytest.fail(f"{command} did not end within {seconds} s:\n{output}\n{errors}")
        finally:
            end(process)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    return run


@pytest.fixture(scope="session")
def keras():
    return pytest.importorskip("keras")


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def torchmetrics():
    return pytest.importorskip("torchmetrics")


@pytest.fixture(scope="session")
def assert_on_page_on_keras():
    """Checks that the page on Keras lists differences: what differs, in Keras and in flaxfit."""
    page = Path(__file__).parents[1] / "docs" / "migrating-from-keras.md"
    text = page.read_text(encoding="utf-8")

    def check(differences):
        rows = [" | ".join((what, *both)) for what, both in differences.items()]
        assert [row for row in rows if f"| {row} |" not in text] == []

    return check


# A file of the names of tests that passed, one a line: a session adds its own, and leaves out those
# that it finds there. So a second environment runs just what the first skipped or did not select.
PASSED = os.environ.get("FLAXFIT_TEST_PASSED")


def pytest_runtest_logreport(report):
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if PASSED and report.when == "call" and report.passed and not is_worker:
        with open(PASSED, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


def _deselect_passed(config, items):
    if PASSED and Path(PASSED).exists():
        names = set(Path(PASSED).read_text(encoding="utf-8").splitlines())
        passed = [item for item in items if item.nodeid in names]
        items[:] = [item for item in items if item.nodeid not in names]
        config.hook.pytest_deselected(items=passed)


OPTIONAL = {
    *("clu", "datasets", "grain", "jax2onnx", "matplotlib", "metrax", "mlflow", "pandas"),
    *("tensorboardX", "tensorflow", "torch", "wandb"),
}


# Files of few tests that take long, most of them in processes of their own: were they the last, the
# other workers would wait for them.
LONG = {
    *("test_accelerator_benchmark", "test_against_peers", "test_benchmarks", "test_docs"),
    *("test_eight_devices", "test_examples", "test_faults", "test_many_processes"),
    *("test_process_faults", "test_site"),
}


def pytest_collection_modifyitems(config, items):
    """Puts long files first, and skips doctests that import a package that is not installed."""
    _deselect_passed(config, items)
    items.sort(key=lambda item: item.path.stem not in LONG)
    missing = {name for name in OPTIONAL if find_spec(name) is None}
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            lines = "".join(example.source for example in item.dtest.examples)
            for name in sorted(missing):
                if f"import {name}" in lines or f"from {name}" in lines:
                    item.add_marker(pytest.mark.skip(reason=f"{name} is not installed"))

"""Kills and damages runs repeatedly, and checks where each of them ends.

    python -m benchmarks.faults [--kills 100] [--damages 20] [--sizes 10 100 500]

A small model with dropout and BatchNorm is trained by `fit` with a folder, its process killed by
SIGKILL at random moments and at chosen instants of saving and restoring, its newest checkpoint
damaged in between, and the same call made again until it ends. Its state, history and callbacks
must then be those of the run that nothing happened to, to the bit; else the exit code is 1.

After that: how long a save in the background blocks training, beside Orbax alone. More than
1.2 times as long makes the exit code 1, too.
"""

import argparse
import collections
import contextlib
import errno
import functools
import hashlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

N_EPOCHS = 8
RANDOM = "SIGKILL at a random moment"
FULL = "no space left on the disk"
LARGEST_RATIO = 1.2
INSTANTS = {
    FULL: ("_seal", "write", "full"),
    "SIGKILL while arrays are written": ("_orbax.StepWriter", "start", "after"),
    "SIGKILL between rename and cleanup": ("_folder", "complete", "after"),
    "SIGKILL at the end of a restore": ("_file", "read", "after"),
    "SIGKILL between seal and rename": ("_seal", "write", "after"),
    "SIGKILL at the start of a restore": ("_file", "read", "before"),
    "SIGKILL before a step is sealed": ("_folder", "complete", "before"),
    "SIGKILL during the cleanup": ("_folder", "set_aside", "after"),
}
DAMAGES = ("a bit flipped", "a file truncated", "a file deleted", "an empty folder as newest")


def main() -> None:
    """Prints the table of faults, and the cost of a save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10, 100, 500], help="in MB")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    lost = faults(arguments.kills, arguments.damages, random.Random(arguments.seed))
    ratios = [cost(size) for size in arguments.sizes]
    sys.exit(1 if lost or max(ratios, default=0) > LARGEST_RATIO else 0)


def faults(n_kills: int, n_damages: int, chance: random.Random) -> int:
    """Tries the faults, prints their table, and returns the number of lost runs."""
    plan = [RANDOM, *INSTANTS]
    kills = [plan[i % 2 and 1 + i // 2 % len(INSTANTS)] for i in range(n_kills)]
    damages = [DAMAGES[i % len(DAMAGES)] for i in range(n_damages)]
    counts = {name: collections.Counter() for name in (*plan, *DAMAGES)}
    with tempfile.TemporaryDirectory() as work:
        trainer = Trainer(Path(work))
        expected, code = trainer.run("whole")
        if expected is None:
            raise SystemExit(f"The run that nothing happened to ended with code {code}.")
        began = time.perf_counter()
        trainer.run("timed")
        seconds = time.perf_counter() - began
        n_runs = 0
        while kills or damages:
            n_runs += 1
            folder, suffered, result = trainer.work / f"run-{n_runs}", [], None
            while result is None:
                if damages and not kills:
                    kills.append(RANDOM)  # What is damaged is a run that was killed.
                if kills and "restore" in kills[-1] and not folder.exists():
                    kills.insert(0, kills.pop())  # There is nothing to restore yet.
                fault = kills[-1] if kills else None
                after = chance.uniform(0, seconds) if fault == RANDOM else None
                n = 1 if fault and "restore" in fault else chance.randint(1, 3)
                trap = (INSTANTS[fault], n) if fault in INSTANTS else None
                result, code = trainer.run(folder.name, after=after, trap=trap)
                if code == -signal.SIGKILL or (fault == FULL and result is None and code == 1):
                    suffered.append(kills.pop())
                elif result is None:
                    print(f"run {n_runs} failed with code {code} after {suffered}")
                    break
                elif trap is not None:
                    # It had nothing left to save, or nothing to read yet: for the next run.
                    kills.insert(0, kills.pop())
                if damages and result is None and damage(folder, damages[-1], chance):
                    suffered.append(damages.pop())
                    counts[suffered[-1]]["detected"] += detects(folder, suffered[-1])
            for name in suffered:
                counts[name]["tried"] += 1
                counts[name]["survived" if result == expected else "lost"] += 1
            print(f"run {n_runs}: {len(suffered)} faults, ended", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return report(counts, n_runs)


def report(counts: dict[str, collections.Counter], n_runs: int) -> int:
    """Prints the table; returns the number of faults that lost a run."""
    columns = ("tried", "detected", "survived", "lost")
    print(f"\n{'fault':36}" + "".join(f"{column:>10}" for column in columns))
    for name, row in counts.items():
        values = [row[c] if c != "detected" or name in DAMAGES else "" for c in columns]
        print(f"{name:36}" + "".join(f"{value:>10}" for value in values))
    total = sum(counts.values(), collections.Counter())
    print(f"{f'in {n_runs} runs':36}" + "".join(f"{total[column]:>10}" for column in columns))
    undetected = sum(counts[name]["tried"] - counts[name]["detected"] for name in DAMAGES)
    return total["lost"] + undetected


class Trainer:
    """Starts training processes, forked from one that has imported everything."""

    def __init__(self, work: Path):
        self.work = work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["flaxfit", "optax", "orbax.checkpoint"])

    def run(
        self, name: str, *, after: float | None = None, trap: tuple | None = None
    ) -> tuple[str | None, int | None]:
        """Trains until it ends or is killed: the fingerprint, or None, and the exit code."""
        result = self.work / "result"
        result.unlink(missing_ok=True)
        # What the whole run compiles, the others only load.
        cache = self.work / "programs"
        arguments = (str(self.work / name), str(result), str(cache), trap)
        process = self._context.Process(target=train, args=arguments)
        process.start()
        process.join(after)
        if process.is_alive():
            process.kill()
        process.join()
        return result.read_text() if result.exists() else None, process.exitcode


def detects(folder: Path, kind: str) -> bool:
    """Returns whether strict reading refuses the damage, and other reading sets it aside."""
    from flaxfit.checkpoints import CheckpointFileReader

    n_corrupt = len(list(folder.glob("corrupt-*")))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            CheckpointFileReader(folder, strict=True).read()
        except ValueError:
            is_read = CheckpointFileReader(folder).read() is not None
        else:
            return False
    # An empty folder is named and passed over.
    is_aside = len(list(folder.glob("corrupt-*"))) > n_corrupt
    return is_read and (is_aside or kind == DAMAGES[-1])


def train(folder: str, result: str, cache: str, trap: tuple | None) -> None:
    """One process: a call of `fit` that resumes from the folder."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import optax
    from tqdm import tqdm

    import flaxfit as ff
    from flaxfit.callbacks import EarlyStopping

    tqdm.set_lock(threading.RLock())  # Its own, between processes, is left behind by the killed.

    if trap is not None:
        set_trap(*trap)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    stopping = EarlyStopping("val_loss", patience=N_EPOCHS)
    model = ff.Model(make_net(), optax.adam(1e-2), "mse", ["mae"])
    history = model.fit(
        *(x, y),
        batch_size=16,
        epochs=N_EPOCHS,
        validation_data=(x, y),
        callbacks=[stopping],
        checkpoint_dir=folder,
        verbose=0,
    )
    state = model.state.replace(key=jax.random.key_data(model.state.key))
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    state = jax.tree.map(lambda x: np.asarray(x).tolist(), stopping.get_state())
    record = [digest.hexdigest(), history.steps, dict(history), state]
    Path(result).write_text(json.dumps(record))


def make_net() -> object:
    """Makes a model with everything that makes resuming hard."""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x))
            x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
            return nn.Dense(1)(x)

    return Net()


def set_trap(instant: tuple[str, str, str], n: int) -> None:
    """Kills this process, or fills its disk, at the n-th call of a function of the checkpoints."""
    from flaxfit import checkpoints

    place, name, when = instant
    owner = checkpoints
    for part in place.split("."):
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []

    def trapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == n and when == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(calls) == n and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == n and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, trapped)


def damage(folder: Path, kind: str, chance: random.Random) -> bool:
    """Damages the newest of several checkpoints in a folder; returns whether it did."""
    steps = [entry for entry in folder.glob("*") if entry.name.isdigit() and any(entry.iterdir())]
    steps.sort(key=_number)
    if len(steps) < 2:
        return False
    if kind == "an empty folder as newest":
        (folder / str(_number(steps[-1]) + 1)).mkdir()
        return True
    files = sorted(path for path in steps[-1].rglob("*") if path.is_file() and path.stat().st_size)
    path = chance.choice(files)
    if kind == "a file deleted":
        path.unlink()
        return True
    content = bytearray(path.read_bytes())
    if kind == "a file truncated":
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return True


def _number(path: Path) -> int:
    return int(path.name)


def cost(megabytes: int, n_rounds: int = 15) -> float:
    """Returns the time of the call that starts a background save, relative to Orbax's own.

    The larger of two ratios: to a bare `AsyncCheckpointer`, and to a `CheckpointManager`, which
    keeps the last step and a record beside it as we do. Each is the median of the ratios of
    single rounds, in which the order changes: whatever else the machine does befalls all.
    """
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from flaxfit import Checkpoint, TrainState
    from flaxfit.checkpoints import CheckpointFileWriter

    n = megabytes * 250_000 // 10
    params = {f"layer_{i}": jnp.arange(n, dtype=jnp.float32) + i for i in range(10)}
    state = TrainState(jnp.int32(0), params, {}, {}, jax.random.key(0))
    names = ("flaxfit", "AsyncCheckpointer", "CheckpointManager")
    chance = random.Random(0)  # Each may have to wait for the disk after any of the others.
    seconds = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as work:
        writer = CheckpointFileWriter(f"{work}/flaxfit", keep=1)
        bare = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        manager = ocp.CheckpointManager(f"{work}/manager", options=options)
        for step in range(n_rounds + 1):
            at_step = state.replace(step=jnp.int32(step))
            checkpoint = Checkpoint(step=step, state=at_step, metrics={})
            arrays = {**params, "step": at_step.step, "key": jax.random.key_data(state.key)}
            beside = ocp.args.JsonSave({"step": step, "metrics": {}})
            both = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=beside)
            alone = Path(work, "bare", str(step))
            calls = [
                ("flaxfit", functools.partial(writer.save, checkpoint), writer.wait),
                (
                    "AsyncCheckpointer",
                    functools.partial(bare.save, alone, args=ocp.args.PyTreeSave(arrays)),
                    bare.wait_until_finished,
                ),
                (
                    "CheckpointManager",
                    functools.partial(manager.save, step, args=both),
                    manager.wait_until_finished,
                ),
            ]
            for name, save, wait in chance.sample(calls, len(calls)):
                began = time.perf_counter()
                save()
                seconds[name].append(time.perf_counter() - began)
                wait()
            shutil.rmtree(alone)
        for each in (writer, bare, manager):
            each.close()
    # The first round compiles.
    times = {name: values[1:] for name, values in seconds.items()}
    ours = times.pop("flaxfit")
    print(f"a save of {megabytes} MB blocks for {statistics.median(ours) * 1e3:.1f} ms", end="")
    ratios = []
    for name, theirs in times.items():
        ratios.append(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)))
        median = statistics.median(theirs) * 1e3
        print(f"; with Orbax's {name} for {median:.1f} ms: x {ratios[-1]:.2f}", end="")
    print(flush=True)
    return max(ratios)


if __name__ == "__main__":
    main()

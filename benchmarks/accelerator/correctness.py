"""Correctness on the device: flaxfit against hand-written loops, and against itself to the bit."""

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxfit as ff
from benchmarks.accelerator.jobs import JOBS
from benchmarks.accelerator.parity import (
    IMAGES,
    MOMENTUM,
    RATE,
    TOLERANCE,
    Failed,
    Regularized,
    X,
    Y,
    batches_of,
    distance,
    loop_of,
    parity,
)
from benchmarks.linen_models import CNN, MLP, build
from flaxfit import checkpoints

N_STEPS = 12
# A sum of 25 terms in float32, beside float64: 25 roundings of 2**-24 at most, and those of a term.
SUM_TOLERANCE = 2e-6


def same_bits(a: Any, b: Any, what: str) -> None:
    """Raises unless two trees have the same dtypes and bits, random keys included."""

    def plain(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    pairs = [*zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    for x, y in ((plain(x), plain(y)) for x, y in pairs):
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
            raise Failed(f"{what}: an array of {x.shape} differs")


# One model, data and optimizer for all that is held to the bit, so that programs are shared.
MODULE, OPTIMIZER = Regularized(), optax.adam(1e-2)


def arrays(**options: Any) -> ff.ArrayStream:
    """Returns shuffled batches; the last of an epoch is smaller."""
    return ff.ArrayStream(X[:60], Y[:60], batch_size=16, shuffle=True, **options)


def exact_loop(data: Any = None, init: Any = None, **options: Any):
    """Makes a TrainLoop with everything that a resumed run must restore."""
    options = {"n_steps": N_STEPS, "n_steps_per_checkpoint": 3, "first_checkpoint": 3, **options}
    return loop_of(MODULE, data or arrays(), init=init, **{"optimizer": OPTIMIZER, **options})


def sgd_loop(data: Any, **options: Any):
    """Without Adam, which turns the rounding of a gradient near zero into a whole step."""
    return exact_loop(data, optimizer=optax.sgd(RATE, MOMENTUM), **options)


def must_agree(a: Any, b: Any, what: str) -> str:
    """Checks that checkpoints of two runs have the same metrics and states, to the bit."""
    for x, y in zip(a, b, strict=True):
        if dict(x.metrics) != dict(y.metrics):
            raise Failed(f"{what}: {dict(x.metrics)} at step {x.step}, not {dict(y.metrics)}")
        same_bits(x.state, y.state, f"{what}, at step {x.step}")
    return "the same bits"


def near(loops: Any) -> str:
    """Compares the ends of two runs, whose programs may round differently."""
    start = loops[0].state.params
    (*_, a), (*_, b) = loops
    far = distance(a.state.params, b.state.params, start)
    if not far <= TOLERANCE[None]:
        raise Failed(f"{far:.1e} of the way apart, at most {TOLERANCE[None]:g}")
    return f"{far:.0e} of the way apart, at most {TOLERANCE[None]:g}"


def check_rerun() -> str:
    return must_agree(exact_loop(), exact_loop(), "a second run")


def check_prefetch() -> str:
    plain, ahead = arrays(resident=False), ff.data.prefetch(arrays(resident=False), 4)
    return must_agree(exact_loop(plain), exact_loop(ahead), "with prefetch")


def check_resident() -> str:
    return near([sgd_loop(arrays(resident=is_resident)) for is_resident in (True, False)])


def check_steps_per_call() -> str:
    single, several = (sgd_loop(arrays(), steps_per_call=n) for n in (1, 3))
    if jax.default_backend() == "cpu":
        return must_agree(single, several, "three steps a call")
    return near([single, several])


def check_resume() -> str:
    whole = [*exact_loop()]
    with tempfile.TemporaryDirectory() as folder:
        with checkpoints.CheckpointFileWriter(folder) as writer:
            list(exact_loop(n_steps=6, callbacks=[writer]))  # Amid the second epoch.
        resumed = exact_loop(init=checkpoints.CheckpointFileReader(folder, MODULE.init))
        return must_agree(resumed, whole[2:], "resumed at step 6")


def check_saved() -> str:
    *_, last = exact_loop()
    state = last.state.replace(
        params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), last.state.params)
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(folder, state)
        restored = checkpoints.restore(folder, state)
    same_bits(state, restored, "restored")
    where = [{a.sharding for a in jax.tree.leaves(tree)} for tree in (state, restored)]
    if where[0] != where[1]:
        raise Failed(f"restored to {where[1]}, not {where[0]}")
    return "the same bits, in float32 and bfloat16"


def check_snapshot() -> str:
    for kind in ("device", "host"):
        loop = exact_loop(snapshot=kind)
        kept = next(loop)
        before = jax.device_get(kept.state.variables)
        before = jax.tree.map(np.array, before)
        list(loop)
        same_bits(before, kept.state.variables, f"kept, snapshot={kind!r}")
    loop = exact_loop(snapshot="none")
    borrowed = next(loop)
    list(loop)
    try:
        jax.device_get(borrowed.state.params)
    except RuntimeError:
        return "kept checkpoints stay, borrowed ones are refused"
    raise Failed("a borrowed checkpoint could be read after further steps")


def check_donation() -> str:
    n = 2**20  # Two arrays of 4 MiB, and those of Adam.
    given = ff.TrainState.create(optax.adam(1e-3), {"params": {"a": jnp.ones(n), "b": jnp.ones(n)}})

    def apply(variables: Any, x: Any, **options: Any) -> Any:
        total = sum(a.mean() for a in variables["params"].values())
        return (x * total, {}) if "mutable" in options else x * total

    data = ff.ArrayStream(X, X, batch_size=8)
    task = ff.TrainTask(apply, optax.adam(1e-3), "mse", data)
    loop = ff.TrainLoop(given, task, devices=jax.devices()[:1], snapshot="none", stdout=False)
    held = jax.tree.leaves(loop.state_in_place.params)
    kept = loop.state.params
    next(loop)
    if not all(array.is_deleted() for array in held):
        raise Failed("the state before a step is still there after it")
    for params in (given.params, kept):
        if not all((np.asarray(array) == 1).all() for array in params.values()):
            raise Failed("a step changed arrays of the user")
    del held, kept, params
    jax.block_until_ready(loop.state_in_place.params)
    before = _bytes_in_use()
    for _ in range(20):
        loop.next_checkpoint(copy=False)
    jax.block_until_ready(loop.state_in_place.params)
    grown = _bytes_in_use() - before
    if grown > 4 * n:  # One of the six arrays.
        raise Failed(f"20 steps left {grown:,} bytes on the device")
    return f"used up; 20 steps leave {grown:,} bytes more"


def _bytes_in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
        return stats["bytes_in_use"]
    return sum(array.nbytes for array in jax.live_arrays())


def check_evaluation() -> str:
    x, y, w = X[:25, :3], X[:25, 3], np.linspace(0.2, 2, 25, dtype=np.float32)
    params = np.array([0.3, 0.1, -0.4], np.float32)

    def apply(variables: Any, x: Any, **options: Any) -> Any:
        outputs = x @ variables["params"]
        return (outputs, {}) if "mutable" in options else outputs

    errors = x.astype(np.float64) @ params.astype(np.float64) - y
    evaluate = ff.EvalLoop(
        ff.EvalTask(apply, ["mae", "mse"], loss="mse"), strategy=ff.DataParallel(jax.devices()[:1])
    )
    state, most = ff.InferenceState(jnp.int32(0), params, {}), 0.0
    for n in (1, 7, 8, 9, 25):
        for weights in (None, w):
            data = ff.ArrayStream(x[:n], y[:n], None if weights is None else w[:n], batch_size=8)
            found = evaluate.measure(state, data)
            each = None if weights is None else w[:n].astype(np.float64)
            means = {
                "loss": np.average(errors[:n] ** 2, weights=each),
                "mse": np.average(errors[:n] ** 2, weights=each),
                "mae": np.average(np.abs(errors[:n]), weights=each),
            }
            most = max(most, *(abs(found[name] / mean - 1) for name, mean in means.items()))
    if not most <= SUM_TOLERANCE:
        raise Failed(f"a mean differs by {most:.1e} of it")
    return f"{most:.0e} of a mean apart, at most {SUM_TOLERANCE:g}"


def check_predict() -> str:
    module = MLP(4, 16)
    variables = jax.jit(module.init)(jax.random.key(0), X[:1])
    network: Any = (lambda rngs, x: variables, module.apply)
    strategy = ff.DataParallel(jax.devices()[:1])
    model = ff.Model(network, optax.sgd(RATE), "crossentropy", strategy=strategy)
    ours = model.predict(X[:37], batch_size=8)
    theirs = np.asarray(jax.jit(module.apply)(variables, X[:37]))
    far = np.abs(ours - theirs).max() / np.abs(theirs).max()
    # Two sums of at most 16 products.
    if ours.shape != theirs.shape or not far <= SUM_TOLERANCE:
        raise Failed(f"{far:.1e} of the largest output apart")
    return f"{far:.0e} of the largest output apart, at most {SUM_TOLERANCE:g}"


def check_virtual_replicas() -> str:
    devices = jax.devices()
    n = 1 << (len(devices).bit_length() - 1)
    one, all_of_them = (
        exact_loop(strategy=ff.DataParallel(devices[:each], virtual_replicas=n)) for each in (1, n)
    )
    return must_agree(one, all_of_them, f"on {n} devices")


def _checks() -> dict[str, Callable[[], str]]:
    text = JOBS["transformer"](True)
    tokens = batches_of(text.x, text.y, *4 * [text.batch_size])
    pictures = batches_of(IMAGES, Y, *4 * [16])
    plain = batches_of(X, Y, *4 * [16])
    mlp = MLP(4, 16)
    checks = {
        "a dense network": parity(mlp, plain),
        "batches of other sizes": parity(mlp, batches_of(X, Y, 16, 16, 5)),
        "BatchNorm and dropout": parity(Regularized(), plain),
        "convolutions": parity(CNN(4, 4, 8, 16), pictures),
        "attention in bfloat16": parity(build(text), tokens, "bfloat16"),
        "weighted means of uneven data": check_evaluation,
        "predictions": check_predict,
        "donation": check_donation,
        "snapshots": check_snapshot,
        "a second run": check_rerun,
        "prefetch": check_prefetch,
        "resident data": check_resident,
        "three steps a call": check_steps_per_call,
        "saved and restored": check_saved,
        "resumed": check_resume,
    }
    if jax.default_backend() != "cpu":  # There it takes long to compile.
        checks["attention"] = parity(build(text), tokens)
    if (n := len(jax.devices())) > 1:
        for name in ("DataParallel", "Sharded.fsdp"):
            strategy = ff.DataParallel() if name == "DataParallel" else ff.Sharded.fsdp()
            whole = batches_of(X, Y, *4 * [16 // n * n or n])
            checks[f"{name} on {n} devices"] = parity(mlp, whole, strategy=strategy)
        checks["virtual replicas"] = check_virtual_replicas
    return checks


def run(emit: Callable[..., None]) -> None:
    """Runs all checks; each emits whether it passed, and what it found."""
    platform = jax.default_backend()
    flags = os.environ.get("XLA_FLAGS", "")
    if platform == "gpu" and "--xla_gpu_deterministic_ops=true" not in flags:
        raise RuntimeError("The same bits need XLA_FLAGS=--xla_gpu_deterministic_ops=true.")
    warnings.filterwarnings("error", message="Some donated buffers were not usable")
    for name, check in _checks().items():
        began, passed = time.perf_counter(), False
        try:
            found, passed = check(), True
        except Failed as error:
            found = str(error)
        except Exception:
            found = traceback.format_exc(limit=-3)
        emit(name=name, passed=passed, found=found, seconds=time.perf_counter() - began)

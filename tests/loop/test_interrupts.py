"""Ctrl-C for real: a process that is interrupted again and again ends where it would have ended."""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from loops import given

import flaxfit as ff
from flaxfit.loop._interrupts import Interrupts

RUN = """
import gc, hashlib
import jax, numpy as np, optax
import flaxfit as ff

gc.disable()  # An interrupt within JAX's callback of a collection is ignored by Python.
x = np.random.default_rng(0).normal(size=(97, 4)).astype(np.float32)

def make():
    def apply(variables, x, *, rngs, mutable):
        keep = jax.random.bernoulli(rngs["dropout"], 0.8, x.shape)
        return (x * keep) @ variables["params"], {}

    data = ff.ArrayStream(x, x.sum(1), batch_size=16, shuffle=True)
    task = ff.TrainTask(apply, optax.adam(1e-2), "mse", data)
    init = lambda rngs, x: {"params": np.zeros(4, np.float32)}
    return ff.TrainLoop(init, task, 0, n_steps_per_checkpoint=7, stdout=False)

def fingerprint(loop):
    leaves = jax.tree.leaves((loop.state.params, loop.state.opt_state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    return digest.hexdigest(), loop.step, loop.data.get_state()

loop, steps, examples = make(), [], 0
interrupts = reported = 0
while True:
    try:
        while reported < interrupts:
            reported += 1
            print("interrupted", reported, flush=True)
        if interrupts == N:
            loop.n_steps = loop.step + 20
        elif not reported:
            print("ready", flush=True)
        for checkpoint in loop:
            steps.append(checkpoint.step)
        break
    except KeyboardInterrupt:
        interrupts += 1

whole = make()
whole.n_steps = loop.step
for checkpoint in whole:
    pass
print("same" if fingerprint(whole) == fingerprint(loop) else "different", flush=True)
print("in order" if steps == sorted(set(steps)) else f"out of order: {steps}", flush=True)
"""


@pytest.mark.parametrize(
    "n",
    [
        pytest.param(10, marks=pytest.mark.thorough),
        pytest.param(50, marks=pytest.mark.slow),
    ],
)
def test_interrupts_at_random_moments_lose_nothing(n):
    chance = random.Random(0)
    command = [sys.executable, "-c", RUN.replace("N:", f"{n}:")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for i in range(n):
            line = process.stdout.readline()
            assert line == (f"interrupted {i}\n" if i else "ready\n")
            wait_until = time.perf_counter() + chance.uniform(0, 0.02)
            while time.perf_counter() < wait_until:
                pass
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert output.splitlines() == [f"interrupted {n}", "same", "in order"]
    assert process.returncode == 0


def test_an_interrupt_while_a_checkpoint_is_made_waits_for_it():
    computed = []

    def compute(sums):
        computed.append(loop.step)
        if computed.count(1) == 1:
            signal.raise_signal(signal.SIGINT)
        return sums["n"]

    def apply(variables, x, *, rngs, mutable):
        return x @ variables["params"], {}

    rows = ff.metrics.Metric(lambda *_, weights: {"n": weights.sum()}, compute, "rows", mode="max")
    x = np.ones((4, 2), np.float32)
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", [(x, x[:, 0])], metrics=[rows])
    init = given(lambda rngs, x: {"params": np.zeros(2, np.float32)})
    loop = ff.TrainLoop(init, task, 0, devices=jax.devices()[:1], stdout=False)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert next(loop).metrics["rows"] == 4
    assert computed.count(1) == 1


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_that_overlap_leave_the_handler_and_the_interrupts_of_each_other():
    interrupts, before, reached = Interrupts(), signal.getsignal(signal.SIGINT), []
    with ThreadPoolExecutor(1) as other:
        other.submit(interrupts.__enter__).result()
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            other.submit(setattr, interrupts, "is_held", True).result()
            other.submit(interrupts.__exit__).result()
            signal.raise_signal(signal.SIGINT)
            other.submit(interrupts.release).result()
            reached.append("the end of the hold")
    assert reached and signal.getsignal(signal.SIGINT) is before

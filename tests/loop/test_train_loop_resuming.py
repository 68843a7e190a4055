"""Randomness depends on the position alone, so a resumed TrainLoop repeats to the bit."""

import functools
import gc
import itertools
import weakref

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import programs_of
from loops import (
    OPTIMIZER,
    Normalized,
    Regressor,
    X,
    Y,
    assert_close,
    assert_equal,
    make_loop,
    make_weight_loop,
)
from marks import thorough

import flaxfit as ff
from flaxfit.loop._feed import Feed

pytestmark = pytest.mark.optimized

one_weight = functools.partial(make_weight_loop, n_steps=None, devices=jax.devices()[:1])


@pytest.mark.parametrize("n_devices", [thorough(1), 4])
def test_a_run_in_two_parts_equals_the_whole_bit_for_bit(n_devices):
    def make(**options):
        return make_loop(
            Normalized(dropout=0.3),
            n_steps=9,
            devices=jax.devices()[:n_devices],
            n_steps_per_checkpoint=4,
            **options,
        )

    *_, whole = make()
    first = make()
    next(first)
    half = next(first)
    second = make(rnkey=99)
    second.restore(half)
    *_, resumed = second
    assert (half.step, resumed.step) == (5, 9)
    assert_equal(
        [whole.state.params, whole.state.opt_state, whole.model_state],
        [resumed.state.params, resumed.state.opt_state, resumed.model_state],
    )
    assert resumed.metrics == whole.metrics


@pytest.mark.slow
def test_several_steps_in_one_dispatch_over_several_devices():
    options = {"n_steps": 9, "n_steps_per_checkpoint": 4, "devices": jax.devices()}
    *_, one = make_loop(**options)
    *_, many = make_loop(steps_per_call=4, **options)
    assert_close(one.state.params, many.state.params, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "spacing"), [thorough(6, 6), (1, 7)])
@pytest.mark.parametrize("n_examples", [thorough(64), 50])
@pytest.mark.parametrize("has_weights", [thorough(False), True])
def test_several_steps_in_one_dispatch_reach_over_the_end_of_an_epoch(
    n_examples, has_weights, first, spacing
):
    def run(steps_per_call):
        w = (np.arange(n_examples, dtype=np.float32) % 3,) if has_weights else ()
        parts = X[:n_examples], Y[:n_examples], *w
        data = ff.ArrayStream(*parts, batch_size=16, shuffle=True, epochs=4)
        options = {"n_steps_per_checkpoint": spacing, "first_checkpoint": first}
        return [*make_loop(Regressor(0.2), data, steps_per_call=steps_per_call, **options)]

    one, many = run(1), run(3)
    assert [c.step for c in many] == [c.step for c in one]
    assert one[-1].step == 16
    assert [c.n_examples for c in many] == [c.n_examples for c in one]
    assert [c.data_state for c in many] == [c.data_state for c in one]
    assert_equal([c.state.params for c in one], [c.state.params for c in many])


@pytest.mark.slow
@pytest.mark.parametrize("resident", [thorough(False), True])
def test_a_loop_that_is_dropped_frees_its_state_at_once(resident):
    loop = make_loop(data=ff.ArrayStream(X, Y, batch_size=16, resident=resident))
    next(loop)
    next(loop)
    whole = weakref.ref(loop)
    state = weakref.ref(loop.state_in_place.params["Dense_0"]["kernel"])
    gc.collect()
    gc.disable()
    try:
        del loop
        # What waited for the collector would lie beside the next loop's.
        assert whole() is None and state() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_an_inspection_that_failed_is_not_said_to_be_under_way():
    fails = [True]

    def apply(variables, x, **options):
        if fails[0]:
            raise RuntimeError("no way")
        return Regressor().apply(variables, x, **options)

    loop = make_loop(task=ff.TrainTask(apply, OPTIMIZER, "mse", (X, Y)))
    with pytest.raises(RuntimeError, match="no way"):
        next(loop)
    fails[0] = False
    phases = []
    loop.watchers.append(lambda step: phases.append(loop.phase))
    assert next(loop).step == 1 and phases == ["training"]


@pytest.mark.slow
def test_data_that_sets_norms_while_it_is_read_does_no_harm():
    def batches():
        for i in range(4):
            if i == 2:
                loop.norms = ["Dense_0/.*"]
            yield X[:16], Y[:16]

    loop = make_loop(data=batches())
    last = list(loop)[-1]
    assert last.step == 4
    assert any(name.startswith("grad_norm/Dense_0") for name in last.metrics)


def test_a_program_that_failed_to_compile_is_not_said_to_be_compiling(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no room")

    loop = one_weight()
    next(loop)
    with monkeypatch.context() as patched:
        patched.setattr(loop.strategy, "compile", fail)
        loop.steps_per_call, loop.n_steps_per_checkpoint = 2, 2
        with pytest.raises(RuntimeError, match="no room"):
            next(loop)
    loop.steps_per_call = 1
    phases = []
    loop.watchers.append(lambda step: phases.append(loop.phase))
    next(loop)
    assert phases == ["training", "training"]


@pytest.mark.parametrize(
    ("data", "n"),
    [
        thorough(lambda: ff.ArrayStream(X, X, batch_size=16), 1),
        (lambda: ff.ArrayStream(X, X, batch_size=16), 2),
        (lambda: itertools.cycle([(X[:16], X[:16]), (X[16:32], X[16:32])]), 1),
    ],
    ids=["rows", "rows of several", "batches"],
)
def test_a_step_that_fails_loses_no_batch(data, n):
    options = {"n_steps": 8, "n_steps_per_checkpoint": 2, "first_checkpoint": 2}
    *_, whole = one_weight(data=data(), steps_per_call=n, **options)
    loop = one_weight(data=data(), steps_per_call=n, **options)
    next(loop)
    programs = programs_of(loop)
    usual = dict(programs)

    def fail(*arguments):
        raise MemoryError("at this very step")

    programs.update(dict.fromkeys(usual, fail))
    with pytest.raises(MemoryError, match="at this very step"):
        next(loop)
    programs.update(usual)
    *_, last = loop
    assert (last.step, last.metrics) == (8, whole.metrics)
    assert_equal(last.state.params, whole.state.params)


@pytest.mark.parametrize("n", [1, thorough(2)])
def test_what_fails_beside_a_step_loses_no_batch_either(n, monkeypatch):
    def make(data):
        return one_weight(data=data, steps_per_call=n, n_steps=12, first_checkpoint=2)

    def arrays():
        return ff.ArrayStream(X, X, batch_size=16, shuffle=True)

    def fail(*arguments):
        monkeypatch.undo()
        raise MemoryError("beside a step")

    *_, whole = make(arrays())
    for broken in "load", "_ordered":
        loop = make(data := arrays())
        if broken == "load":
            monkeypatch.setattr(Feed, broken, fail)
        else:  # Of the second epoch, of which two steps after three already are.
            list(loop.run_until(3))
            monkeypatch.setattr(data, broken, fail)
        with pytest.raises(MemoryError, match="beside a step"):
            list(loop.run_until(12))
        *_, last = loop.run_until(12)
        assert (last.step, int(last.state.step)) == (12, 12)
        assert last.data_state == whole.data_state
        assert_equal(last.state.params, whole.state.params)


@pytest.mark.slow
def test_batches_are_alike_whose_structures_are_equal():
    class Label:
        def __eq__(self, other):
            return isinstance(other, Label)

        def __hash__(self):
            return 1

    @flax.struct.dataclass
    class Inputs:
        x: jax.Array
        label: Label = flax.struct.field(pytree_node=False)

    def apply(variables, inputs, **options):
        return inputs.x @ variables["params"], {}

    batches = [(Inputs(jnp.asarray(X[:16]), Label()), jnp.asarray(Y[:16])) for _ in range(3)]
    task = ff.TrainTask(apply, OPTIMIZER, "mse", batches)
    loop = ff.TrainLoop(lambda rngs, x: {"params": jnp.ones(5)}, task, 0, stdout=False)
    assert [checkpoint.step for checkpoint in loop] == [1, 2, 3]
    assert len(programs_of(loop)) == 1

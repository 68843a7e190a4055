"""The callbacks of a loop: which it takes, their order, and what they may return."""

import functools

import numpy as np
import pytest
from loops import make_weight_loop

import flaxfit as ff
from flaxfit import Checkpoint
from flaxfit.callbacks import Callback, EarlyStopping, StatefulCallback, every
from flaxfit.loop._callback_list import CallbackList, Delivery, as_tuple, check_callback

X = np.ones((4, 1), np.float32)


class Keras:
    def on_epoch_end(self, epoch, logs):
        """As Keras calls it."""


def test_none_is_no_callback():
    assert as_tuple(None) == as_tuple(()) == ()
    assert as_tuple(print) == as_tuple([print]) == (print,)


@pytest.mark.parametrize(
    ("callback", "shown"),
    [
        (lambda a, b: None, r"got <lambda>\(a, b\)\. Its metrics are checkpoint"),
        (lambda: None, r"got <lambda>\(\)"),
        (lambda checkpoint, *, folder: None, r"got <lambda>\(checkpoint, \*, folder\)"),
    ],
)
def test_a_callback_of_other_arguments_is_refused_before_the_first_step(callback, shown):
    with pytest.raises(TypeError, match=f"one argument, a Checkpoint, {shown}"):
        make_weight_loop(callback)


@pytest.mark.parametrize(
    ("callback", "shown"),
    [
        (lambda epoch, logs: None, r"<lambda>\(epoch, logs\) has .* Keras, \(epoch, logs\)"),
        (lambda epoch, logs=None: None, r"<lambda>\(epoch, logs=None\) has .*\(epoch, logs\)"),
        (lambda batch, logs: None, r"<lambda>\(batch, logs\) has .* Keras, \(batch, logs\)"),
        (Keras().on_epoch_end, r"on_epoch_end\(epoch, logs\) has .* Keras, \(epoch, logs\)"),
    ],
)
def test_a_function_with_the_arguments_of_keras_is_refused_by_name(callback, shown):
    advice = r"a function of a checkpoint, .* Or wrap it: flaxfit\.callbacks\.Events\(on_"
    with pytest.raises(TypeError, match=f"{shown}: .*{advice}"):
        make_weight_loop(callback)


class Awaits:
    async def __call__(self, checkpoint):
        return None


def yields(checkpoint):
    yield checkpoint.step


@pytest.mark.parametrize("callback", [Awaits(), yields, functools.partial(yields)])
def test_a_callback_whose_body_would_not_run_is_refused(callback):
    with pytest.raises(TypeError, match="(Awaits|yields|partial) is async or a generator"):
        check_callback(callback)


def test_a_callback_that_is_annotated_to_return_something_else_is_refused():
    def is_done(checkpoint) -> bool:
        return checkpoint.loss < 1

    def measure(checkpoint) -> dict[str, float]:
        return {"half": checkpoint.loss / 2}

    with pytest.raises(TypeError, match=r"is_done is annotated to return bool; .*stop=True"):
        check_callback(is_done)
    with pytest.raises(TypeError, match=r"measure is annotated to return dict; .*with_metrics"):
        check_callback(measure)


def test_callbacks_that_take_a_checkpoint_are_taken():
    def says(checkpoint) -> ff.Checkpoint | None:
        return None

    for callback in (
        print,
        [].append,
        lambda *each: None,
        lambda c, folder="x": None,
        functools.partial(lambda folder, c: None, "x"),
        every(2, [].append),
        ff.History().append,
        says,
    ):
        check_callback(callback)


def test_a_bool_that_is_returned_is_refused_with_what_ends_training():
    with pytest.raises(TypeError, match=r"<lambda> returned bool; .* checkpoint\.replace\(stop="):
        next(make_weight_loop(lambda checkpoint: checkpoint.loss < 1))
    with pytest.raises(TypeError, match=r"<lambda> returned float; .*with_metrics"):
        next(make_weight_loop(every(1, lambda checkpoint: 1.0)))


def test_another_training_state_that_is_returned_is_refused():
    def zero(checkpoint):
        return checkpoint.replace(state=checkpoint.state.replace(params=0 * X[0]))

    for callback in (zero, every(1, zero)):
        with pytest.raises(RuntimeError, match=r"callback zero .* loop\.restore\(state\)"):
            next(make_weight_loop(callback))


def test_a_state_that_was_restored_or_that_keeps_less_may_be_returned():
    class Reset:
        def attach(self, loop):
            self.loop, self.first = loop, loop.state

        def __call__(self, checkpoint):
            self.loop.restore(self.first.replace(step=checkpoint.state.step))
            return checkpoint.replace(state=self.loop.state)

    def keep_less(checkpoint):
        return checkpoint.replace(state=checkpoint.state.for_inference())

    callbacks = Reset(), lambda c: c.replace(state=c.state), keep_less
    last = list(make_weight_loop(callbacks, [(X, 2 * X)] * 4))[-1]
    assert (float(last.state.params[0]), last.loss) == (0, 4)


def test_callbacks_are_called_and_closed_by_their_order():
    calls = []

    class Recorder:
        def __init__(self, order=None):
            if order:
                self.order = order

        def __call__(self, checkpoint):
            calls.append(getattr(self, "order", "normal"))

        def close(self):
            calls.append(f"close {getattr(self, 'order', 'normal')}")

    callbacks = CallbackList([Recorder("last"), Recorder(), Recorder("first")])
    checkpoint = Checkpoint(step=1, state=None, metrics={})

    def settle(checkpoint):
        return calls.append("settle") or checkpoint

    Delivery(checkpoint, callbacks, settle).finish(lambda given: given, lambda: 0)
    callbacks.close()
    assert calls == ["first", "normal", "settle", "last"] + [
        f"close {order}" for order in ("last", "normal", "first")
    ]


def test_an_exception_leaves_a_checkpoint_with_those_that_still_wait():
    calls, fails = [], [True]

    def fail(checkpoint):
        if fails.pop():
            raise RuntimeError("once")

    callbacks = CallbackList([lambda c: calls.append(1), fail, lambda c: calls.append(2)])
    checkpoint = Checkpoint(step=1, state=None, metrics={})
    delivery = Delivery(checkpoint, callbacks, lambda given: given)
    with pytest.raises(RuntimeError, match="once"):
        delivery.finish(lambda given: given, lambda: 0)
    fails.append(False)
    assert delivery.finish(lambda given: given, lambda: 0) is checkpoint and calls == [1, 2]


def test_an_order_that_there_is_not_is_refused():
    class Callback:
        order = "middle"

        def __call__(self, checkpoint):
            return checkpoint

    with pytest.raises(ValueError, match="order of a callback is .* got 'middle' from Callback"):
        CallbackList(Callback())


def test_an_object_with_methods_of_keras_is_told_what_runs_them():
    class Mine:
        def on_epoch_end(self, epoch, logs=None):
            pass

    with pytest.raises(TypeError, match=r"Events\(on_epoch_end=...\), or define __call__"):
        check_callback(Mine())


@pytest.mark.parametrize("base", [Callback, StatefulCallback, EarlyStopping])
@pytest.mark.parametrize(
    ("hook", "event"),
    [
        ("on_epoch_end", "on_epoch_end"),
        ("on_train_epoch_end", "on_epoch_end"),
        ("on_step_end", "on_train_batch_end"),
    ],
)
def test_hooks_beside_a_call_of_the_library_are_refused(base, hook, event):
    mine = type("Mine", (base,), {hook: lambda self, *arguments: None})
    with pytest.raises(TypeError, match=rf"got Mine: .*Events\({event}=...\), or define __call__"):
        check_callback(mine())
    with pytest.raises(TypeError, match="got Mine: .*or define __call__"):
        check_callback(every(2, mine()))


def test_a_call_of_ones_own_may_call_hooks():
    class Mine(Callback):
        def __call__(self, checkpoint):
            return self.on_epoch_end(checkpoint)

        def on_epoch_end(self, checkpoint):
            return checkpoint

    check_callback(Mine())


def test_a_callback_of_keras_is_refused_by_name():
    class TerminateOnNaN:
        def set_model(self, model): ...

        def on_epoch_end(self, epoch, logs=None): ...

    with pytest.raises(TypeError, match=r"got TerminateOnNaN: .*callbacks\.StopOnNaN"):
        CallbackList([TerminateOnNaN()])

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


def test_none_is_no_callback():
    assert as_tuple(None) == as_tuple(()) == ()
    assert as_tuple(print) == as_tuple([print]) == (print,)


class Keras:
    def on_epoch_end(self, epoch, logs):
        """As Keras calls it."""


class OfKeras(Keras):
    def set_model(self, model):
        """As its classes have, too."""


class Awaits:
    async def __call__(self, checkpoint):
        return None


def yields(checkpoint):
    yield checkpoint.step


def is_done(checkpoint) -> bool:
    return checkpoint.loss < 1


def measure(checkpoint) -> dict[str, float]:
    return {"half": checkpoint.loss / 2}


ONE_ARGUMENT = "one argument, a Checkpoint, got"
WRAP = r".*: .*a function of a checkpoint, .* Or wrap it: flaxfit\.callbacks\.Events\(on_"


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda a, b: None, rf"{ONE_ARGUMENT} <lambda>\(a, b\)\. Its metrics are checkpoint"),
        (lambda: None, rf"{ONE_ARGUMENT} <lambda>\(\)"),
        (
            lambda checkpoint, *, folder: None,
            rf"{ONE_ARGUMENT} <lambda>\(checkpoint, \*, folder\)",
        ),
        (lambda epoch, logs: None, rf"\(epoch, logs\) has .* Keras, \(epoch, logs\){WRAP}"),
        (lambda epoch, logs=None: None, rf"\(epoch, logs=None\) has .*\(epoch, logs\){WRAP}"),
        (lambda batch, logs: None, rf"\(batch, logs\) has .* Keras, \(batch, logs\){WRAP}"),
        (Keras().on_epoch_end, rf"on_epoch_end\(epoch, logs\) has .* Keras, .*{WRAP}"),
        (Keras(), r"Events\(on_epoch_end=...\), or define __call__"),
        (type("TerminateOnNaN", (OfKeras,), {})(), r"got TerminateOnNaN: .*callbacks\.StopOnNaN"),
        (Awaits(), "Awaits is async or a generator"),
        (yields, "yields is async or a generator"),
        (functools.partial(yields), "partial is async or a generator"),
        (is_done, r"is_done is annotated to return bool; .*stop=True"),
        (measure, r"measure is annotated to return dict; .*with_metrics"),
    ],
)
def test_what_cannot_be_a_callback_is_refused_before_the_first_step(callback, words):
    with pytest.raises(TypeError, match=words):
        make_weight_loop([callback])


class Hooks(Callback):
    """Calls a hook of its own."""

    def __call__(self, checkpoint):
        return self.on_epoch_end(checkpoint)

    def on_epoch_end(self, checkpoint):
        return checkpoint


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
        Hooks(),
    ):
        check_callback(callback)


def test_a_bool_that_is_returned_is_refused_with_what_ends_training():
    with pytest.raises(TypeError, match=r"<lambda> returned bool; .* checkpoint\.replace\(stop="):
        next(make_weight_loop(lambda checkpoint: checkpoint.loss < 1))
    loop = make_weight_loop(every(1, lambda checkpoint: 1.0))
    with pytest.raises(TypeError, match=r"<lambda> returned float; .*with_metrics"):
        next(loop)
    loop.callbacks = None
    assert next(loop).step == 1  # The checkpoint is not lost.


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

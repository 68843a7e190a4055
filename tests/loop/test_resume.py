"""Going on after something went wrong, or was changed: no step is lost, none is counted twice."""

import signal
import weakref

import jax
import numpy as np
import optax
import pytest
from internals import (
    is_holding_interrupts,
    programs_of,
    resident_inputs_of,
    step_a_batch,
)
from loops import given
from marks import slow

import flaxfit as ff
from flaxfit.callbacks import EarlyStopping

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2)
Y = X.sum(1, keepdims=True)


def apply(variables, x, **options):
    outputs = x @ variables["params"]
    return (outputs, {}) if "mutable" in options else outputs


@given
def init(rngs, x):
    return {"params": np.zeros((2, 1), np.float32)}


def loop_of(task, init=init, **options):
    settings = {"devices": jax.devices()[:1], "stdout": False, "n_steps_per_checkpoint": 100}
    return ff.TrainLoop(init, task, 0, **(settings | options))


def make_loop(data=None, **options):
    data = ff.ArrayStream(X, Y, batch_size=4) if data is None else data
    return loop_of(ff.TrainTask(apply, optax.sgd(0.1), "mse", data), **options)


def model_of(init=init, apply=apply, loss="mse"):
    strategy = ff.DataParallel(jax.devices()[:1])
    return ff.Model((init, apply), optax.adam(0.1), loss, strategy=strategy)


def interrupt_at(loop, step):
    def watch(at):
        if at == step:
            loop.watchers.clear()
            raise KeyboardInterrupt

    loop.watchers.append(watch)
    with pytest.raises(KeyboardInterrupt):
        loop.run(90).__next__() if loop.step else list(loop)


def test_an_end_that_is_moved_before_the_present_step_ends_there():
    loop = make_loop(first_checkpoint=100)
    interrupt_at(loop, 8)
    loop.n_steps = 6
    assert [(c.step, c.n_completed_steps) for c in loop] == [(8, 8)]


def test_other_data_is_counted_by_itself():
    loop = make_loop(first_checkpoint=100)
    interrupt_at(loop, 6)
    loop.data = ff.ArrayStream(X, 0 * Y, batch_size=4, epochs=1)
    checkpoint = next(loop)
    assert (checkpoint.step, checkpoint.n_completed_steps) == (14, 8)


def test_an_interrupted_epoch_of_fit_is_not_counted_in_the_next():
    class Interrupt:
        def attach(self, loop):
            loop.watchers.append(self.watch)

        def watch(self, step):
            if step == 14:
                raise KeyboardInterrupt

        def __call__(self, checkpoint):
            return checkpoint

    model, seen = model_of(), []
    model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Interrupt()])
    assert model.step == 14
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[seen.append])
    assert [c.n_completed_steps for c in seen] == [8, 8]


@pytest.mark.parametrize("drive", ["iterate", "run", "data"])
def test_the_best_weights_are_put_back_however_the_loop_is_driven(drive):
    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    weights = {}

    def measure(checkpoint):
        weights[checkpoint.step] = np.asarray(checkpoint.state.params)
        return checkpoint.with_metrics({"val_loss": next(losses)})

    data = ff.ArrayStream(X[:16], Y[:16], batch_size=4, epochs=1) if drive == "data" else None
    loop = make_loop(
        data,
        callbacks=[measure, EarlyStopping(patience=9 if drive == "data" else 2)],
        n_steps_per_checkpoint=1,
    )
    list(loop if drive == "iterate" else loop.run(20))
    assert loop.step == 4
    np.testing.assert_array_equal(loop.state.params, weights[2])


class Flaky:
    """A stream that raises once, at one of its batches."""

    def __init__(self, at):
        self.i, self.at = 0, at

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == self.at:
            self.at = None
            raise OSError("the disk is away")
        self.i += 1
        return X[:4], Y[:4]

    def get_state(self):
        return {"i": self.i}

    def set_state(self, state):
        self.i = state["i"]


def test_the_position_is_that_of_the_steps_though_batches_were_fetched_ahead():
    loop = make_loop(Flaky(6), steps_per_call=4)
    with pytest.raises(OSError, match="disk"):
        list(loop.run(8))
    checkpoint = loop.next_step()
    assert checkpoint.data_state == {"i": checkpoint.step}


def test_restoring_what_does_not_fit_changes_nothing():
    loop = make_loop(n_steps_per_checkpoint=1)
    first = next(loop)
    next(loop)
    other = first.state.replace(params=np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match=r"params: here float32\[2, 1\], given float32\[3, 1\]"):
        loop.restore(other)
    with pytest.raises(ValueError, match=r"1 array differs:\n  step: here int32\[\], given int\n"):
        loop.restore(first.state.replace(step=3))
    with pytest.raises(TypeError, match="TrainState or a Checkpoint, got NoneType"):
        loop.restore(None)
    assert loop.step == 2


def test_restoring_over_data_that_cannot_go_back_changes_nothing():
    loop = make_loop((batch for batch in [(X[:4], Y[:4])] * 9), n_steps_per_checkpoint=1)
    first = next(loop)
    list(loop.run(3))
    with pytest.raises(ValueError):
        loop.restore(first)
    assert loop.step == 4
    assert next(loop).step == 5


@pytest.mark.parametrize("callbacks", [[3], [None], 3])
def test_what_is_no_callback_is_refused_at_once(callbacks):
    with pytest.raises(TypeError):
        make_loop(callbacks=callbacks)


@pytest.mark.parametrize(
    "option", ["n_steps", "n_steps_per_checkpoint", "first_checkpoint", "steps_per_call"]
)
def test_numbers_of_steps_are_whole_and_not_negative(option):
    least = 0 if option == "n_steps" else 1
    refused = {
        2.5: "must be an integer",
        "3": "must be an integer",
        -1: f"must be {least} or more, got -1",
    }
    if least:
        refused[0] = "must be 1 or more, got 0"
    for value, message in refused.items():
        error = ValueError if isinstance(value, int) else TypeError
        with pytest.raises(error, match=f"{option} {message}"):
            make_loop(**{option: value})


def test_steps_per_call_is_a_number_or_auto():
    with pytest.raises(TypeError, match="must be an integer or 'auto', got 'fast'"):
        make_loop(steps_per_call="fast")


@pytest.mark.parametrize(
    "option", ["steps_per_execution", "steps_per_epoch", "epochs", "batch_size"]
)
def test_fit_refuses_numbers_below_one(option):
    model = model_of()
    with pytest.raises(ValueError, match=f"{option} must be 1 or more, got 0"):
        model.fit(X, Y, **{option: 0})


# Evaluation and prediction between trainings.


def affine(variables, x, **options):
    outputs = x @ variables["params"]["kernel"] + variables["params"]["bias"]
    return (outputs, {}) if "mutable" in options else outputs


@pytest.mark.slow
def test_evaluation_goes_on_through_loading_fitting_and_freezing(tmp_path):
    def init_affine(rngs, x):
        params = {"kernel": np.zeros((2, 1), np.float32), "bias": np.zeros(1, np.float32)}
        return {"params": params}

    model, other = (model_of(init_affine, affine) for _ in range(2))
    model.fit(X, Y, verbose=0)
    model.save(tmp_path)
    other.load(tmp_path)
    assert other.evaluate(X, Y) == model.evaluate(X, Y)
    other.fit(X, Y, validation_data=(X, Y), verbose=0)
    other.freeze = "bias"
    other.fit(X, Y, validation_data=(X, Y), verbose=0)
    loss = float(np.mean((other.predict(X) - Y) ** 2))
    assert other.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-5)


def test_wrong_validation_data_is_found_before_training():
    def init_three(rngs, x):
        return {"params": np.zeros((2, 3), np.float32)}

    model = model_of(init_three, loss="crossentropy")
    labels = np.zeros(32, np.int32)
    wrong = labels.copy()
    wrong[30] = 7
    with pytest.raises(ValueError, match="label 7 is out of range"):
        model.fit(X, labels, validation_data=(X, wrong), batch_size=4, verbose=0)
    assert model.step == 0


def test_stochastic_evaluation_needs_a_training_state():
    task = ff.EvalTask(apply, ["mse"], (X, Y), rngs=("dropout",))
    with pytest.raises(ValueError, match="random key of a TrainState, got an InferenceState"):
        ff.EvalLoop(task).measure(ff.InferenceState(np.int32(0), np.zeros((2, 1)), {}))


def test_predictions_without_rows_are_refused():
    def with_mean(variables, x, mutable=False, **_):
        outputs = apply(variables, x), x.mean()
        return outputs if mutable is False else (outputs, {})

    model = model_of(init, with_mean, lambda o, mean, t: (o - t) ** 2)
    model.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"output 1 has shape \(\) for a batch of 32"):
        model.predict(X)


def _set(name, value):
    return lambda loop: setattr(loop, name, value)


def _set_data(loop):
    loop.data = ff.ArrayStream(X[::-1], -Y, batch_size=4, shuffle=True, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(_set_data, id="data"),
        slow(lambda loop: loop.step_flops(), id="look"),
        pytest.param(lambda loop: step_a_batch(loop, (X[:4], Y[:4])), id="batch"),
        pytest.param(_set("steps_per_call", 3), id="steps_per_call"),
        slow(_set("n_steps", 8), id="n_steps"),
        slow(_set("n_steps_per_checkpoint", 5), id="spacing"),
        slow(_set("norms", [".*"]), id="norms"),
        slow(_set("freeze", ["bias"]), id="freeze"),
        slow(lambda loop: loop.set_hyperparams(learning_rate=0.5), id="hyperparams"),
        pytest.param(lambda loop: loop.restore(loop.state.replace(step=np.int32(2))), id="restore"),
        slow(lambda loop: loop.finish(), id="finish"),
    ],
)
def test_whatever_is_done_between_steps_on_resident_data_comes_to_the_same_as_on_other(meddle):
    params = {"kernel": np.zeros((2, 1), np.float32), "bias": np.ones(1, np.float32)}

    def run(resident):
        # Batches of 6 leave a smaller one at the end of each epoch.
        data = ff.ArrayStream(X, Y, batch_size=6, shuffle=True, resident=resident)
        task = ff.TrainTask(affine, optax.inject_hyperparams(optax.sgd)(0.1), "mse", data)
        options = {"n_steps": 20, "n_steps_per_checkpoint": 10}
        loop = loop_of(task, lambda rngs, x: {"params": params}, **options)
        seen = []

        def watch(step):
            seen.append((step, loop.running_metrics()["loss"] if loop.n_completed_steps else None))
            if len(seen) == 5:
                try:
                    meddle(loop)
                except RuntimeError as error:
                    seen.append(str(error))

        loop.watchers.append(watch)
        shown = [(c.step, c.n_examples, c.loss, c.stop, c.data_state) for c in loop]
        return seen, shown, jax.tree.map(np.ndarray.tolist, jax.device_get(loop.state.params))

    assert run(True) == run(False)


def test_a_step_on_resident_data_that_fails_keeps_its_batch():
    loop, other = make_loop(), make_loop()
    expected = list(other.run(12))[-1]
    list(loop.run(6))
    programs = programs_of(loop)
    ((key, usual),) = programs.items()

    def fail(*arguments):
        raise TypeError("no memory")

    programs[key] = fail
    with pytest.raises(TypeError, match="no memory"):
        list(loop.run(6))
    assert loop.step == 6 and not is_holding_interrupts(loop)
    programs[key] = usual
    (checkpoint,) = loop.run(6)
    np.testing.assert_array_equal(checkpoint.state.params, expected.state.params)
    assert checkpoint.data_state == expected.data_state


def test_data_that_a_watcher_replaces_is_freed_at_once():
    loop = make_loop()
    freed = []

    def watch(step):
        if step == 5:
            latest = weakref.ref(resident_inputs_of(loop))
            loop.data = ff.ArrayStream(X, -Y, batch_size=4, epochs=1)
            freed.append(latest() is None)

    loop.watchers.append(watch)
    assert [c.step for c in loop] == [1, 13] and freed == [True]


def test_data_that_was_replaced_is_free_while_an_interrupt_is_kept():
    loop = make_loop()
    list(loop.run(5))
    latest = weakref.ref(resident_inputs_of(loop))
    programs = programs_of(loop)
    ((key, usual),) = programs.items()

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return usual(*arguments)

    programs[key] = interrupted
    with pytest.raises(KeyboardInterrupt) as kept:
        list(loop.run(5))
    loop.data = ff.ArrayStream(X, -Y, batch_size=4, epochs=1)
    assert latest() is None and kept.tb is not None and loop.step == 6


@pytest.mark.parametrize("resident", [False, True])
def test_the_end_of_the_data_is_asked_for_once(resident):
    class OnePass(ff.ArrayStream):
        """Ends after a pass, and would go on with another."""

        told = 0

        def ended(self):
            if self.epoch > self.told:
                self.told += 1
                raise StopIteration

        def next_rows(self):
            self.ended()
            return super().next_rows()

        def __next__(self):
            self.ended()
            return super().__next__()

    stream = OnePass(X, Y, batch_size=4, shuffle=True, resident=resident)
    loop = make_loop(stream, n_steps=30)
    assert [c.step for c in loop] == [1, 8] and stream.told == 1
    assert list(loop) == [] and stream.told == 1

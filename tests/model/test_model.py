"""Model: fit, evaluate and predict as a Keras user knows them, on real digits."""

import functools
import signal
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import n_programs_of
from marks import thorough
from sklearn.datasets import load_digits

import flaxfit as ff

X, Y = load_digits(return_X_y=True)
X = X / 16
X, Y, X_TEST, Y_TEST = X[:300], Y[:300], X[300:413], Y[300:413]
ONE = ff.DataParallel(jax.devices()[:1])


class MLP(nn.Module):
    train: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dropout(self.dropout, deterministic=not self.train)(x)
        return nn.Dense(10)(x)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x)


def make_model(module=None, optimizer=None, metrics=("accuracy",), **options):
    return ff.Model(
        module or MLP(), optimizer or optax.adam(1e-2), "crossentropy", metrics, **options
    )


def make_layer():
    """A model that takes little time to compile."""
    return make_model(nn.Dense(10), optax.sgd(0.1), strategy=ONE)


def fit(model, **options):
    return model.fit(X, Y, **{"batch_size": 64, "verbose": 0, **options})


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_fit_learns_and_reports_each_epoch():
    model = make_model()
    history = fit(model, epochs=8, validation_data=(X_TEST, Y_TEST))
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert [len(values) for values in history.values()] == [8] * 4
    assert history["val_accuracy"][-1] > 0.8 and history["loss"][-1] < history["loss"][0] / 2
    assert history.steps == [5 * i for i in range(1, 9)] and model.step == 40
    measured = model.evaluate(X_TEST, Y_TEST)
    assert measured["accuracy"] == pytest.approx(history["val_accuracy"][-1])
    assert measured["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)
    assert (X.dtype, model.predict(X_TEST).dtype) == (np.float64, np.float32)


@pytest.mark.parametrize("n_devices", [thorough(1), 3, thorough(4)])
def test_evaluate_and_predict_agree_with_the_module_itself(n_devices):
    """Without dropout, on the running statistics that training has moved."""
    model = make_model(Normalized(), strategy=ff.DataParallel(jax.devices()[:n_devices]))
    fit(model, batch_size=75)
    statistics = jax.tree.leaves(model.state.model_state["batch_stats"])
    assert not np.allclose(statistics[0], 0)
    apply = jax.jit(functools.partial(Normalized().apply, train=False))
    logits = apply(model.state.variables, jnp.asarray(X_TEST, jnp.float32))
    np.testing.assert_allclose(model.predict(X_TEST), logits, rtol=1e-5, atol=1e-5)
    expected = np.mean(np.argmax(logits, -1) == Y_TEST)
    assert model.evaluate(X_TEST, Y_TEST)["accuracy"] == pytest.approx(expected)


@pytest.mark.slow
def test_to_fit_again_or_several_steps_per_execution_changes_nothing():
    once, twice, many = (make_model(MLP(dropout=0.2)) for _ in range(3))
    whole = fit(once, epochs=4)
    fit(twice, epochs=2)
    history = fit(twice, epochs=2)
    assert len(history["loss"]) == 2 and twice.step == 20
    assert_equal(once.state.params, twice.state.params)
    several = fit(many, epochs=4, steps_per_execution=3)
    assert several["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert_equal(once.state.params, many.state.params)


def test_a_model_is_traced_and_compiled_once_for_each_shape():
    traces = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(x.shape)
            return nn.Dense(10)(x)

    model = make_model(Counted(), optax.sgd(0.1), strategy=ONE)

    def use():
        history = fit(model, validation_data=(X_TEST, Y_TEST))
        model.predict(X_TEST, batch_size=64)
        return history

    use()
    counts = n_programs_of(model)
    traces.clear()
    assert use().compile_time == 0
    assert n_programs_of(model) == counts == (1, 1, 1)
    assert traces == []


@pytest.mark.slow
def test_what_was_traced_before_is_still_checked():
    model = make_layer()
    fit(model, validation_data=(X_TEST, Y_TEST))
    model.evaluate(X_TEST, Y_TEST)
    broken, labels = X_TEST.copy(), Y_TEST.copy()
    broken[100, 3], labels[100] = np.nan, 10
    for bad in ((broken, Y_TEST), (X_TEST, labels)):
        with pytest.raises(ValueError, match="NaN|label"):
            model.evaluate(*bad)
        with pytest.raises(ValueError, match="NaN|label"):
            model.fit(*bad, batch_size=64, verbose=0)


def test_fit_has_the_result_of_the_loop_that_a_user_would_write():
    model = make_model(MLP(dropout=0.2))
    fit(model, epochs=2)
    task = ff.TrainTask(
        MLP(train=True, dropout=0.2).apply,
        optax.adam(1e-2),
        "crossentropy",
        ff.ArrayStream(X, Y, batch_size=64, shuffle=True, epochs=2),
    )
    # As in `fit`: the norm changes how the step is compiled, and with it the last bits.
    *_, last = ff.TrainLoop(MLP().init, task, 0, stdout=False, grad_norm=False)
    assert_equal(model.state.params, last.state.params)


@pytest.mark.slow
def test_validation_split_takes_a_random_part_away_from_training():
    model = make_layer()
    history = fit(model, validation_split=0.25, batch_size=225)
    assert model.step == 1 and "val_loss" in history
    with pytest.raises(ValueError, match="either validation_data or validation_split"):
        fit(model, validation_split=0.1, validation_data=(X, Y))


@pytest.mark.slow
def test_a_weight_of_zero_is_as_good_as_leaving_the_example_out():
    weights = np.ones(len(X))
    weights[150:] = 0
    a, b = make_layer(), make_layer()
    history = a.fit(X, Y, sample_weight=weights, batch_size=300, shuffle=False, verbose=0)
    other = b.fit(X[:150], Y[:150], batch_size=150, shuffle=False, verbose=0)
    assert history["loss"][0] == pytest.approx(other["loss"][0], rel=1e-5)
    assert history["accuracy"][0] == pytest.approx(other["accuracy"][0], rel=1e-5)
    assert a.evaluate(X, Y, sample_weight=weights) == pytest.approx(a.evaluate(X[:150], Y[:150]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [thorough("list"), thorough("known length"), "unknown length"])
def test_batches_of_any_kind_can_be_fitted(kind):
    batches = [(X[i : i + 64], Y[i : i + 64]) for i in range(0, 256, 64)]

    class Loader:
        def __iter__(self):
            return iter(batches)

    class Sized(Loader):
        def __len__(self):
            return 4

    data = {"list": batches, "known length": Sized(), "unknown length": Loader()}[kind]
    model = make_layer()
    history = model.fit(data, epochs=3, validation_data=Loader(), verbose=0)
    assert history.steps == [4, 8, 12]
    other = make_layer()
    other.fit(X[:256], Y[:256], batch_size=64, epochs=3, shuffle=False, verbose=0)
    assert_equal(model.state.params, other.state.params)
    assert model.predict(Loader()).shape == (256, 10)
    assert model.evaluate(Loader())["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)


@pytest.mark.slow
def test_steps_per_epoch_sets_the_length_of_an_epoch_and_verbose_0_says_nothing(capsys):
    class Named(nn.Module):  # Inputs by name are keyword arguments.
        @nn.compact
        def __call__(self, *, image):
            return nn.Dense(10)(image)

    model = make_model(Named(), optax.sgd(0.1), strategy=ONE)
    history = model.fit({"image": X}, Y, 64, epochs=3, steps_per_epoch=2, verbose=0)
    assert history.steps == [2, 4, 6]
    assert model.predict({"image": X[:3]}).shape == (3, 10)
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_leaves_a_usable_model_and_its_history():
    def interrupt(checkpoint):
        if checkpoint.step == 10:
            signal.raise_signal(signal.SIGINT)

    model = make_model()
    with pytest.raises(KeyboardInterrupt, match="interrupted at step 10; weights kept; fit cont"):
        fit(model, epochs=5, callbacks=[interrupt])
    assert model.step == 10 and model.history.steps == [5]
    assert model.evaluate(X_TEST, Y_TEST)["loss"] > 0
    fit(model, epochs=1)
    assert model.step == 15


def test_the_summary_lists_the_layers(capsys):
    model = make_model()
    with pytest.raises(ValueError, match=r"model\.summary\(x\)"):
        model.summary()
    model.summary(X)
    before = capsys.readouterr().out
    fit(model)
    model.summary()
    assert capsys.readouterr().out.count("Dense_1") == 1
    assert before.startswith("MLP · 2,410 params\n") and before.count("Dense_1") == 1
    assert "\n2,410 trained · 0 frozen\nforward pass: " in before
    model.trainable = False
    model.summary()
    assert "\n0 trained · 2,410 frozen\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_saved_model_is_loaded_without_a_fit_and_goes_on(tmp_path):
    model = make_model(MLP(dropout=0.2))
    fit(model, epochs=2)
    model.save(tmp_path)
    fresh = make_model(MLP(dropout=0.2))
    fresh.load(tmp_path)
    assert fresh.step == 10
    np.testing.assert_array_equal(fresh.predict(X_TEST), model.predict(X_TEST))
    assert fresh.evaluate(X_TEST, Y_TEST) == model.evaluate(X_TEST, Y_TEST)
    for each in (model, fresh):
        fit(each, shuffle=False)
    assert fresh.step == 15
    assert_equal(model.state.params, fresh.state.params)
    assert_equal(model.state.opt_state, fresh.state.opt_state)
    model.load(tmp_path)
    assert model.step == 10


def test_lines_tell_how_training_goes(capsys):
    fit(make_model(), epochs=2, verbose=2, validation_data=(X_TEST, Y_TEST))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flaxfit  MLP · 2,410 params · 4 cpu devices"
    assert lines[1].startswith("         300 train / 113 val · batch 64 · ")
    assert "compiled the training step in" in lines[2]
    assert [line.split()[0] for line in lines[-4:]] == ["epoch", "1/2", "2/2", "done"]
    assert "\r" not in "".join(lines)


@pytest.mark.slow
def test_fit_leaves_no_thread_behind():
    before = threading.active_count()
    batches = [(X[i : i + 64], Y[i : i + 64]) for i in range(0, 256, 64)]
    make_layer().fit(batches, epochs=2, verbose=0)
    with pytest.raises(ZeroDivisionError):
        make_layer().fit(batches, epochs=2, callbacks=lambda c: 1 / 0, verbose=0)
    assert threading.active_count() == before


@pytest.mark.slow
def test_an_autoencoder_is_fitted_to_inputs_alone():
    class Autoencoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(nn.Dense(4)(x)), x

    x = load_digits().data[:64] / 16
    model = ff.Model(Autoencoder(), optax.adam(1e-2), "mse", strategy=ONE)
    history = model.fit(x, batch_size=20, epochs=6, verbose=0, validation_data=(x,))
    assert history["val_loss"][-1] < 0.5 * history["val_loss"][0]
    restored, _ = model.predict(x)
    assert model.evaluate(x, batch_size=20)["loss"] == pytest.approx(
        np.mean((restored - x) ** 2), rel=1e-5
    )


@pytest.mark.slow
def test_a_state_that_is_set_is_gone_on_from_also_in_a_run_with_checkpoints(tmp_path):
    x, options = np.linspace(-1, 1, 16)[:, None], {"shuffle": False, "verbose": 0}

    def make(state=None):
        model = ff.Model(nn.Dense(1), optax.adam(0.1), "mse", strategy=ONE)
        if state is not None:
            model.state = state
        return model

    first = make()
    first.fit(x, 3 * x, **options)
    start = first.state
    second = make(start)
    np.testing.assert_array_equal(second.predict(x), first.predict(x))
    expected = first.fit(x, 3 * x, **options)["loss"]
    assert second.fit(x, 3 * x, **options)["loss"] == expected
    assert first.step == second.step == 2
    for _ in range(2):  # The second time the run is complete.
        model = make(start)
        history = model.fit(x, 3 * x, **options, checkpoint_dir=tmp_path)
        assert (model.step, history.steps, history["loss"]) == (2, [2], expected)
    first.state = second.state.replace(step=jnp.int32(7))
    assert first.step == 7

"""Model: fit, evaluate and predict as a Keras user knows them, on real digits."""

import functools
import itertools
import signal
import sys
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
from flaxfit.callbacks import EarlyStopping

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
        return nn.Dense(10)(nn.relu(x))


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


@pytest.mark.parametrize("n_devices", [thorough(1), 3, thorough(4)])
def test_evaluate_and_predict_agree_with_the_module_itself(n_devices):
    model = make_model(MLP(dropout=0.2), strategy=ff.DataParallel(jax.devices()[:n_devices]))
    fit(model)
    logits = jax.jit(MLP().apply)({"params": model.state.params}, jnp.asarray(X_TEST, jnp.float32))
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


def test_fit_again_with_the_same_shapes_compiles_nothing():
    model = make_model()
    fit(model, validation_data=(X_TEST, Y_TEST))
    counts = n_programs_of(model)
    history = fit(model, validation_data=(X_TEST, Y_TEST))
    assert n_programs_of(model) == counts == (1, 1, 0)
    assert history.compile_time == 0


@pytest.mark.slow
def test_a_model_is_traced_once_for_each_shape():
    traces = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(x.shape)
            return nn.Dense(10)(x)

    model = make_model(Counted(), optax.sgd(0.1), strategy=ONE)

    def use():
        fit(model, validation_data=(X_TEST, Y_TEST))
        model.evaluate(X_TEST, Y_TEST, batch_size=64)
        model.predict(X_TEST, batch_size=64)

    use()
    traces.clear()
    use()
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


def test_wide_numbers_are_narrowed_quietly():
    assert X.dtype == np.float64 and Y.dtype == np.int64
    model = make_model()
    fit(model)
    assert model.predict(X_TEST).dtype == np.float32


def test_batch_norm_trains_on_batches_and_evaluates_on_running_statistics():
    model = make_model(Normalized())
    fit(model, epochs=2, batch_size=100)
    statistics = jax.tree.leaves(model.state.model_state["batch_stats"])
    assert not np.allclose(statistics[0], 0)
    apply = jax.jit(functools.partial(Normalized().apply, train=False))
    expected = apply(model.state.variables, jnp.asarray(X_TEST, jnp.float32))
    np.testing.assert_allclose(model.predict(X_TEST), expected, rtol=1e-4, atol=1e-5)


def test_a_pair_of_functions_can_be_trained():
    def init(rngs, x):
        return {"params": {"w": jnp.zeros((64, 10))}}

    def apply(variables, x, **options):
        outputs = x @ variables["params"]["w"]
        return (outputs, {}) if "mutable" in options else outputs

    model = make_model((init, apply), optax.adam(1e-1))
    assert fit(model, epochs=5)["accuracy"][-1] > 0.8


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


def test_an_exhausted_generator_is_not_taken_for_an_epoch():
    model = make_model()
    with pytest.raises(ValueError, match="iterated only once, but epochs=2"):
        model.fit(((X[:64], Y[:64]) for _ in range(2)), epochs=2, verbose=0)
    assert model.step == 0


class Endless:
    """Repeats a batch, and has a length all the same, as a pipeline of Grain after `repeat()`."""

    def __len__(self):
        return sys.maxsize

    def __iter__(self):
        return itertools.repeat((X[:64], Y[:64]))


def test_data_without_end_needs_steps_per_epoch():
    data = Endless()
    with pytest.raises(ValueError, match="where an epoch ends.* Give steps_per_epoch"):
        make_model().fit(data, verbose=0)
    assert make_model().fit(data, steps_per_epoch=2, verbose=0).steps == [2]


@pytest.mark.slow
def test_steps_per_epoch_sets_the_length_of_an_epoch_and_verbose_0_says_nothing(capsys):
    assert fit(make_layer(), epochs=3, steps_per_epoch=2).steps == [2, 4, 6]
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_named_inputs_are_keyword_arguments():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, *, image):
            return nn.Dense(10)(image)

    model = make_model(Named(), optax.sgd(0.1), strategy=ONE)
    assert fit_named(model) == model.predict({"image": X[:3]}).shape[0] == 3


def fit_named(model):
    model.fit({"image": X}, Y, batch_size=64, verbose=0)
    return 3


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights():
    stop = EarlyStopping("val_loss", patience=1, restore_best=True)
    model = make_model(nn.Dense(10), optax.adam(1.0))
    history = fit(model, epochs=20, validation_data=(X_TEST, Y_TEST), callbacks=stop)
    assert len(history.steps) < 20
    best = min(history["val_loss"])
    assert model.evaluate(X_TEST, Y_TEST)["loss"] == pytest.approx(best, rel=1e-5)


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


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    class Wider(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(x)

    with pytest.raises(FileNotFoundError):
        make_model().load(tmp_path)
    model = make_model(Wider(), optax.sgd(0.1), strategy=ONE)
    fit(model)
    model.save(tmp_path)
    other = make_model()
    other.load(tmp_path)
    with pytest.raises(ValueError, match="params/Dense_0/kernel"):
        fit(other)


def test_lines_tell_how_training_goes(capsys):
    fit(make_model(), epochs=2, verbose=2, validation_data=(X_TEST, Y_TEST))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flaxfit  MLP · 2,410 params · 4 cpu devices"
    assert lines[1].startswith("         300 train / 113 val · batch 64 · ")
    assert "compiled the training step in" in lines[2]
    assert [line.split()[0] for line in lines[-4:]] == ["epoch", "1/2", "2/2", "done"]
    assert "\r" not in "".join(lines)


# What cannot be done, and what it says.


def test_a_model_without_weights_says_so():
    with pytest.raises(RuntimeError, match=r"call build\(x\), fit"):
        _ = make_model().state


def nan_inputs():
    x = X.copy()
    x[17, 3] = np.nan
    return x


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:200], "x has 300 rows but y has 200"),
        (X, Y[:, None], r"expects integer labels of shape \(32,\).*Squeeze them"),
        (X, Y.astype(float), "Cast them"),
        (X, Y + 3, r"label 12 is out of range for 10 outputs \(labels must be 0..9\)"),
        (nan_inputs(), Y, "1 of 300 rows, the first of them row 17"),
        (X[:0], Y[:0], "no rows|no examples|empty"),
        ([], None, "no batches|empty"),
        (X, None, "targets"),
    ],
)
def test_bad_data_is_refused_in_words(x, y, message):
    model = make_model(strategy=ff.DataParallel(jax.devices()[:1]))
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "crossentrophy"}, "crossentropy"),
        ({"metrics": ["acuracy"]}, "accuracy"),
        ({"optimizer": 1e-3}, "optax"),
        ({"module": MLP}, r"MLP\(\.\.\.\)"),
    ],
)
def test_bad_parts_of_a_model_are_refused_in_words(options, message):
    parts = {"module": MLP(), "optimizer": optax.sgd(0.1), "loss": "mse", **options}
    with pytest.raises((ValueError, TypeError), match=message):
        ff.Model(**parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verbose": 3}, "verbose must be"),
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"batch_size": 0}, "batch_size"),
        ({"validation_split": 1.5}, "between 0 and 1"),
        ({"sample_weight": np.ones(10)}, "x has 300 rows but sample_weight has 10"),
    ],
)
def test_bad_settings_of_fit_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        fit(make_model(), **options)


def test_weights_for_batches_are_refused():
    with pytest.raises(ValueError, match="sample_weight can be used with arrays only"):
        make_model().fit([(X, Y)], sample_weight=np.ones(300), verbose=0)


def test_a_missing_random_stream_is_named():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(10)(x)
            return nn.Dropout(0.2, rng_collection="noise", deterministic=not train)(x)

    with pytest.raises(ValueError, match=r"noise[\s\S]*rngs="):
        fit(make_model(Noisy()))
    assert fit(make_model(Noisy(), rngs=("noise",)))["loss"][0] > 0


@pytest.mark.slow
def test_fit_leaves_no_thread_behind():
    before = threading.active_count()
    batches = [(X[i : i + 64], Y[i : i + 64]) for i in range(0, 256, 64)]
    make_layer().fit(batches, epochs=2, verbose=0)
    with pytest.raises(ZeroDivisionError):
        make_layer().fit(batches, epochs=2, callbacks=lambda c: 1 / 0, verbose=0)
    assert threading.active_count() == before


def test_an_error_of_the_data_is_raised_with_its_own_traceback():
    class Broken:
        def __iter__(self):
            yield X[:64], Y[:64]
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as caught:
        make_model().fit(Broken(), verbose=0)
    assert any(entry.name == "__iter__" for entry in caught.traceback)


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
def test_a_state_that_is_set_is_gone_on_from():
    x = np.linspace(-1, 1, 16)[:, None]
    models = [ff.Model(nn.Dense(1), optax.adam(0.1), "mse", strategy=ONE) for _ in range(2)]
    models[0].fit(x, 3 * x, verbose=0)
    models[1].state = models[0].state
    np.testing.assert_array_equal(models[1].predict(x), models[0].predict(x))
    first, second = (model.fit(x, 3 * x, shuffle=False, verbose=0)["loss"] for model in models)
    assert first == second
    assert models[0].step == models[1].step == 2
    models[0].state = models[1].state.replace(step=jnp.int32(7))
    assert models[0].step == 7


@pytest.mark.slow
def test_a_state_that_is_set_is_where_a_run_with_checkpoints_begins(tmp_path):
    x = np.linspace(-1, 1, 16)[:, None]
    first = ff.Model(nn.Dense(1), optax.adam(0.1), "mse", strategy=ONE)
    first.fit(x, 3 * x, verbose=0)
    for _ in range(2):  # The second time the run is complete.
        model = ff.Model(nn.Dense(1), optax.adam(0.1), "mse", strategy=ONE)
        model.state = first.state
        history = model.fit(x, 3 * x, verbose=0, checkpoint_dir=tmp_path)
        assert (model.step, history.steps) == (2, [2])

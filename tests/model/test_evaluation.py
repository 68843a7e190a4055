"""evaluate, predict, predictions and single batches of a Model, and compile between them."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import loop_of_model
from loops import waves
from marks import thorough, usual

import flaxfit as ff

X = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
LAYER = nn.Dense(1, kernel_init=waves)


def make_model(**options):
    given = {"optimizer": optax.sgd(0.1), "loss": "mse", "metrics": ["mae"], **options}
    return ff.Model(LAYER, given.pop("optimizer"), given.pop("loss"), **given)


@pytest.fixture(scope="module")
def model():
    model = make_model()
    model.build(X)
    return model


@pytest.mark.slow
def test_the_first_inputs_make_the_parameters_that_fit_would(model):
    one, other = make_model(), make_model()
    np.testing.assert_array_equal(one.predict(X), model.predict(X))
    for each in one, other:
        each.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(one.predict(X), other.predict(X))
    assert one.step == other.step == 1


def test_numbers_come_in_the_order_of_the_names(model):
    by_name = model.evaluate(X, Y)
    assert model.metrics_names == ["loss", "mae"] == list(by_name)
    assert model.evaluate(X, Y, return_dict=False) == list(by_name.values())
    part = pytest.approx(model.evaluate(X[:8], Y[:8]), rel=1e-6)
    assert model.evaluate(X, Y, 4, steps=2) == part


def test_predictions_are_those_of_predict_one_batch_after_another(model):
    found = list(model.predictions([(X[:8], Y[:8]), (X[8:], Y[8:])]))
    np.testing.assert_array_equal(np.concatenate([o for _, o in found]), model.predict(X, 8))
    assert [batch.targets[0].shape for batch, _ in found] == [(8, 1), (5, 1)]


def test_a_model_without_an_optimizer_measures_and_says_what_it_lacks():
    model = make_model(optimizer=None)
    assert model.evaluate(X, Y) == make_model().evaluate(X, Y)
    with pytest.raises(ValueError, match="no optimizer: call compile"):
        model.fit(X, Y, verbose=0)
    model.compile(optax.sgd(0.1))
    model.fit(X, Y, verbose=0)
    assert model.step == 1


@pytest.mark.slow
def test_compile_keeps_the_weights_and_a_state_that_fits(capsys):
    model = make_model(optimizer=optax.adam(0.1))
    model.fit(X, Y, verbose=0)
    before, moments = model.get_weights(), model.state.opt_state[0].mu["kernel"]
    model.compile(optax.adam(0.01), loss="mae", metrics=["mse"])
    np.testing.assert_array_equal(model.get_weights()[1], before[1])
    np.testing.assert_array_equal(model.state.opt_state[0].mu["kernel"], moments)
    assert model.evaluate(X, Y).keys() == {"loss", "mse"} and model.step == 1
    model.compile(optax.sgd(0.1))
    said = capsys.readouterr().err
    assert "optimizer state are kept\n" in said and "starts from scratch" in said


def test_compile_says_where_a_schedule_continues(capsys):
    model = make_model(optimizer=optax.sgd(optax.linear_schedule(0.1, 0.0, 2)))
    model.fit(X, Y, epochs=2, verbose=0)
    model.compile(optax.sgd(optax.linear_schedule(0.2, 0.0, 2)))
    assert "state are kept; its schedule continues at step 2\n" in capsys.readouterr().err


def rate_of(model):
    return pytest.approx(loop_of_model(model).hyperparams["learning_rate"])


def make_tuned(optimizer):
    """A model whose learning rate was set, which moves that of optax into the state."""
    model = make_model(optimizer=optimizer)
    tune = ff.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    model.fit(X, Y, verbose=0, callbacks=[tune])
    return model


def moments(model):
    return np.asarray(model.state.opt_state.inner_state[0].mu["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("is_loaded", [False, thorough(True)])
def test_compile_keeps_what_a_rate_was_set_to(is_loaded, tmp_path, capsys):
    tuned = make_tuned(optax.adam(0.1))
    before = moments(tuned)
    tuned.save(tmp_path)

    def compiled(**changes):
        other = make_tuned(optax.adam(0.1)) if not is_loaded else make_model(optimizer=other_adam)
        if is_loaded:
            other.load(tmp_path)
        other.compile(**changes)
        other.fit(X, Y, verbose=0, shuffle=False)
        assert other.step == 2
        return other, "optimizer state are kept" in capsys.readouterr().err

    other_adam = optax.adam(0.1)
    other, is_kept = compiled(loss="mae")
    assert is_kept and rate_of(other) == 0.5
    np.testing.assert_allclose(0.9 * before, moments(other), atol=0.1)
    assert np.abs(before).max() > 0.1
    other, is_kept = compiled(optimizer=optax.adam(0.01))
    assert is_kept and rate_of(other) == 0.01
    other, is_kept = compiled(clip_norm=1.0, ema=0.9)
    assert is_kept and rate_of(other) == 0.5
    other, is_kept = compiled(optimizer=optax.sgd(0.01))
    assert not is_kept and rate_of(other) == 0.01
    kernel = tuned.get_weights()[1]
    other, is_kept = compiled(freeze="kernel")
    assert is_kept and np.array_equal(other.get_weights()[1], kernel)


@pytest.mark.slow
def test_compile_of_the_same_optimizer_keeps_its_hyperparameters():
    model = make_tuned(ff.optim.OptimizerDef(optax.adam, learning_rate=0.1))
    model.compile(model.optimizer, loss="mae")
    model.fit(X, Y, verbose=0)
    assert rate_of(model) == 0.5


@pytest.mark.slow
def test_a_loaded_model_is_compiled_with_an_optimizer_that_did_not_write_it(tmp_path):
    make_tuned(optax.adam(0.1)).save(tmp_path)
    for optimizer, rate in (optax.sgd(0.01), 0.01), (optax.adam(0.02), 0.02):
        model = ff.Model(LAYER)
        model.load(tmp_path)
        model.compile(optimizer, "mse")
        model.fit(X, Y, verbose=0)
        assert model.step == 2 and rate_of(model) == rate
    model = ff.Model(nn.Dense(2))
    model.load(tmp_path)
    model.compile(optax.sgd(0.01), "mse")
    with pytest.raises(ValueError, match=r"does not fit this model \(2 differences\)"):
        model.fit(X, Y, verbose=0)


def test_compile_that_is_refused_changes_nothing(model):
    with pytest.raises(ValueError, match="freezes every parameter"):
        model.compile(freeze=".*", loss="mae")
    assert model.loss == "mse" and not model.freeze and model.metrics_names == ["loss", "mae"]


def test_predictions_are_of_the_state_at_their_call():
    model = make_model()
    model.build(X)
    found = model.predictions(X, 4)
    next(found)
    model.set_weights([each + 1 for each in model.get_weights()])
    with pytest.raises(RuntimeError, match="was trained or given other weights"):
        next(found)
    found = model.predictions(X, 4)
    model.train_on_batch(X, Y)
    with pytest.raises(RuntimeError, match="was trained or given other weights"):
        next(found)


def test_weights_are_a_list_of_arrays(model):
    bias, kernel = model.get_weights()
    assert bias.shape == (1,) and kernel.shape == (3, 1) and model.count_params() == 4
    other = make_model()
    other.build((None, 3))
    other.set_weights([bias + 1, kernel])
    np.testing.assert_allclose(other.predict(X), model.predict(X) + 1, rtol=1e-5)
    with pytest.raises(ValueError, match="needs 2 arrays"):
        other.set_weights([bias])


class TwoHeads(nn.Module):
    form: type = dict

    @nn.compact
    def __call__(self, x):
        names = "price", "count"
        heads = [nn.Dense(1, kernel_init=waves, name=name)(x) for name in names]
        return self.form(zip(names, heads, strict=True)) if self.form is dict else self.form(heads)


@pytest.mark.slow
def test_weights_in_a_list_are_those_of_losses_in_a_list_in_order():
    y, weights = (Y, -Y), np.arange(13, dtype=np.float32)
    one, other = (ff.Model(TwoHeads(tuple), optax.sgd(0.1), ["mse", "mae"]) for _ in range(2))
    listed, named = [weights, None], {"output_0": weights}
    assert one.evaluate(X, y, sample_weight=listed) == one.evaluate(X, y, sample_weight=named)
    assert one.evaluate(X, y, sample_weight=listed) != one.evaluate(X, y)
    one_batch = one.test_on_batch
    assert one_batch(X, y, listed) == one_batch(X, y, named)
    batches = [(X, y, listed)] * 2
    assert one.evaluate(batches) == one.evaluate([(X, y, named)] * 2)
    assert one.train_on_batch(X, y, listed) == other.train_on_batch(X, y, named)
    by_name = other.fit([(X, y, named)] * 2, verbose=0)
    assert one.fit(iter(batches), verbose=0)["loss"] == by_name["loss"]
    with pytest.raises(ValueError, match="weights for 3 outputs, and the model has losses for 2"):
        one.evaluate(X, y, sample_weight=[weights] * 3)


@pytest.mark.parametrize("form", [dict, tuple])
def test_weights_in_a_list_beside_losses_by_name_are_refused(form):
    model = ff.Model(TwoHeads(form), optax.sgd(0.1), {"count": "mae", "price": "mse"})
    y, weights = {"price": Y, "count": -Y}, (np.arange(13, dtype=np.float32), None)
    named = {"count": weights[0]}
    for call in (
        lambda: model.evaluate(X, y, sample_weight=weights),
        lambda: model.train_on_batch(X, y, weights),
        lambda: model.fit([(X, y, weights)], verbose=0),
        # Also after a batch with weights by name.
        lambda: model.fit([(X, y, named), (X, y, weights)], verbose=0),
    ):
        with pytest.raises(ValueError, match="Cannot tell which weights in a list or a tuple"):
            call()


def test_data_of_unknown_length_that_ends_before_the_steps_is_said(model, capsys):
    batches = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    for steps, n_notices in ((2, 0), (3, 1)):
        model.evaluate(iter(batches), steps=steps, verbose=0)
        said = capsys.readouterr().err
        assert said.count(f"the data ended after 2 of {steps} steps") == n_notices


WAYS = {
    "devices": {},
    "accumulate": {"accumulate": 2},
    "one device": {"run_eagerly": True},
    "sharded": {"strategy": ff.Sharded()},
}


@pytest.mark.slow
@pytest.mark.parametrize("is_by_output", [False, True])
@pytest.mark.parametrize("way", usual("accumulate", "sharded", of=WAYS))
def test_weights_that_are_all_0_give_the_loss_0_and_change_nothing(way, is_by_output):
    options = WAYS[way]
    module, loss, y, metrics = nn.Dense(1), "mse", Y, {"mae": "mae"}
    if is_by_output:
        module, loss, y = TwoHeads(), {"price": "mse", "count": "mae"}, {"price": Y, "count": -Y}
        metrics = {"price": "mae"}
    model, weights = ff.Model(module, optax.adam(0.1), loss, metrics, **options), np.zeros(13)
    model.fit(X, y, batch_size=8, verbose=0)
    before = model.state
    weighted = {"validation_data": (X, y, weights), "sample_weight": weights}
    history = model.fit(X, y, batch_size=8, **weighted, verbose=0)
    losses = [name for name in history if name.endswith("loss")]
    assert len(losses) == (6 if is_by_output else 2)
    assert {name: history[name] for name in losses} == dict.fromkeys(losses, [0.0])
    assert np.isnan(history["val_price_mae" if is_by_output else "val_mae"]).all()
    after = model.state
    assert after.step == before.step + 2
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))


def test_a_single_example_is_refused_by_predict(model):
    model.build(X)
    with pytest.raises(ValueError, match=r"x has the shape \(3,\) of one: pass x\[None\]"):
        model.predict(X[0])
    assert model.predict(X[:1]).shape == model.predict([X[:1]]).shape

"""Arrays in every form that `fit`, `evaluate` and `predict` take them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from marks import slow, thorough

import flaxfit as ff
from flaxfit.data._batch import normalize
from flaxfit.data._fit_arguments import prepare, prepare_inputs

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
W = np.linspace(0.5, 1.5, 20, dtype=np.float32)
ONE = ff.DataParallel(jax.devices()[:1])


class Example(NamedTuple):
    x: Any
    y: Any


def assert_same(data, expected):
    assert isinstance(data, tuple) and len(data) == 3
    assert jax.tree.structure(data) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, data, expected)


def make_model(outputs=2, loss="crossentropy", metrics=()):
    return ff.Model(nn.Dense(outputs), optax.sgd(0.1), loss, metrics, strategy=ONE)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (X, (X, None, None)),
        ((X, Y), (X, Y, None)),
        ((X, Y, W), (X, Y, W)),
        ((X, ()), (X, None, None)),
        ((X, None), (X, None, None)),
        ({"x": X, "y": Y}, (X, Y, None)),
        ({"inputs": X, "targets": Y, "weights": W}, (X, Y, W)),
        ({"image": X}, ({"image": X}, None, None)),
        (((X, X), (Y, Y)), ((X, X), (Y, Y), None)),
        ((X, Y.tolist()), (X, Y, None)),
        (X.tolist(), (X, None, None)),
        (Example(X, Y), (X, Y, None)),
        (ff.Batch(X, Y), (X, Y, None)),
    ],
    ids=str,
)
def test_without_y_arrays_are_a_data_set(data, expected):
    assert_same(prepare(data)[0], expected)
    if not isinstance(data, list):
        assert_same(prepare(X, validation_data=data)[1], expected)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (X.tolist(), Y, (X, Y)),
        (X, Y.tolist(), (X, Y)),
        (X, list(Y), (X, Y)),
        ([X, X], Y, ((X, X), Y)),
        ((X, X), Y, ((X, X), Y)),
        (X, [Y, Y], (X, (Y, Y))),
        (X, (Y, Y.tolist()), (X, (Y, Y))),
        ({"x": X, "y": X}, Y, ({"x": X, "y": X}, Y)),
    ],
    ids=str,
)
def test_with_y_all_of_x_is_inputs(x, y, expected):
    assert_same(prepare(x, y)[0], (*expected, None))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([X, Y], (X, Y, None)),
        ([X, Y, W], (X, Y, W)),
        ([X, list(Y)], (X, Y, None)),
        ((X, list(Y)), (X, Y, None)),
        ([X, [Y, Y]], (X, (Y, Y), None)),
        ([(X, X), Y], ((X, X), Y, None)),
    ],
    ids=str,
)
def test_validation_data_may_be_a_list_as_in_keras(data, expected):
    assert_same(prepare(X, Y, validation_data=data)[1], expected)


@pytest.mark.parametrize(
    "batches", [[(X, Y)], [(X, Y), (X, Y)], [[X, Y], [X, Y]], [X], [{"x": X, "y": Y}] * 2], ids=len
)
def test_a_list_of_batches_stays_one(batches):
    assert prepare(batches, validation_data=batches) == (batches, batches)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ((X, X), (X, X)),
        ({"x": X, "y": X}, {"x": X, "y": X}),
        (X.tolist(), X),
        ([X, X], (X, X)),
        ([X, X.tolist()], (X, X)),
    ],
    ids=str,
)
def test_all_that_is_predicted_is_inputs(x, expected):
    assert_same(prepare_inputs(x), (expected, None, None))


@pytest.mark.parametrize("batches", [[(X, Y)] * 2, [{"image": X}] * 2, [[X], [X]]], ids=str)
def test_batches_to_predict_stay_so(batches):
    assert prepare_inputs(batches) is batches


class State(NamedTuple):
    position: Any
    velocity: Any


@struct.dataclass
class Record:
    position: Any
    velocity: Any


@pytest.mark.parametrize("kind", [State, Record])
def test_a_structure_with_fields_is_one_input(kind):
    given, expected = kind(X.tolist(), X), kind(X, X)
    if kind is Record:
        given = expected
    assert_same(prepare(given)[0], (expected, None, None))
    assert_same(prepare(given, Y)[0], (expected, Y, None))
    assert_same(prepare((given, Y), validation_data=(given, Y))[1], (expected, Y, None))
    assert_same(prepare_inputs(given), (expected, None, None))


class Moves(nn.Module):
    @nn.compact
    def __call__(self, state):
        return nn.Dense(1)(state.position) + nn.Dense(1)(state.velocity)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [State, thorough(Record)])
def test_a_structure_is_fitted_evaluated_and_predicted_alike(kind):
    targets = X.sum(1, keepdims=True)
    model = ff.Model(Moves(), optax.sgd(0.1), "mse")
    model.fit(kind(X, X), targets, batch_size=10, shuffle=False, verbose=0)
    outputs = model.predict(kind(X, X))
    assert model.predict([(kind(X, X),)]).tolist() == outputs.tolist()
    loss = model.evaluate(kind(X, X), targets)["loss"]
    assert loss == pytest.approx(np.mean((outputs - targets) ** 2), rel=1e-5)
    assert model.evaluate([(kind(X, X), targets)])["loss"] == pytest.approx(loss, rel=1e-5)
    for data in ((kind(X, X), targets), [(kind(X, X), targets)]):
        task = ff.TrainTask(Moves().apply, optax.sgd(0.1), "mse", data)
        assert next(ff.TrainLoop(Moves().init, task, 0, stdout=False, strategy=ONE)).loss > 0
    with pytest.raises(TypeError, match="loss needs targets, but the data holds only inputs"):
        ff.Model(Moves(), optax.sgd(0.1), "mse").fit(kind(X, X), verbose=0)


@pytest.mark.slow
def test_lists_of_arrays_are_several_inputs_and_targets():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, a, b):
            return nn.Dense(1)(a), nn.Dense(1)(b)

    def loss(a, b, first, second):
        return ((a - first) ** 2 + (b - second) ** 2)[:, 0]

    sums = X.sum(1, keepdims=True)
    model, expected = (ff.Model(Two(), optax.sgd(0.1), loss) for _ in range(2))
    history = model.fit([X, 2 * X], [sums, -sums], verbose=0)
    assert dict(history) == dict(expected.fit((X, 2 * X), (sums, -sums), verbose=0))
    found = model.predict([X, 2 * X])
    jax.tree.map(np.testing.assert_array_equal, found, expected.predict((X, 2 * X)))
    mean = np.mean((found[0] - sums) ** 2 + (found[1] + sums) ** 2)
    assert model.evaluate([X, 2 * X], [sums, -sums])["loss"] == pytest.approx(mean, rel=1e-5)


def test_tables_with_columns_of_numbers_and_of_truth_values_are_arrays():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1] > 0, "c": np.arange(20)})
    expected = np.stack([X[:, 0], X[:, 1] > 0, np.arange(20)], axis=1)
    assert_same(
        prepare(frame, pandas.get_dummies(pandas.Series(Y)))[0], (expected, np.eye(2)[Y], None)
    )
    assert_same(next(ff.ArrayStream(frame, frame["a"], W, batch_size=20)), (expected, X[:, 0], W))
    np.testing.assert_array_equal(normalize((frame, Y)).inputs[0], expected.astype(np.float32))
    missing = pandas.array([1, None] * 10, dtype="Int64")
    words = frame.assign(d="word", e=missing)
    with pytest.raises(TypeError, match=r"columns that are not numbers: 'd' \(.*\), 'e' \(Int64\)"):
        ff.ArrayStream(words)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", thorough("uint4")])
def test_integers_of_less_than_a_byte_are_widened(dtype):
    small = np.abs(np.arange(20) % 4).astype(jnp.dtype(dtype))[:, None]
    wide = small.astype(np.int8)
    forms = wide, small, jnp.asarray(small)

    def losses_on(*data):
        return [make_model(1, "mse").fit(*each, verbose=0)["loss"][0] for each in data]

    arrays, batches = (
        losses_on(*((x, wide) for x in forms)),
        losses_on(*([[(x, wide)]] for x in forms)),
    )
    assert arrays == [arrays[0]] * 3 and batches == [batches[0]] * 3
    assert arrays == pytest.approx(batches, rel=1e-6)  # Batches have a program of their own.


def refused_in_words(x, call, *more):
    """That each way of training on sparse or ragged inputs says how to make them dense."""
    for data in ((x, Y), ([(x, Y)],), *more):
        with pytest.raises(TypeError, match=call):
            make_model().fit(*data, verbose=0)


@pytest.mark.slow
def test_sparse_arrays_are_refused_in_words():
    sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    from jax.experimental.sparse import BCOO

    for x, call in (
        (sparse.csr_matrix(X), r"x\.toarray\(\)"),
        (sparse.csr_array(X), r"x\.toarray\(\)"),
        (BCOO.fromdense(X), r"x\.todense\(\)"),
    ):
        message = rf"a sparse array: make it dense, {call}\."
        refused_in_words(x, message, ((x, Y),), (iter([(x, Y)]),), (x,), (X, x))
        for use in (ff.data.as_stream, lambda x: ff.ArrayStream({"x": x}, Y), make_model().predict):
            with pytest.raises(TypeError, match=call):
                use(x)


@pytest.mark.slow
def test_ragged_and_sparse_tensors_of_tensorflow_are_refused_in_words():
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    refused_in_words(ragged, r"ragged array: pad its rows to one length, x\.to_tensor\(\)")
    dense = r"sparse array: make it dense, tf\.sparse\.to_dense\(x\)"
    refused_in_words(tf.sparse.from_dense(X[:2]), dense)
    # A data set hands over sparse tensors as dense arrays.
    with pytest.raises(TypeError, match="Pad rows of different lengths"):
        make_model().fit(tf.data.Dataset.from_tensors((ragged, Y[:2])), verbose=0)


@pytest.mark.slow
def test_sparse_and_nested_tensors_of_torch_are_refused_in_words():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.ones(2, 3)
    nested = torch.nested.nested_tensor([*x], layout=torch.jagged)
    refused_in_words(x.to_sparse(), r"sparse array: make it dense, x\.to_dense\(\)")
    refused_in_words(nested, r"ragged array: .*torch\.nested\.to_padded_tensor")


@pytest.mark.parametrize(
    "data",
    [
        thorough(((X, Y),)),
        thorough(({"x": X, "y": Y},)),
        slow((X.tolist(), list(Y))),
        thorough(([(X, Y)],)),
    ],
    ids=["pair", "mapping", "lists", "batches"],
)
def test_a_model_is_fitted_and_evaluated_on_each_form_alike(data):
    model, expected = make_model(), make_model()
    options = {"shuffle": False, "epochs": 2, "verbose": 0}
    history = model.fit(*data, **options, validation_data=[X, list(Y)])
    wanted = expected.fit(X, Y, **options, validation_data=(X, Y))
    for name in ("loss", "val_loss"):
        assert history[name] == pytest.approx(wanted[name], rel=1e-6)
    assert model.evaluate(*data) == pytest.approx(expected.evaluate(X, Y), rel=1e-6)


@pytest.mark.parametrize("shape", [(20, 1), (20, 3)], ids=str)
def test_masked_targets_have_the_weight_0(shape):
    is_masked = np.random.default_rng(1).random(shape) < 0.4
    y = np.broadcast_to(X.sum(1, keepdims=True), shape)
    masked = np.ma.array(np.where(is_masked, 1e20, y), mask=is_masked)
    weights = np.float32(~is_masked).reshape(20, *shape[1:] * (shape[1] > 1))
    expected = (X, np.where(is_masked, 0, y), weights)
    for found in prepare(X, masked, validation_data=(X, masked)):
        assert_same(found, expected)
    assert_same(normalize((X, masked)), normalize(expected))
    weighted = prepare(X, masked, W)[0][2]
    np.testing.assert_array_equal(weighted, (W * weights.T).T)


def test_masked_inputs_and_masks_that_have_no_place_are_refused():
    masked = np.ma.masked_greater(X, 1)
    y = np.ma.masked_greater(X[:, 0], 1)
    forms: Any = (masked, Y), ([(masked, Y)],), (X, (y, y)), ((X, Y, np.ma.masked_less(W, 1)),)
    for data in forms:
        with pytest.raises(TypeError, match="Cannot train on a masked array"):
            make_model().fit(*data, verbose=0)
    with pytest.raises(TypeError, match="Cannot train on a masked array"):
        make_model().predict(masked)
    assert normalize((np.ma.masked_greater(X, 99), Y)).inputs[0].shape == X.shape


def test_class_weights_count_in_training_only():
    options = {"sample_weight": W, "class_weight": {1: 3.0}}
    (x, y, w), (_, y_held_out, w_held_out) = prepare(X, Y, **options, validation_split=0.25)
    rows = [np.flatnonzero((row == X).all(1))[0] for row in x]
    np.testing.assert_allclose(w, np.where(y == 1, 3, 1) * W[rows])
    held_out = np.setdiff1d(np.arange(20), rows)
    np.testing.assert_array_equal(w_held_out, W[held_out])
    np.testing.assert_array_equal(y_held_out, Y[held_out])
    assert prepare(X, Y, class_weight={1: 3.0}, validation_split=0.25)[1][2] is None
    of_floats = prepare(X, Y.astype(np.float32), class_weight={0: 0.0, 1: 2.0})[0][2]
    np.testing.assert_array_equal(of_floats, np.where(Y == 1, 2, 0))


@pytest.mark.parametrize(
    ("class_weight", "error", "message"),
    [
        ([1, 2], TypeError, r"must map labels to weights, such as .* got list: \[1, 2\]"),
        (5, TypeError, "got int: 5"),
        ({5: 1.0}, ValueError, r"do not occur in y, \[5\]. y has 0, 1"),
        ({"a": 1.0}, ValueError, r"\['a'\]. y has 0, 1"),
        ({0: "x"}, TypeError, "class_weight of 0 must be a number, got 'x'"),
        ({0: np.nan}, ValueError, "class_weight must be finite and not negative"),
        ({1: -1.0}, ValueError, "class_weight must be finite and not negative"),
    ],
    ids=str,
)
def test_wrong_class_weights_are_refused_in_words(class_weight, error, message):
    with pytest.raises(error, match=message):
        prepare(X, Y, class_weight=class_weight)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (2.0, r"one number per example, of shape \(batch,\), or .* got the scalar"),
        (np.ones(5), "x has 20 rows but sample_weight has 5"),
        ([1.0] * 5, "x has 20 rows but sample_weight has 5"),
        (np.where(Y == 1, np.nan, 1), "sample_weight must be finite and not negative"),
        (-W, "sample_weight must be finite and not negative: 20 of 20"),
    ],
)
def test_wrong_sample_weights_are_refused_in_words(weights, message):
    with pytest.raises(ValueError, match=message):
        prepare(X, Y, weights)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((X, Y, W, W),), TypeError, r"x must be \(x, y\) or \(x, y, weights\), got 4 parts"),
        (((X, "labels"),), TypeError, "must hold arrays, got str: 'labels'"),
        (((X, Y[:5]),), ValueError, "x has 20 rows but y has 5"),
        ((X, [Y, Y[:5]]), ValueError, r"x has 20 rows but y\[1\] has 5"),
        ((X, 3), TypeError, "y must hold one row per example, got the scalar"),
        (([[1.0, 2.0], [3.0]],), ValueError, "lists of different lengths"),
        (((X, Y, W), None, W), ValueError, "either in the data set or as sample_weight"),
        ((X, X[:, 0], None, {1: 2.0}), ValueError, "labels as targets y, got .* not whole"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_together_is_refused_in_words(arguments, error, message):
    with pytest.raises(error, match=message):
        prepare(*arguments)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((X, Y[:5]), ValueError, r"validation_data\[0\] has 20 rows but .*\[1\] has 5"),
        ((X, Y, -W), ValueError, "weights of validation_data must be finite"),
        ((X, Y, W, W), TypeError, "validation_data must be .* got 4 parts"),
    ],
    ids=["rows", "weights", "parts"],
)
def test_parts_of_the_validation_data_are_named(data, error, message):
    with pytest.raises(error, match=message):
        prepare(X, Y, validation_data=data)


def test_weights_in_the_order_of_the_outputs_are_by_name():
    for given in ([W, None], (W, None)):
        assert prepare(X, [Y, Y], given)[0][2].keys() == {"output_0"}
    weights = prepare(X, [Y, Y], [W, 2 * W], outputs=("output_0", "output_1"))[0][2]
    np.testing.assert_array_equal(weights["output_1"], 2 * W)
    with pytest.raises(ValueError, match="Cannot tell which weights in a list"):
        prepare(X, [Y, Y], [W, W], outputs=("a", "b"))
    assert normalize((X, (Y, Y), [W, W])).weights.keys() == {"output_0", "output_1"}
    np.testing.assert_array_equal(prepare(X, Y, [W])[0][2], W)
    with pytest.raises(ValueError, match="weights for 3 outputs, and the model has losses for 2"):
        prepare(X, [Y, Y], [W, W, W], outputs=("a", "b"))


@pytest.mark.slow
def test_batches_are_weighted_by_class_as_arrays_are():
    options = {"class_weight": {0: 3.0}, "shuffle": False, "verbose": 0}
    wanted = make_model().fit(X, Y, 10, 2, **options)["loss"]
    batches = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    stream = ff.ArrayStream(X, Y, batch_size=10)
    for data in (batches, lambda: iter(batches), stream):
        assert make_model().fit(data, epochs=2, **options)["loss"] == pytest.approx(wanted)

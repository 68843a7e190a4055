"""What `fit`, `evaluate` and `predict` make of their data: how it is cut, ordered and ended."""

import dataclasses
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import optax
import pytest
from flax import linen as nn
from internals import loop_of_model
from marks import slow, thorough

import flaxfit as ff
from flaxfit.model._streams import training_stream

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]


def make_model(**options):
    return ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", **options)


def kernel_of(model):
    return model.state.params["kernel"].ravel().tolist()


def fit(data, y=None, **options):
    """The parameters and the steps of a fresh model."""
    model = make_model()
    history = model.fit(data, y, **{"verbose": 0, **options})
    return kernel_of(model), history.steps


class Unsized:
    """Batches of unknown number, in an order that moves with each pass."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter([BATCHES[i] for i in self.rng.permutation(len(BATCHES))])


@pytest.fixture
def hugging_face():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_dict({"x": X, "y": Y})


# The batch size and the order are honoured or refused.


@pytest.mark.parametrize("kind", ["Dataset", slow("IterableDataset")])
def test_a_hugging_face_dataset_is_cut_and_shuffled_as_arrays_are(hugging_face, kind):
    data = hugging_face if kind == "Dataset" else hugging_face.to_iterable_dataset()
    in_order = {"batch_size": 8, "shuffle": False, "epochs": 2}
    assert fit(data, **in_order) == fit(X, Y, **in_order)
    shuffled = [fit(data, batch_size=8, epochs=2, **options) for options in ({}, {"shuffle": True})]
    assert shuffled[0] == shuffled[1] and shuffled[0][1] == [3, 6]
    assert shuffled[0] != fit(data, **in_order)
    model = make_model()
    for _ in range(2):  # The order of an epoch does not depend on the calls of fit.
        model.fit(data, batch_size=8, verbose=0)
    assert kernel_of(model) == shuffled[0][0]


@pytest.mark.slow
def test_what_a_callable_returns_is_cut_and_shuffled():
    def data():
        return X, Y

    in_order = {"batch_size": 8, "shuffle": False, "epochs": 2}
    assert fit(data, **in_order) == fit(X, Y, **in_order) == fit(data, batch_size=8, epochs=2)
    shuffled = {**in_order, "shuffle": True}
    assert fit(data, **shuffled) == fit(X, Y, **shuffled)


@pytest.mark.slow
def test_the_default_batch_size_and_order_may_be_given_as_none():
    assert fit(X, Y, batch_size=None, shuffle=None) == fit(X, Y) == fit(X, Y, batch_size=32)
    assert fit(BATCHES) == fit(BATCHES, batch_size=None) == fit(BATCHES, shuffle=False)


@pytest.mark.slow
def test_none_stands_for_no_metrics_and_no_callbacks():
    model = ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", None)
    assert set(model.fit(X, Y, callbacks=None, verbose=0)) == {"loss"}
    assert not ff.TrainTask(lambda v, x: x, optax.sgd(0.1), "mse", metrics=None).metrics


@pytest.mark.parametrize(
    "data",
    [
        lambda: BATCHES,
        lambda: iter(BATCHES),
        Unsized,
        lambda: lambda: iter(BATCHES),
        lambda: ff.ArrayStream(X, Y, batch_size=4),
    ],
    ids=["list", "iterator", "iterable", "callable", "stream"],
)
@pytest.mark.parametrize("options", [{"batch_size": 8}, {"shuffle": True}], ids=str)
def test_batches_are_not_cut_or_shuffled_and_say_so(data, options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} cannot be applied to a .*batches"):
        fit(data(), **options)


def test_the_loaders_of_other_libraries_are_not_cut_or_shuffled():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=4)
    with pytest.raises(ValueError, match="batch_size=8, shuffle=True cannot be applied to a Data"):
        fit(loader, batch_size=8, shuffle=True)
    assert fit(loader) == fit(BATCHES)


def test_a_stream_that_shuffles_is_not_put_in_order():
    stream = ff.ArrayStream(X, Y, shuffle=True)
    with pytest.raises(ValueError, match="shuffle=False cannot be applied to a ArrayStream"):
        fit(stream, shuffle=False)


@pytest.mark.slow
def test_evaluate_predict_and_find_lr_refuse_a_batch_size_of_batches():
    model = make_model()
    model.fit(X, Y, verbose=0)
    for call in (model.evaluate, model.predict, model.find_lr):
        with pytest.raises(ValueError, match="batch_size=8 cannot be applied to a list"):
            call(BATCHES, batch_size=8)
    assert model.evaluate(BATCHES)["loss"] == pytest.approx(model.evaluate(X, Y)["loss"])
    sized = [model.evaluate(lambda: (X, Y), batch_size=n)["loss"] for n in (None, 8)]
    assert sized == pytest.approx([model.evaluate(X, Y)["loss"]] * 2)
    assert model.predict(X, batch_size=None).shape == (20, 1)


# The end of the data.


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [thorough(BATCHES), Unsized, thorough(lambda: iter(BATCHES))], ids=type
)
def test_more_steps_per_epoch_than_a_pass_has_go_on_into_the_next(data):
    data = data() if isinstance(data, type) else data
    assert fit(data, steps_per_epoch=8, epochs=2)[1] == [8, 16]
    assert fit(BATCHES, steps_per_epoch=8) == fit(
        X, Y, batch_size=4, steps_per_epoch=8, shuffle=False
    )


@pytest.mark.slow
def test_a_generator_that_ends_before_its_epochs_is_an_error():
    with pytest.raises(ValueError, match="ended after 5 batches, but more were requested"):
        fit(iter(BATCHES), steps_per_epoch=50)
    with pytest.raises(ValueError, match="ended after 5 batches, but more were requested"):
        fit(iter(BATCHES), steps_per_epoch=4, epochs=2)
    assert fit(iter(BATCHES), steps_per_epoch=5)[1] == [5]


def test_a_stream_that_ends_before_its_epochs_is_an_error():
    model = make_model()
    with pytest.raises(ValueError, match="ended after step 5, and 3 epochs of 5 steps end at"):
        model.fit(ff.ArrayStream(X, Y, batch_size=4, epochs=1), epochs=3, verbose=0)
    assert model.step == 5


def test_a_stream_of_unknown_length_that_ends_is_an_error():
    class Stream:
        def __init__(self):
            self.batches = iter(BATCHES)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.batches)

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    with pytest.raises(ValueError, match="ended after 1 of 3 epochs"):
        fit(Stream(), epochs=3)


def test_a_loop_says_that_the_data_ended_before_its_steps(capsys):
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", BATCHES)
    list(ff.TrainLoop(nn.Dense(1).init, task, 0, n_steps=9))
    said = capsys.readouterr().err
    assert "the data ended after step 5, before n_steps=9; flaxfit.data.as_stream(data" in said
    task = dataclasses.replace(task, data=ff.data.as_stream(BATCHES, epochs=2))  # As it says.
    assert [*ff.TrainLoop(nn.Dense(1).init, task, 0, n_steps=9)][-1].step == 9


class Endless:
    """Repeats batches, and has a length all the same, as a pipeline of Grain after `repeat()`."""

    def __len__(self):
        return sys.maxsize

    def __iter__(self):
        return itertools.cycle(BATCHES)


def repeated_by_tensorflow():
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()


@pytest.mark.parametrize("make", [Endless, repeated_by_tensorflow])
def test_endless_data_is_refused_where_a_pass_is_needed(make):
    data, model = make(), make_model()
    with pytest.raises(ValueError, match=r"where an epoch ends.* Give steps_per_epoch"):
        fit(data)
    calls = [
        lambda: model.fit(X, Y, validation_data=data, verbose=0),
        lambda: model.evaluate(data),
        lambda: model.predict(data),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="where an epoch ends"):
            call()
    assert fit(data, steps_per_epoch=5) == fit(BATCHES)


# A run is resumed on the same batches.


@pytest.mark.slow
@pytest.mark.parametrize("data", ["unsized", thorough("sized")])
@pytest.mark.parametrize("n_epochs", [thorough(1), 2])
def test_data_with_an_order_of_its_own_resumes_on_the_same_batches(tmp_path, data, n_epochs):
    class Sized(Unsized):
        def __len__(self):
            return len(BATCHES)

    make = Sized if data == "sized" else Unsized
    whole, options = make_model(), {"verbose": 0, "validation_data": (X, Y)}
    whole.fit(make(), epochs=4, **options)
    make_model().fit(make(), epochs=n_epochs, checkpoint_dir=tmp_path, **options)
    resumed = make_model()
    history = resumed.fit(make(), epochs=4, checkpoint_dir=tmp_path, **options)
    assert history.steps == [5, 10, 15, 20]
    np.testing.assert_array_equal(resumed.predict(X), whole.predict(X))


@pytest.mark.parametrize("stdout", [False, True])
def test_a_loop_that_prints_nothing_skips_in_silence(stdout, capsys):
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.1), "mse", BATCHES)
    loop = ff.TrainLoop(nn.Dense(1).init, task, 0, n_steps=3, stdout=stdout)
    *_, last = loop
    again = ff.TrainLoop(nn.Dense(1).init, task, 0, stdout=stdout)
    again.restore(last)
    assert ("skipping" in capsys.readouterr().err) == stdout


# A loss that is no longer finite.


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_loss_that_is_not_finite_is_said_at_once_and_in_the_end(verbose, capsys):
    model = ff.Model(nn.Dense(1), optax.sgd(1e30), "mse")
    model.fit(X, Y, batch_size=4, epochs=3, verbose=verbose)
    said = capsys.readouterr().err
    assert said.count("warning: the loss is nan at step 5. Lower the") == (verbose == 2)
    assert said.count("the loss has not been finite since epoch 1") == (verbose == 2)


def test_the_end_does_not_speak_of_a_loss_that_is_finite_again(capsys):
    broken = [(x, np.full_like(y, np.inf if i == 1 else 0)) for i, (x, y) in enumerate(BATCHES)]
    task = ff.TrainTask(nn.Dense(1).apply, optax.sgd(0.0), "mse", broken, skip_nonfinite=True)
    bar = ff.callbacks.ProgressBar(live=False)
    list(ff.TrainLoop(nn.Dense(1).init, task, 0, n_steps=4, callbacks=bar))
    said = capsys.readouterr().err
    assert "warning: the loss is" in said and "not been finite since" not in said


def test_validation_data_without_targets_is_refused_in_words():
    with pytest.raises(TypeError, match=r"holds only inputs of .* validation_data=\(x, y\)"):
        fit(X, Y, validation_data=X)


def test_an_error_of_the_data_is_raised_with_its_own_traceback():
    class Broken:
        def __iter__(self):
            yield BATCHES[0]
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as caught:
        fit(Broken())
    assert any(entry.name == "__iter__" for entry in caught.traceback)


def test_a_folder_for_checkpoints_needs_a_name_and_a_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    model.build(X)
    for call in (lambda: model.fit(X, Y, checkpoint_dir="", verbose=0), lambda: model.save("")):
        with pytest.raises(ValueError, match="folder of checkpoints needs a name, got ''"):
            call()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Cannot make the checkpoint folder .*pass another path"):
        model.fit(X, Y, checkpoint_dir=tmp_path / "file" / "run", verbose=0)


@pytest.mark.slow
def test_a_seed_that_is_set_before_fit_counts():
    model, same, other = make_model(), make_model(seed=7), make_model()
    model.seed = 7
    losses = [each.fit(X, Y, verbose=0)["loss"] for each in (model, same, other)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"verbose": 3}, "verbose must be"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
    ],
)
def test_numbers_are_checked_before_the_data(options, message):
    with pytest.raises(ValueError, match=message):
        make_model().fit(X, Y[:3], **options)


def test_a_fraction_an_order_or_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="validation_split must lie between 0 and 1"):
        fit(X, Y, validation_split=1.5)
    with pytest.raises(ValueError, match="sample_weight can be used with arrays only"):
        fit(BATCHES, sample_weight=np.ones(20))
    with pytest.raises(ValueError, match="shuffle must be True, False or None, got 'batch'"):
        fit(X, Y, shuffle="batch")


@pytest.mark.slow
def test_epochs_count_from_the_initial_one_in_the_order_of_their_data():
    one, two = make_model(), make_model()
    history = one.fit(X, Y, 8, 4, 0)
    assert history.params == {"verbose": 0, "epochs": 4, "steps": 3}
    assert history.epoch == [0, 1, 2, 3]
    two.fit(X, Y, 8, 2, 0)
    history = two.fit(X, Y, 8, 4, 0, initial_epoch=2)
    assert history.epoch == [2, 3] and history.steps == [9, 12]
    np.testing.assert_array_equal(one.predict(X), two.predict(X))
    assert not two.fit(X, Y, 8, 4, 0, initial_epoch=4)


@pytest.mark.slow
def test_a_run_that_began_at_an_epoch_resumes_to_the_same_end(tmp_path):
    whole, options = make_model(), {"batch_size": 8, "initial_epoch": 1, "verbose": 0}
    whole.fit(X, Y, epochs=4, **options)
    make_model().fit(X, Y, epochs=2, checkpoint_dir=tmp_path, **options)
    resumed = make_model()
    assert resumed.fit(X, Y, epochs=4, checkpoint_dir=tmp_path, **options).epoch == [1, 2, 3]
    np.testing.assert_array_equal(resumed.predict(X), whole.predict(X))
    with pytest.raises(ValueError, match="initial_epoch=3: the run began with 1"):
        make_model().fit(X, Y, 8, 5, 0, initial_epoch=3, checkpoint_dir=tmp_path)


@pytest.mark.slow
def test_a_generator_of_several_epochs_is_refused_and_an_iterator_that_begins_again_is_read():
    class Again:
        def __iter__(self):
            self.batches = iter(BATCHES)
            return self

        def __next__(self):
            return next(self.batches)

    with pytest.raises(ValueError, match="list_iterator can be iterated only once, but epochs"):
        fit(iter(BATCHES), epochs=2)
    assert fit(Again(), epochs=2) == fit(BATCHES, epochs=2)


@pytest.mark.slow
def test_an_epoch_that_is_longer_than_a_pass_is_said(capsys):
    fit(BATCHES, steps_per_epoch=8, verbose=2)
    assert "a pass over the data has 5 batches: an epoch of steps_per" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [thorough({}), {"steps_per_execution": 2}, thorough({"class_weight": {0: 1.0}})]
)
def test_an_epoch_that_is_longer_than_a_pass_of_unknown_length_is_said_once(capsys, options):
    labels = np.zeros((4, 1), np.int32)
    data, notice = lambda: ((x, labels) for x, _ in BATCHES), "ended before steps_per_epoch="
    for n_steps, n_notices in ((4, 0), (5, 0), (6, 1), (11, 1)):
        fit(data, steps_per_epoch=n_steps, epochs=3, verbose=2, **options)
        assert capsys.readouterr().err.count(f"{notice}{n_steps} and began again") == n_notices
    fit(data, steps_per_epoch=6, **options)
    assert notice not in capsys.readouterr().err


@pytest.mark.slow
def test_validation_steps_beyond_data_of_unknown_length_are_said_once(capsys):
    def held_out():
        return iter(BATCHES)

    for n_steps, n_notices in ((5, 0), (6, 1)):
        fit(X, Y, validation_data=held_out, validation_steps=n_steps, epochs=3, verbose=2)
        said = capsys.readouterr().err
        assert said.count(f"validation_steps={n_steps}: all 5 batches") == n_notices


class Indexed:
    """Batches by index, with a record of what was called, as those of Keras with `shuffle`."""

    shuffle = True

    def __init__(self):
        self.calls = []

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        self.calls.append(index)
        return BATCHES[index]

    def on_epoch_end(self):
        self.calls.append("end")


@pytest.mark.slow
def test_batches_by_index_are_read_in_order_or_shuffled_by_seed_and_epoch():
    data, n = Indexed(), len(BATCHES)
    assert fit(data, epochs=2) == fit(Indexed(), epochs=2, shuffle=False) == fit(BATCHES, epochs=2)
    assert [each for each in data.calls if each == "end"] == ["end"] * 2
    data, model = Indexed(), make_model()
    for _ in range(2):
        model.fit(data, shuffle=True, verbose=0)
    orders = [np.random.default_rng((0, epoch)).permutation(n).tolist() for epoch in range(2)]
    assert data.calls == [*orders[0], "end", *orders[1], "end"]
    np.testing.assert_array_equal(model.predict(Indexed()), model.predict(X))


def test_a_checkpoint_of_fit_has_the_number_of_its_epoch():
    epochs, model = [], make_model()
    options = {"verbose": 0, "callbacks": lambda each: epochs.append(each.epoch)}
    model.fit(X, Y, batch_size=10, **options)
    history = model.fit(X, Y, batch_size=10, epochs=5, initial_epoch=3, **options)
    assert epochs == [0, 3, 4] and history.epoch == [3, 4]


def test_another_thread_is_refused_the_state_during_fit(tmp_path):
    model, x = make_model(), X[:8]
    reads = {
        "evaluate": lambda: model.evaluate(x, x[:, :1], verbose=0),
        "predict": lambda: model.predict(x),
        "state": lambda: model.state,
        "get_weights": model.get_weights,
        "trained": model.trained,
        "save": lambda: model.save(tmp_path),
        "the state of the loop": lambda: loop_of_model(model).state,
    }

    def train():
        model.fit(x, x[:, :1], verbose=0)

    with ThreadPoolExecutor(1) as other:

        def call(checkpoint):
            assert "Model(" in other.submit(repr, model).result()
            for read in reads.values():
                read()
                with pytest.raises(RuntimeError, match="thread is training .* a callback rec"):
                    other.submit(read).result()
            with pytest.raises(RuntimeError, match="Another thread is training this model"):
                other.submit(train).result()

        assert len(model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[call])["loss"]) == 2
        for read in (*reads.values(), train):
            other.submit(read).result()
    assert model.step == 3


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_training_in_a_callback_of_the_same_model_is_refused_and_it_goes_on(method):
    model, x = make_model(), X[:8]

    def call(checkpoint):
        with pytest.raises(RuntimeError, match="is already training, and this code runs within"):
            getattr(model, method)(x, x[:, :1])

    assert len(model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[call])["loss"]) == 2
    assert model.step == 2


@pytest.mark.parametrize(
    ("inputs", "shuffle", "is_said"),
    [
        ((X, np.eye(20)), None, True),
        ((X, np.eye(20)), False, False),
        ((X, X), None, False),
        ((np.eye(20), X), None, True),
        ({"x": X, "adjacency": np.eye(20)}, None, True),
        ((X, {"edges": np.zeros((20, 20, 2))}), None, True),
        (np.eye(20), None, False),
    ],
)
def test_that_the_columns_of_a_square_input_stay_is_said(inputs, shuffle, is_said, capsys):
    options = {"batch_size": 20, "epochs": 1, "steps_per_epoch": None}
    training_stream((inputs, Y, None), shuffle=shuffle, seed=0, n_before=0, **options)
    assert ("pass shuffle=False" in capsys.readouterr().err) == is_said

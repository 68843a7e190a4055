"""The adapters, against the real libraries: the same digits through each of them."""

import itertools
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import diagonal, slow, thorough
from sklearn.datasets import load_digits

from flaxfit.data import as_stream, one_pass, prefetch
from flaxfit.data._batch import normalize

X, Y = load_digits(return_X_y=True)
X, Y = X[:50].astype(np.float32), Y[:50]


def examples(batches):
    """The inputs and targets of all batches, in order."""
    normal = [normalize(item) for item in batches]
    return (
        np.concatenate([jax.tree.leaves(batch.inputs)[0] for batch in normal]),
        np.concatenate([batch.targets[0] for batch in normal]),
    )


def assert_same_batches(batches, expected):
    for array, expected_array in zip(examples(batches), examples(expected), strict=True):
        np.testing.assert_array_equal(array, expected_array)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="datasets is not installed")


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow", reason="tensorflow is not installed")


@pytest.fixture
def grain():
    return pytest.importorskip("grain.python", reason="grain is not installed")


class Rows:
    """A data source, as Grain wants it: what it is called must not change between runs."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

    def __repr__(self):
        return "Rows()"


def map_dataset(grain, size=8):
    return grain.MapDataset.source(Rows()).shuffle(seed=1).batch(size)


def iter_dataset(grain, size=8):
    rows = grain.MapDataset.source(Rows()).shuffle(seed=1)
    return rows.to_iter_dataset().map(lambda row: (row[0] / 16, row[1])).batch(size)


def repeated_dataset(grain):
    return map_dataset(grain).repeat()


def shuffled_in_a_window(grain):
    dataset = grain.MapDataset.source(Rows()).to_iter_dataset().batch(8)
    return grain.experimental.WindowShuffleIterDataset(dataset, window_size=3, seed=2)


def data_loader(grain, size=8):
    return grain.DataLoader(
        data_source=Rows(),
        sampler=grain.IndexSampler(len(X), grain.NoSharding(), shuffle=True, num_epochs=1, seed=4),
        operations=[grain.Batch(size)],
        worker_count=0,
    )


GRAIN = [map_dataset, iter_dataset, data_loader]


@pytest.mark.parametrize("make", GRAIN, ids=lambda make: make.__name__)
def test_grain_data_gives_its_own_batches(grain, make):
    stream = as_stream(make(grain), epochs=2)
    assert_same_batches(stream, list(make(grain)) * 2)
    assert stream.epoch == 2
    assert_same_batches(one_pass(make(grain)), make(grain))


@pytest.mark.parametrize(
    "make", [*GRAIN, slow(repeated_dataset), shuffled_in_a_window], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("wrap", [as_stream, lambda data: prefetch(data, 3)], ids=["", "ahead"])
@pytest.mark.parametrize("n_delivered", [thorough(0), thorough(4), 1])
def test_grain_keeps_its_own_position_without_skipping(grain, make, wrap, n_delivered, capsys):
    first, second = wrap(make(grain)), wrap(make(grain))
    list(itertools.islice(first, n_delivered))
    next(second)
    state = json.loads(json.dumps(first.get_state()))
    assert ("iterator" in state) == (n_delivered > 0)
    second.set_state(state)
    assert_same_batches(itertools.islice(second, 3), itertools.islice(first, 3))
    assert second.get_state() == first.get_state()
    assert "skipping" not in capsys.readouterr().err


def test_grain_keeps_its_position_in_a_later_pass(grain):
    first, second = (as_stream(map_dataset(grain), epochs=3) for _ in range(2))
    list(itertools.islice(first, 9))
    second.set_state(first.get_state())
    assert second.epoch == 1
    assert_same_batches(second, first)


@pytest.mark.parametrize("make", GRAIN, ids=lambda make: make.__name__)
def test_a_grain_iterator_keeps_its_position_too(grain, make):
    first, second = as_stream(iter(make(grain))), as_stream(iter(make(grain)))
    list(itertools.islice(first, 3))
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert_same_batches(second, first)


@pytest.mark.parametrize("make", GRAIN, ids=lambda make: make.__name__)
def test_a_position_of_grain_in_batches_of_another_size_is_refused(grain, make):
    first = as_stream(make(grain))
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    as_stream(make(grain)).set_state(state)
    there = r"(\[16, :\]|'n_batches': 4\b)"
    with pytest.raises(ValueError, match=r"(?s)saved: .*\[8, :\].*here: .*" + there):
        as_stream(make(grain, 16)).set_state(state)


def test_a_position_of_grain_saved_without_a_description_is_taken(grain):
    first, second = as_stream(map_dataset(grain)), as_stream(map_dataset(grain))
    list(itertools.islice(first, 6))
    state = first.get_state()
    del state["data"]
    second.set_state(state)
    next(second)  # The remainder, which is not to be taken for the first batch.
    assert "first_batch" not in second.get_state()["data"]


def torch_loader(torch, **options):
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(dataset, batch_size=8, **options)


# Workers are spawned: JAX's threads make a forked one a possible deadlock, and JAX warns of it.
@pytest.mark.parametrize(
    "workers",
    [{}, slow({"num_workers": 1, "multiprocessing_context": "spawn"})],
    ids=["none", "one"],
)
def test_a_torch_loader_gives_arrays(torch, workers):
    stream = as_stream(torch_loader(torch, **workers), epochs=2)
    batches = list(stream)
    x, y = examples(batches)
    np.testing.assert_array_equal(x, np.concatenate([X, X]))
    np.testing.assert_array_equal(y, np.concatenate([Y, Y]))
    assert all(isinstance(array, np.ndarray) for batch in batches for array in batch)
    assert len(stream) == 7


def test_torch_tensors_become_arrays_over_the_same_memory(torch):
    tensors = {
        "a": torch.arange(6.0).reshape(3, 2),
        "b": (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, requires_grad=True)),
    }

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([tensors])

    batch = next(as_stream(torch.utils.data.DataLoader(Batches(), batch_size=None)))
    tensors["a"][0, 0] = 7
    tensors["b"][0][1] = 3
    assert batch["a"][0, 0] == 7
    assert batch["b"][0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(batch["b"][0].astype(np.float32), [1, 3, 1])
    np.testing.assert_array_equal(batch["b"][1], [1, 1, 1])


def test_torch_tensors_are_a_data_set(torch):
    stream = as_stream((torch.tensor(X), torch.tensor(Y)), batch_size=8, epochs=1)
    assert_same_batches(stream, [(X, Y)])


def test_torch_tensors_that_numpy_refuses_become_arrays(torch):
    x, y = torch.ones((8, 3), dtype=torch.bfloat16), torch.ones(8, requires_grad=True)
    for batch in next(as_stream((x, y), batch_size=8)), normalize((x, y)):
        inputs, targets = jax.tree.leaves(batch)
        assert (inputs.dtype, targets.dtype) == (jnp.bfloat16, np.float32)
        np.testing.assert_array_equal(inputs.astype(np.float32), np.ones((8, 3)))


@pytest.mark.parametrize(("n_delivered", "is_ahead"), diagonal([2, 10], [False, True]))
def test_a_seeded_torch_loader_resumes_by_skipping(torch, n_delivered, is_ahead, capsys):
    def make():
        generator = torch.Generator().manual_seed(5)
        loader = torch_loader(torch, shuffle=True, generator=generator)
        stream = as_stream(loader, epochs=3)
        return prefetch(stream) if is_ahead else stream

    first, second = make(), make()
    list(itertools.islice(first, n_delivered))
    next(second)  # A sample, as a loop takes one before it is resumed.
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert_same_batches(second, first)
    assert f"skipping {n_delivered - 1} batches of a DataLoader" in capsys.readouterr().err


def test_a_torch_dataset_that_is_no_loader_is_refused(torch):
    with pytest.raises(TypeError, match=r"torch dataset TensorDataset: wrap it, torch\.utils"):
        as_stream(torch_loader(torch).dataset)


def test_a_tensorflow_dataset_gives_arrays(tf):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    stream = as_stream(dataset, epochs=2)
    assert len(stream) == 7
    batches = list(stream)
    assert all(isinstance(array, np.ndarray) for batch in batches for array in batch)
    assert_same_batches(batches, [(X, Y), (X, Y)])
    assert_same_batches(one_pass(dataset), [(X, Y)])


def test_a_tensorflow_dataset_of_mappings_and_without_length_works_and_resumes(tf):
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(8).filter(lambda _: True)
    assert_same_batches(as_stream(dataset), [(X, Y)])
    first, second = (as_stream(dataset.shuffle(9, seed=1), epochs=3) for _ in range(2))
    list(itertools.islice(first, 10))
    next(second)
    second.set_state(first.get_state())
    assert_same_batches(second, first)


@pytest.fixture(params=["Dataset", "IterableDataset"])
def rows(datasets, request):
    dataset = datasets.Dataset.from_dict({"x": X, "y": Y})
    return dataset if request.param == "Dataset" else dataset.to_iterable_dataset()


def test_a_hugging_face_dataset_is_cut_into_batches(rows):
    batches = list(as_stream(rows, batch_size=8))
    assert [len(batch["x"]) for batch in batches] == [8] * 6 + [2]
    assert_same_batches(batches, [(X, Y)])
    whole = as_stream(rows, batch_size=8, drop_remainder=True)
    if hasattr(rows, "__len__"):
        assert (len(as_stream(rows, batch_size=8)), len(whole)) == (7, 6)
    assert [len(batch["x"]) for batch in whole] == [8] * 6


def test_each_epoch_of_a_hugging_face_dataset_has_its_own_order(rows):
    def read(seed):
        return examples(as_stream(rows, batch_size=8, shuffle=True, seed=seed, epochs=2))[1]

    targets = read(seed=3)
    np.testing.assert_array_equal(np.sort(targets[:50]), np.sort(Y))
    np.testing.assert_array_equal(np.sort(targets[50:]), np.sort(Y))
    assert not np.array_equal(targets[:50], targets[50:])
    np.testing.assert_array_equal(targets, read(seed=3))
    assert not np.array_equal(targets, read(seed=4))


@pytest.mark.parametrize(
    "other", [{"batch_size": 4}, {"seed": 4}, {"shuffle": False}, {"drop_remainder": True}], ids=str
)
def test_a_position_in_other_batches_of_a_hugging_face_dataset_is_refused(rows, other):
    options = {"batch_size": 8, "shuffle": True, "seed": 3}
    first = as_stream(rows, **options)
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    as_stream(rows, **options).set_state(state)
    (name, value), *_ = other.items()
    with pytest.raises(ValueError, match=rf"(?s)saved: .*'seed': 3.*here: .*'{name}': {value}"):
        as_stream(rows, **options | other).set_state(state)


def test_columns_and_transforms_chosen_in_hugging_face_are_kept(datasets):
    dataset = datasets.Dataset.from_dict({"x": X, "y": Y, "name": [str(y) for y in Y]})
    chosen = dataset.with_format("numpy", columns=["x", "y"])
    assert_same_batches(as_stream(chosen, batch_size=8), [(X, Y)])
    halved = dataset.with_transform(lambda rows: {"x": np.array(rows["x"]) / 2, "y": rows["y"]})
    batch = next(as_stream(halved, batch_size=8))
    np.testing.assert_array_equal(batch["x"], X[:8] / 2)


@pytest.mark.slow
def test_no_library_is_imported_for_data_or_models_of_another(run_child):
    code = """
import sys, flaxfit.modules, numpy as np
from flax import linen as nn
from flaxfit.data import as_stream, one_pass, prefetch
for data in (np.zeros(3), [np.zeros(3)], lambda: [np.zeros(3)], (x for x in [np.zeros(3)])):
    list(prefetch(one_pass(data)))
flaxfit.modules.train_and_eval(nn.Dense(1))
foreign = {"torch", "tensorflow", "grain", "datasets", "pandas", "flax.nnx"} & set(sys.modules)
sys.exit(f"imported {foreign}" if foreign else 0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_child([sys.executable, "-c", code], env=environment)
    assert done.returncode == 0, done.stderr

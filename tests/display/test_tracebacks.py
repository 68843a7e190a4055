"""Tracebacks: a worded error shows the user's frames and its sentence, and no others."""

import dataclasses
import doctest
import functools
import inspect
import os
import pickle
import string
import subprocess
import sys
import traceback

import numpy as np
import optax
import pytest
from flax import linen as nn

import flaxfit as ff
from flaxfit.display._tracebacks import show_one_line


@pytest.fixture(autouse=True)
def shortened(monkeypatch):
    monkeypatch.delenv("FLAXFIT_FULL_TRACEBACKS", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def names_in(error):
    """The functions of a traceback, from the one that called to the one that raised."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def files_in(error):
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def make_model(**options):
    return ff.Model(nn.Dense(1), optax.sgd(0.1), "mse", **options)


def mismatched_loop():
    task = ff.TrainTask(nn.Dense(1), optax.sgd(0.1), "mse", (np.ones((4, 2)), np.ones(4)))
    return ff.TrainLoop(nn.Dense(1), task, 0, stdout=False)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ff.Model(nn.Dense(1), "adam", "mse"), "Optax transformation"),
        (lambda: make_model().layers, "layers"),
        (lambda: make_model().nonsense, "nonsense"),  # pyright: ignore[reportAttributeAccessIssue]
        (lambda: make_model().fit(np.ones(2), **{"nb_epoch": 3}), "nb_epoch"),
        (lambda: next(mismatched_loop()), "of the same shape"),
        (lambda: ff.checkpoints.restore("nowhere"), "There is no checkpoint in .*nowhere"),
        (lambda: ff.checkpoints.load_weights("nowhere"), "No such file or directory: '.*nowhere'"),
        (lambda: ff.export.load("nowhere"), "No such file or directory: 'nowhere'"),
        (lambda: ff.importers.load("nowhere"), "No TensorFlow checkpoint at nowhere"),
        (lambda: ff.metrics.as_metrics(["acurracy"]), "Did you mean accuracy"),
        (lambda: ff.losses.mse(np.zeros(3), np.zeros((3, 1))), "Squeeze the targets"),
        (lambda: ff.losses.huber(delta=2.0)(np.zeros(3), np.zeros(4)), "Reshape one of them"),
        (lambda: ff.losses.resolve("entropy"), "There is no loss 'entropy'"),
        (lambda: ff.ArrayStream(3, batch_size=4), "x must be an array"),
    ],
)
def test_a_worded_error_shows_the_frames_of_the_caller_alone(call, sentence):
    with pytest.raises(Exception, match=sentence) as caught:
        call()
    assert names_in(caught.value)[1:] == ["<lambda>"]
    assert files_in(caught.value) == {__file__}


def test_a_function_is_pickled_documented_and_described_as_before():
    for each in ff.checkpoints.restore, ff.export.load, ff.losses.resolve:
        assert pickle.loads(pickle.dumps(each)) is each
        original = inspect.unwrap(each)
        assert original is not each and each.__doc__ == original.__doc__
        assert inspect.signature(each) == inspect.signature(original)


def test_an_error_of_the_user_keeps_the_frames_of_the_user():
    def broken():
        yield np.ones((2, 3), np.float32)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone") as caught:
        make_model().predict(broken())
    assert names_in(caught.value)[1:] == ["broken"]
    assert files_in(caught.value) == {__file__}


def test_an_error_that_flax_raises_in_a_model_does_too():
    class NoCompact(nn.Module):
        def __call__(self, x):
            return nn.Dense(1)(x)

    with pytest.raises(Exception, match="wrapped in `@compact`") as caught:
        ff.Model(NoCompact(), optax.sgd(0.1), "mse").fit(np.ones((4, 2)), np.ones(4), verbose=0)
    assert names_in(caught.value)[1:] == ["__call__"]
    assert "JAX_TRACEBACK" not in str(caught.value.__notes__)


def test_an_error_of_a_library_without_a_frame_of_the_user_keeps_all(monkeypatch):
    broken = functools.partial(string.Formatter().format, "{absent}")
    monkeypatch.setattr("flaxfit.model._model.check_arguments", broken)
    with pytest.raises(KeyError, match="absent") as caught:
        make_model().fit(np.ones((4, 2)), np.ones(4))
    assert any("flaxfit" in file for file in files_in(caught.value) - {__file__})
    assert not any(file.endswith("display/_tracebacks.py") for file in files_in(caught.value))


def test_the_cause_of_a_worded_error_keeps_the_frames_of_the_user():
    def apply(variables, x, **options):
        return float(x.sum()) * x

    with pytest.raises(TypeError, match="needs a concrete value") as caught:
        ff.Model((lambda rngs, x: {"params": 1.0}, apply)).predict(np.ones((2, 3)))
    cause = caught.value.__cause__
    assert cause is not None
    assert names_in(cause) == ["apply"] and "JAX_TRACEBACK" not in str(cause.__notes__)
    assert len(traceback.format_exception(caught.value)) < 13 and "\n" not in str(cause)


def test_causes_that_are_each_others_stay_so():
    def broken():
        yield np.ones((2, 3), np.float32)
        first, second = OSError("first"), KeyError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    with pytest.raises(OSError, match="first") as caught:
        make_model().predict(broken())
    assert names_in(caught.value)[1:] == ["broken"]


def test_an_error_that_cannot_be_changed_stays_itself():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    class Broken:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise Frozen(3)

    with pytest.raises(Frozen):
        next(iter(ff.data.as_stream(Broken())))


@pytest.mark.parametrize("name", ["FLAXFIT_FULL_TRACEBACKS", "JAX_TRACEBACK_FILTERING"])
def test_a_variable_of_the_environment_shows_all_frames(monkeypatch, name):
    monkeypatch.setenv(name, "1" if name.startswith("FLAXFIT") else "off")
    with pytest.raises(TypeError, match="Optax transformation") as caught:
        ff.Model(nn.Dense(1), "adam", "mse")
    assert len(names_in(caught.value)) > 3


def test_methods_keep_their_signatures_their_source_and_their_examples():
    assert list(inspect.signature(ff.Model.fit).parameters)[:3] == ["self", "x", "y"]
    assert "check_arguments" in inspect.getsource(ff.Model.fit)
    module = sys.modules["flaxfit.loop._train_loop"]
    found = {each.name for each in doctest.DocTestFinder().find(module) if each.examples}
    assert "flaxfit.loop._train_loop.TrainLoop.next_step" in found


def test_an_interrupt_that_nobody_catches_is_one_line(capsys):
    for is_shown in False, True:
        error = KeyboardInterrupt()
        show_one_line(error, "interrupted at step 3", is_shown=is_shown)
        assert str(error) == "interrupted at step 3"
        sys.excepthook(KeyboardInterrupt, error, None)
        line = [] if is_shown else ["flaxfit  interrupted at step 3"]
        assert capsys.readouterr().err.splitlines() == line
        assert error._render_traceback_() == line  # pyright: ignore[reportAttributeAccessIssue]
    sys.excepthook(KeyError, KeyError("mine"), None)
    assert capsys.readouterr().err == "KeyError: 'mine'\n"


@pytest.mark.slow
def test_a_script_ends_with_the_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, optax\nimport flaxfit as ff\nfrom flax import linen as nn\n"
        "model = ff.Model(nn.Dense(3), optax.sgd(0.1), 'crossentropy')\n"
        "model.fit(np.ones((8, 2)), np.full(8, 3), verbose=0)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=False
    )
    assert run.stderr.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 5, in <module>',
        "    model.fit(np.ones((8, 2)), np.full(8, 3), verbose=0)",
        "ValueError: label 3 is out of range for 3 outputs (labels must be 0..2). Out of "
        "range: 8 of 8 labels.",
    ]

"""What is said of a compilation: the first one, another, and what has changed since the first."""

import re

import jax
import numpy as np
import pytest

import flaxfit as ff
from flaxfit.data._batch import Batch
from flaxfit.loop._consistency import Consistency
from flaxfit.loop._padding import PreparedBatch
from flaxfit.loop._programs import Programs

STRATEGY = ff.DataParallel(jax.devices()[:1])


def prepared_of(batch, **options):
    return PreparedBatch(STRATEGY, batch, False, len(batch.inputs[0]), "a signature", **options)


def batch_of(n, width=2, dtype=np.float32):
    return Batch((np.zeros((n, width), dtype),), (np.zeros(n, np.float32),))


@pytest.fixture
def said():
    return []


@pytest.fixture
def steps(said):
    return Programs(said.append)


def compile_for(steps, prepared):
    with steps.compiling(Consistency(STRATEGY), prepared, 0):
        program = print
    steps.compiled[len(steps.compiled)] = program


def test_the_first_compilation_is_announced_with_its_time(steps, said):
    compile_for(steps, prepared_of(batch_of(8)))
    compiling, compiled = said
    assert compiling == "compiling…"
    assert re.fullmatch(r"compiled the training step in [0-9.]+ ?m?s", compiled)


def test_a_second_compilation_names_the_shapes_of_both(steps, said):
    compile_for(steps, prepared_of(batch_of(8)))
    compile_for(steps, prepared_of(batch_of(5)))
    compile_for(steps, prepared_of(batch_of(8)))
    assert "step again in" in said[3] and "for batches of (5, 2), (5,) on" in said[3]
    assert said[3].endswith("(the first were of (8, 2), (8,))")
    assert re.fullmatch(r"compiled the training step again in [0-9.]+ ?m?s", said[5])


def test_dtypes_are_named_where_they_alone_have_changed(steps, said):
    compile_for(steps, prepared_of(batch_of(8)))
    compile_for(steps, prepared_of(batch_of(8, dtype=np.int32)))
    assert "(8, 2), (8,) of int32, float32 on" in said[3]
    assert said[3].endswith("(the first were of float32, float32)")


def test_shapes_of_data_on_the_devices_are_those_of_the_batches(steps, said):
    rows = Batch((np.arange(4),), ())
    compile_for(steps, prepared_of(batch_of(8)))
    compile_for(steps, prepared_of(rows, data=(batch_of(64, width=3),)))
    assert "for batches of (4, 3), (4,) on" in said[3]


def test_after_all_was_forgotten_nothing_is_compiled_again(steps, said):
    compile_for(steps, prepared_of(batch_of(8)))
    steps.forget()
    compile_for(steps, prepared_of(batch_of(5)))
    assert steps.watch.seconds > 0 and "again" not in said[3]


def test_a_compilation_that_fails_is_not_announced(steps, said):
    consistency, prepared = Consistency(STRATEGY), prepared_of(batch_of(8))
    with pytest.raises(MemoryError), steps.compiling(consistency, prepared, 0):
        raise MemoryError
    assert said == ["compiling…"] and not steps.watch.is_running

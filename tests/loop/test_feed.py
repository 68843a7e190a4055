"""The data of a TrainLoop: its forms, its end, and other data in the middle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import X, assert_equal, make_weight_loop
from marks import slow, thorough

import flaxfit as ff

Y = 2 * X
loop_of = functools.partial(make_weight_loop, n_steps=None, devices=jax.devices()[:1])


def test_finite_data_ends_with_a_last_checkpoint_and_named_errors_after():
    data = [(X[:16], Y[:16])] * 6
    loop = loop_of(data=data, n_steps=100, n_steps_per_checkpoint=4)
    assert [(c.step, c.n_completed_steps) for c in loop] == [(1, 1), (5, 4), (6, 1)]
    assert list(loop) == []
    for method in (loop.next_step, loop.next_checkpoint):
        with pytest.raises(ff.EndOfData, match="ended after step 6"):
            method()


def test_data_that_ends_on_the_grid_gives_no_second_checkpoint():
    loop = loop_of(data=[(X[:16], Y[:16])] * 5, n_steps_per_checkpoint=4)
    assert [c.step for c in loop] == [1, 5]


def test_other_data_can_be_trained_on_next():
    loop = loop_of(data=[(X[:16], Y[:16])] * 2)
    assert [c.step for c in loop] == [1, 2]
    loop.data = [(X[16:32], Y[16:32])] * 2
    assert [c.step for c in loop] == [3, 4]


@pytest.mark.parametrize(
    ("at", "ends"),
    [(0, False), thorough(1, False), thorough(1, True), thorough(3, False), (3, True)],
)
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_data_that_is_set_while_a_batch_is_read_is_gone_on_with(at, ends, steps_per_call):
    other = [(X[16:32], Y[16:32])] * 2

    def batches():
        for i in range(5):
            if i == at:
                loop.data = other
                if ends:
                    return
            yield X[:16], Y[:16]

    options = {"n_steps_per_checkpoint": 9, "first_checkpoint": 9, "steps_per_call": steps_per_call}
    loop = loop_of(data=[(X[:16], Y[:16])], **options)
    loop.data = batches()
    *_, last = loop
    before = at - at % steps_per_call  # What was read along with it is not stepped, either.
    assert last.step == before + len(other)


def test_the_batch_that_was_peeked_at_is_trained_on():
    seen = []

    def batches():
        for i in range(3):
            seen.append(i)
            yield X[i * 16 : i * 16 + 16], Y[i * 16 : i * 16 + 16]

    loop = loop_of(data=batches())
    assert seen == [0]
    *_, last = loop
    expected = loop_of(data=[(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)])
    *_, other = expected
    assert last.step == 3
    assert_equal(last.state.params, other.state.params)


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="no batches|is empty"):
        loop_of(data=[])


def test_a_stream_that_broke_is_not_taken_for_its_end():
    def batches():
        yield X[:16], Y[:16]
        raise OSError("disk gone")

    loop = loop_of(data=batches())
    assert next(loop).step == 1
    with pytest.raises(OSError, match="disk gone"):
        next(loop)
    with pytest.raises(RuntimeError, match="disk gone"):
        next(loop)


@pytest.mark.parametrize(
    "form", [thorough("list"), "dict", slow("weights"), thorough("named"), slow("jax")]
)
def test_batches_come_in_many_forms(form):
    x, y = X[:16], Y[:16]
    forms = {
        "list": [x, y],
        "dict": {"x": x, "y": y},
        "weights": (x, y, np.ones(16, np.float32)),
        "named": ({"x": x}, y),
        "jax": (jnp.asarray(x), jnp.asarray(y)),
    }
    expected = loop_of(data=[(x, y)]).next_step()
    checkpoint = loop_of(data=[forms[form]]).next_step()
    assert checkpoint.loss == pytest.approx(expected.loss, rel=1e-6)


def test_a_change_of_shape_is_announced_and_of_structure_refused(capsys):
    data = [(X[:8], Y[:8]), (X[:16], Y[:16]), ((X[:16], X[:16]), Y[:16])]
    loop = loop_of(data=data, stdout=True)
    assert [next(loop).step, next(loop).step] == [1, 2]
    assert "compiled the training step again" in capsys.readouterr().err
    with pytest.raises(ValueError) as caught:
        next(loop)
    assert "another structure than the first one" in str(caught.value)
    first, now = (str(X[:8].shape), str(Y[:8].shape)), f"(({X[:16].shape}, {X[:16].shape})"
    assert f"\n  first inputs ({first[0]},), targets ({first[1]},)" in str(caught.value)
    assert "\n  now   inputs ((" in str(caught.value) and now[1:-1] in str(caught.value)

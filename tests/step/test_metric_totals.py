"""Totals: sums that do not lose small numbers beside large ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.step._metric_totals import add, compute, pack, reader, unpacker, zero_totals

SUMS = {"loss": (np.float32(0.1), np.float32(1)), "counts": np.ones((2, 3), np.int32)}


def test_a_total_grows_beyond_what_float32_can_count():
    sums = {"n": np.float32(1)}
    totals = {"float32": jnp.array([[2.0**24], [0.0]])}
    step = jax.jit(add)
    for _ in range(5):
        totals = step(totals, sums)
    assert reader(sums)(totals)["n"] == 2.0**24 + 5
    assert float(jnp.float32(2**24) + 1) == 2.0**24  # What a plain sum does.


def test_many_small_numbers_add_up_exactly():
    values = np.random.default_rng(0).uniform(size=10_000).astype(np.float32)

    @jax.jit
    def run(values):
        zeros = jax.tree.map(jnp.asarray, zero_totals({"x": np.float32(0)}))
        return jax.lax.scan(lambda t, x: (add(t, {"x": x}), None), zeros, values)[0]

    total = reader({"x": np.float32(0)})(run(values))["x"]
    assert total == pytest.approx(values.astype(np.float64).sum(), rel=1e-12)


def test_totals_keep_structure_shape_and_integers():
    totals = zero_totals(SUMS)
    for _ in range(3):
        totals = add(totals, SUMS)
    result = reader(SUMS)(totals)
    np.testing.assert_array_equal(result["counts"], np.full((2, 3), 3))
    assert result["counts"].dtype == np.int32
    assert result["loss"][0] == pytest.approx(0.3, rel=1e-7)


def test_infinite_sums_stay_infinite():
    sums = {"x": np.float32(np.inf)}
    totals = add(add(zero_totals(sums), sums), {"x": np.float32(1)})
    assert reader(sums)(totals)["x"] == np.inf


def test_what_was_packed_is_unpacked():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": [jnp.int32(7), jnp.ones(2)]}
    vectors = pack(tree)
    assert {dtype: v.shape for dtype, v in vectors.items()} == {"float32": (8,), "int32": (1,)}
    jax.tree.map(np.testing.assert_array_equal, unpacker(tree)(vectors), tree)


def test_the_sums_of_a_count_are_not_divided():
    found = compute({"loss": (2.0, 4.0), "skipped_steps": (3.0,)}, {})
    assert found == {"loss": 0.5, "skipped_steps": 3.0}


def test_the_loss_of_nothing_is_0_unless_steps_were_skipped():
    nothing = (np.float64(0), np.float64(0))
    outputs = {"a": nothing, "b": nothing}
    for loss in (nothing, outputs):
        assert compute({"loss": loss}, {}) == {"loss": 0.0}
        assert np.isnan(compute({"loss": loss, "skipped_steps": (2.0,)}, {})["loss"])
        assert compute({"loss": loss, "skipped_steps": (0.0,)}, {})["loss"] == 0
    assert np.isnan(compute({"loss": (np.float64(np.nan), 0.0)}, {})["loss"])
    assert np.isnan(compute({"grad_norm": nothing}, {})["grad_norm"])

import jax
import numpy as np
import pytest

from flaxfit.export import InputSpec, batch_specs
from flaxfit.export._spec import as_specs, random_inputs, shape_structs, two_sizes


def test_64_bits_are_narrowed():
    assert InputSpec((3,), "float64").dtype == np.float32
    assert InputSpec((3,), np.int64).dtype == np.int32


@pytest.mark.parametrize("shape", ["batch, 3", (None, 3), 3, (2.5,)])
def test_a_shape_that_is_no_tuple_of_sizes_and_names_is_refused(shape):
    with pytest.raises(ValueError, match="tuple of sizes and of names.*got"):
        InputSpec(shape)


def test_a_name_is_the_same_size_in_every_input():
    first, second = shape_structs((InputSpec(("b", 3)), InputSpec(("b", "2*t"))))
    assert first.shape[0] == second.shape[0]
    assert str(second.shape[1]) == "2*t"


def test_what_jax_cannot_read_is_refused():
    with pytest.raises(ValueError, match="b//2"):
        shape_structs((InputSpec(("b//2",)),))
    with pytest.raises(ValueError, match="Constraint"):
        shape_structs((InputSpec(("b",), constraints=("b > 2",)),))


def test_arrays_stand_for_their_fixed_shapes():
    specs = as_specs({"x": np.zeros((2, 3)), "y": InputSpec(("b",))})
    assert specs["x"] == InputSpec((2, 3))
    assert specs["y"] == InputSpec(("b",))


def test_what_is_no_spec_is_refused():
    with pytest.raises(TypeError, match="InputSpec.*got str: 'float32'"):
        as_specs((InputSpec((1,)), "float32"))


@pytest.mark.parametrize(
    ("shape", "constraints", "sizes"),
    [
        (("b",), (), [{"b": 1}, {"b": 5}]),
        (("b",), ("b >= 2",), [{"b": 2}, {"b": 5}]),
        (("b",), ("mod(b, 8) == 0",), [{"b": 8}]),
        (("b", "t"), ("b == 2*t",), [{"b": 2, "t": 1}, {"b": 10, "t": 5}]),
        (("b - 2",), (), [{"b": 3}, {"b": 5}]),
        (("b",), ("b <= 3",), [{"b": 1}]),
        (("b^2", "max(b, 4)"), (), [{"b": 1}, {"b": 5}]),
        (("b",), ("b >= 1000",), []),
    ],
)
def test_two_sizes_meet_the_constraints(shape, constraints, sizes):
    found = two_sizes((InputSpec(shape, constraints=constraints),))
    if constraints == ("b == 2*t",):
        assert found and all(s["b"] == 2 * s["t"] for s in found)
    else:
        assert found == sizes


def test_random_inputs_fit_their_specs():
    specs = {"x": InputSpec(("b", "2*t"), "bfloat16"), "ids": InputSpec(("b",), "int32")}
    inputs = random_inputs(specs, {"b": 3, "t": 2})
    shapes = jax.tree.map(lambda a: (a.shape, str(a.dtype)), inputs)
    assert shapes == {"x": ((3, 4), "bfloat16"), "ids": ((3,), "int32")}
    assert set(inputs["ids"]) <= {0, 1}


def test_the_specs_of_a_batch_leave_its_size_open():
    specs = batch_specs({"x": np.zeros((8, 2, 2)), "n": np.zeros(8, np.int32)})
    assert specs == {"x": InputSpec(("batch", 2, 2)), "n": InputSpec(("batch",), "int32")}

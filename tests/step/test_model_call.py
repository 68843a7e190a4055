"""The outputs of a model, and which of them belong to examples."""

import jax.numpy as jnp
import numpy as np
import pytest

from flaxfit.data._batch import Batch
from flaxfit.step._model_call import as_outputs, which_have_rows


@pytest.mark.parametrize("n", [2, 4])
def test_outputs_with_an_axis_of_examples_are_those_that_grow(n):
    def outputs_of(batch):
        (x,) = batch.inputs
        # As many prototypes as there are examples in one of the batches.
        return {"z": x @ jnp.ones((3, 2)), "scale": jnp.ones(()), "prototypes": jnp.ones((4, 3))}

    (found,) = which_have_rows(outputs_of, Batch((np.ones((n, 3), np.float32),)))
    assert found == {"z": True, "scale": False, "prototypes": False}


def test_a_model_without_outputs_is_told_to_return_some():
    assert as_outputs(1) == (1,)
    with pytest.raises(TypeError, match="needs a `return` of the outputs"):
        as_outputs(None)

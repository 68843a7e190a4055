"""Checks the weights returned by a loss, a metric or an objective."""

import jax
import jax.numpy as jnp

from flaxfit.step._jaxpr import depends_on
from flaxfit.tree import Array, Function, PyTree, tangents


def check_own_weights(owner: str, function: Function, outputs: PyTree, targets: PyTree) -> None:
    """Checks that the weights returned by a function do not depend on the model's outputs.

    Two losses in a tuple look like values and weights, but the second one depends on the outputs.

    The check is exact: it traces the derivative of the weights along any change of the outputs, and
    asks whether the jaxpr depends on this change. `function` maps `(*outputs, *targets)` to values,
    or to a tuple of values and weights; `owner` is its name in the message.
    """
    if jax.config.jax_disable_jit:  # In debug mode, user code is not traced.
        return
    leaves, structure = jax.tree.flatten(outputs)

    def slope(leaves: list[Array], targets: PyTree, directions: list[Array]) -> PyTree:
        def weights(leaves: list[Array]) -> PyTree:
            found = function(*structure.unflatten(leaves), *targets)
            own = found[1] if isinstance(found, tuple) and len(found) > 1 else ()
            return jax.tree.map(lambda x: jnp.asarray(x, float), own)

        along = tangents(lambda _, direction: direction, leaves, directions)
        return jax.jvp(weights, (leaves,), (along,))[1]

    program = jax.make_jaxpr(slope)(leaves, targets, leaves)
    if depends_on(program, len(jax.tree.leaves((leaves, targets)))):
        raise ValueError(
            f"The second array that {owner} returned is taken for weights, but it depends on the "
            "outputs of the model. Add the losses of several outputs, and pass metrics one by "
            "one. To use weights that depend on the outputs, hold them fixed with "
            "jax.lax.stop_gradient."
        )

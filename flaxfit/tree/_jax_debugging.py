"""Explains the errors that JAX's debugging flags raise in programs compiled ahead of time."""

import contextlib
from collections.abc import Iterator

import jax

_DEBUG_MODE = (
    "Use the debug mode, which runs steps operation by operation on one device: "
    "Model(..., run_eagerly=True), TrainLoop(..., debug=True) or "
    "EvalLoop(..., strategy=flaxfit.strategies.Eager())."
)


def check_jit() -> None:
    """Checks that `jax.disable_jit` is off, so that programs can be compiled."""
    if jax.config.jax_disable_jit:
        raise RuntimeError(
            "Cannot compile a step under jax.disable_jit(): steps are compiled ahead. "
            f"{_DEBUG_MODE}"
        )


@contextlib.contextmanager
def debugging_explained() -> Iterator[None]:
    """Explains errors in a `with` block by `explain_debugging`."""
    try:
        yield
    except Exception as error:
        explain_debugging(error)
        raise


def explain_debugging(error: Exception) -> None:
    """Raises a clearer error if `jax.disable_jit`, `jax_debug_nans` or `..._infs` is the cause."""
    if "Disable jit is not supported" in str(error):
        raise RuntimeError(
            f"Cannot run a compiled step under jax.disable_jit(). {_DEBUG_MODE}"
        ) from error
    if type(error).__name__ == "InternalFloatingPointError":  # A private class of JAX.
        raise FloatingPointError(
            f"A compiled step found {error.args[-1]} (jax_debug_nans or jax_debug_infs is on), and "
            f"cannot tell where. {_DEBUG_MODE} It raises the error at the operation."
        ) from error

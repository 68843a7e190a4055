"""A check that a function of a model was given, and no module."""

import sys
from typing import Any


def check_is_function(owner: str, given: Any, name: str, *, train: bool = True) -> None:
    """Checks that no module was given in place of its `init` or `apply`.

    >>> check_is_function("TrainTask", len, "apply")

    Args:
      owner: what takes the function.
      given: the function.
      name: "init" or "apply".
      train: whether it is the function of training that is needed.

    Raises:
      TypeError: it says how to get the function.
    """
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    if _is_nnx(given):
        advice = (
            f"pass {name} of `init, apply = flaxfit.modules.from_nnx(module, train={train})`, "
            "or give the module to Model(module, ...)"
        )
    elif hasattr(given, name):
        advice = f"pass module.{name}"
    else:
        return
    article = "an" if name[0] in "ai" else "a"
    raise TypeError(f"{owner} needs {article} {name} function, got a module, {kind}: {advice}.")


def _is_nnx(given: Any) -> bool:
    # A user of nnx has imported it; nobody else should pay for its import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(given, nnx.Module) or (
        isinstance(given, type) and issubclass(given, nnx.Module)
    )

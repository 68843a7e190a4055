"""WarmStart: an `init` that gives weights read from somewhere, instead of random ones."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from flaxfit import checkpoints
from flaxfit._rules import label
from flaxfit.optim._freeze import check_matches, merge


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A linen-style `init` whose variables go through a function that puts weights in.

    >>> warm = WarmStart(lambda rngs, x: {"params": {"w": 0.0}}, lambda v: {"params": {"w": 2.0}})
    >>> warm({}, 1.0)
    {'params': {'w': 2.0}}
    """

    fresh: Callable[..., Any]
    """The `init` of the model, which says what variables there are."""
    load: Callable[[Any], Any]
    """Puts weights into variables."""
    gives_weights: bool = True
    """Not to be traced: the weights would be constants of a program."""

    def __call__(self, rngs: Any, *inputs: Any, **named: Any) -> Any:
        """The variables with the weights in them."""
        variables = dict(self.fresh(rngs, *inputs, **named))
        for name in ("intermediates", "losses"):
            variables.pop(name, None)
        return self.load(variables)


def put_weights(
    path: str | os.PathLike[str],
    target: Any,
    *,
    partial: str | Sequence[str] | None = None,
    translator: Any = None,
) -> Any:
    """The target with the weights of a file in it.

    Args:
      path: a file of `save_weights`, or anything that `importers.load` reads.
      target: variables, or a state.
      partial: patterns of the paths to take over; None: all.
      translator: the rules that make the target's names of the file's.

    Raises:
      ValueError: they do not fit; every difference is listed.
    """
    if translator is None and os.fspath(path).endswith(".safetensors"):
        return checkpoints.load_weights(path, target, partial=partial)
    from flaxfit import importers  # Not before it is used: `import flaxfit` stays quick.

    is_state = hasattr(target, "params")
    params = target.params if is_state else target["params"]
    source = importers.load(path)
    if partial is None:
        filled = importers.fill(params, source, translator=translator)
    else:
        patterns = [partial] if isinstance(partial, str) else list(partial)
        for pattern in patterns:
            check_matches("partial", pattern, params)
        is_taken = label([(pattern, True) for pattern in patterns], params, False)
        taken = jax.tree.map(lambda take, x: x if take else optax.MaskedNode(), is_taken, params)
        filled = importers.fill(taken, source, translator=translator, strict=False)
        filled = merge(filled, params)
    return target.replace(params=filled) if is_state else {**target, "params": filled}

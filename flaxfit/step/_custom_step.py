"""A user's training step, as `(state, batch) -> (state, sums)`."""

from collections.abc import Callable, Container, Mapping

import jax.numpy as jnp

from flaxfit.data._batch import Batch
from flaxfit.state import TrainState
from flaxfit.tree import Function, PyTree, Sums


def make_own_step(
    step: Function, metrics: Container[str]
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Sums]]]:
    """Wraps a user's step as `(state, batch) -> (state, sums)`.

    It increments the step counter, whether or not the user's function does. A plain number that
    belongs to no metric becomes a sum of weight 1: its mean over the steps is reported.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Sums]]:
        result = step(state, batch)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not hasattr(result[0], "params") or not isinstance(result[1], Mapping):
            kinds = [type(part).__name__ for part in (result if is_pair else (result,))]
            raise TypeError(
                f"The step of the task returned {' and '.join(kinds)}; expected (state, sums): a "
                "TrainState, and numbers by the names of metrics."
            )
        updated, given = result
        sums = {
            name: sums if name in metrics else _sum_of(name, sums) for name, sums in given.items()
        }
        return updated.replace(step=state.step + 1), sums

    return train_step


def _sum_of(name: str, value: PyTree) -> Sums:
    parts = tuple(value) if isinstance(value, list | tuple) else (value, 1.0)
    if not 1 <= len(parts) <= 2 or any(jnp.ndim(part) for part in parts):
        raise TypeError(
            f"The step of the task returned {value!r:.80} for {name!r}; expected a number, which "
            "is averaged over the steps, or a pair (sum, weight) of numbers."
        )
    return tuple(jnp.asarray(part, jnp.float32) for part in parts)

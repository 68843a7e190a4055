"""Update: the training step as it runs, with its sums added up, compiled once per batch shape."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from flaxfit import _totals
from flaxfit._step import make_train_step


def make_update(
    task: Any, *, axis_name: str | None, n_steps: int = 1, grad_norm: bool, keep_grads: bool
) -> Callable[..., Any]:
    """Makes `(state, totals, batch) -> (state, totals, (step, grads))`.

    With several steps, the leaves of `batch` carry one batch per step as their first axis.
    The step that comes back is a token: waiting for it waits for the update.
    """
    step = make_train_step(task, axis_name=axis_name, grad_norm=grad_norm, keep_grads=True)

    def update(state: Any, totals: Any, batch: Any) -> Any:
        state, (sums, grads) = step(state, batch)
        return state, _totals.add(totals, sums), (state.step, grads if keep_grads else None)

    def update_many(state: Any, totals: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            state, totals, (_, grads) = update(*carry, batch)
            return (state, totals), grads

        (state, totals), grads = jax.lax.scan(body, (state, totals), batches)
        return state, totals, (state.step, jax.tree.map(lambda g: g[-1], grads))

    return update if n_steps == 1 else update_many


class Compiled:
    """Executables of functions, one per strategy and batch shape, and the time spent on them."""

    def __init__(self) -> None:
        self._executables: dict[Hashable, Callable[..., Any]] = {}
        self.seconds = 0.0

    def __call__(
        self,
        key: Hashable,
        compile: Callable[..., Any],
        make: Callable[[], Callable[..., Any]],
        arguments: tuple[Any, ...],
        **options: Any,
    ) -> Callable[..., Any]:
        """The executable stored under `key`, compiled at the first call."""
        executable = self._executables.get(key)
        if executable is None:
            start = time.perf_counter()
            executable = self._executables[key] = compile(make(), arguments, **options)
            self.seconds += time.perf_counter() - start
        return executable

    def __len__(self) -> int:
        return len(self._executables)

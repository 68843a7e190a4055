"""Checkpoint: the record that a training loop yields."""

import dataclasses
import html
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxfit._rules import flat
from flaxfit._state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What happened up to a step, and everything needed to go on from there.

    Its arrays are unreplicated copies: they stay valid however far training goes on.
    A dataclass, not a tuple, so that `redex.combinator.serial` passes it on whole.

    >>> Checkpoint(step=3, state=None, metrics={"loss": 0.5}).loss
    0.5
    """

    step: int
    """How many updates were done since the very first."""
    state: TrainState
    """The training state after that step."""
    metrics: Mapping[str, float]
    """Means over the examples since the previous checkpoint, and what callbacks added."""
    n_completed_steps: int = 0
    """How many updates were done since the previous checkpoint."""
    n_examples: int = 0
    """How many examples were trained on since the previous checkpoint."""
    elapsed_time: float = 0.0
    """Seconds of training since the previous checkpoint, compilation excluded."""
    compile_time: float = 0.0
    """Seconds of compilation since the previous checkpoint."""
    data_state: Any = None
    """The position of the data stream, where it can tell; JSON-able."""
    stop: bool = False
    """Set by a callback to end the loop after this checkpoint."""
    running: Any = None
    """What else the loop needs to go on exactly, such as counts between two checkpoints; JSON."""
    last_grads: Any = None
    """The gradients of the last step; see `grads`."""

    def replace(self, **changes: Any) -> "Checkpoint":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_metrics(self, metrics: Mapping[str, float], prefix: str = "") -> "Checkpoint":
        """A copy with metrics added, their names prefixed."""
        added = {f"{prefix}{name}": value for name, value in metrics.items()}
        return self.replace(metrics={**self.metrics, **added})

    @property
    def scalars(self) -> dict[str, float]:
        """The metrics that are single numbers: all but confusion matrices and the like."""
        return {name: value for name, value in self.metrics.items() if np.ndim(value) == 0}

    @property
    def loss(self) -> float:
        """The example-weighted mean loss since the previous checkpoint.

        Raises:
          KeyError: there is none, as a step of the user's own reports what it likes.
        """
        if "loss" not in self.metrics:
            raise KeyError(
                f"This checkpoint has no metric 'loss'; it has {', '.join(self.metrics) or 'none'}."
                " A step of your own reports one if it returns it: (state, {'loss': value})."
            )
        return self.metrics["loss"]

    @property
    def model_params(self) -> Any:
        """The model's parameters."""
        return self.state.params

    @property
    def model_state(self) -> Any:
        """The model's other collections, such as `batch_stats`."""
        return self.state.model_state

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state."""
        return self.state.opt_state

    @property
    def grads(self) -> Any:
        """The averaged gradients of the last step, with `TrainLoop(keep_grads=True)`."""
        if self.last_grads is None:
            raise ValueError(
                "This checkpoint holds no gradients: build the loop with keep_grads=True "
                "(metrics['grad_norm'] holds their norm in any case)."
            )
        return self.last_grads

    def __repr__(self) -> str:
        parts = [f"step={self.step}"]
        parts += [f"{name}={value:.4g}" for name, value in self.scalars.items()]
        if self.elapsed_time and self.n_completed_steps:
            parts.append(f"{self.n_completed_steps / self.elapsed_time:,.0f} steps/s")
        if self.state is not None:
            n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(self.state.params))
            parts.append(f"{n_params:,} params")
        return f"Checkpoint({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """The facts, the metrics and the parameters as a notebook shows them, without scripts."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>"
            for name, value in self.scalars.items()
        )
        params = {} if self.state is None else flat(self.state.params)
        leaves = "".join(
            f"<tr><td>{html.escape(path)}</td><td>{leaf.dtype}{list(leaf.shape)}</td></tr>"
            for path, leaf in params.items()
        )
        n_params = sum(math.prod(leaf.shape) for leaf in params.values())
        return (
            f"<b>Checkpoint</b> at step {self.step:,}, {self.n_completed_steps:,} steps in "
            f"{self.elapsed_time:.2f} s<table>{rows}</table>"
            f"<details><summary>{n_params:,} parameters</summary><table>{leaves}</table></details>"
        )

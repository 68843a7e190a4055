"""Tasks whose parameters are frozen and unfrozen during a run, and their record in a file."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from flaxfit.optim import _extended
from flaxfit.optim._extended import generations_of
from flaxfit.optim._generations import Generations, to_json
from flaxfit.task._task import TrainTask
from flaxfit.tree import Json, Params, flat


def with_generations(task: TrainTask, generations: Generations) -> TrainTask:
    """Returns a task whose optimizer knows the parameters unfrozen after the first update."""
    if generations == generations_of(task.optimizer):
        return task
    return dataclasses.replace(
        task, optimizer=_extended.with_generations(task.optimizer, generations)
    )


def frozen_as(task: TrainTask, other: TrainTask) -> TrainTask:
    """Returns a task with the frozen parameters of another one."""
    if task.freeze != other.freeze:
        task = dataclasses.replace(task, freeze=other.freeze)
    return with_generations(task, generations_of(other.optimizer))


def frozen_as_saved(task: TrainTask, running: Mapping[str, Any] | None) -> TrainTask:
    """Returns a task with the frozen parameters of a saved run, if they are recorded."""
    if not running or "frozen" not in running:
        return task
    return dataclasses.replace(task, freeze=tuple(map(re.escape, running["frozen"])))


def frozen_facts(task: TrainTask, params: Callable[[], Params]) -> dict[str, Json]:
    """Returns, for a file, which parameters are frozen, and which were unfrozen during the run."""
    structure = jax.tree.structure(params()) if task.freeze else None
    frozen = list(_matching(tuple(task.freeze), structure)) if task.freeze else []
    generations = generations_of(task.optimizer)
    return {"frozen": frozen} | ({"late": to_json(generations)} if generations else {})


@functools.lru_cache(maxsize=8)
def _matching(patterns: tuple[str, ...], structure: Any) -> tuple[str, ...]:
    """Returns the matching paths of a parameter structure; cached, since checkpoints need them."""
    paths = flat(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return tuple(path for path in paths if any(re.fullmatch(each, path) for each in patterns))

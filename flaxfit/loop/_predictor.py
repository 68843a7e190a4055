"""Predictor: the outputs of a model over a data set, in order, as NumPy arrays."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import numpy as np

from flaxfit.data._batch import Batch, has_rows, n_examples, normalize
from flaxfit.loop._assembly import Loaded
from flaxfit.loop._division import MIXES, Division
from flaxfit.loop._feed import feed_of_pass
from flaxfit.loop._padding import Portion, may_be_whole
from flaxfit.loop._programs import Programs
from flaxfit.loop._state_layout import StateLayout
from flaxfit.step._error_messages import calls_explained, tracers_explained
from flaxfit.step._eval_step import evaluated, make_predict_step
from flaxfit.step._passes import MODEL
from flaxfit.step._trial import Pass
from flaxfit.step._validate import streams_explained, trace
from flaxfit.strategies import Strategy
from flaxfit.task._task import EvalTask
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._jax_debugging import debugging_explained
from flaxfit.tree._paths import flat
from flaxfit.tree._shapes import structure_of
from flaxfit.tree._types import Data, Function, PyTree

# While these are computed and copied, others are prepared; no more of them wait on the devices.
_BATCHES_IN_FLIGHT = 4

_ENDLESS = "Give the number of batches, steps=, or data that ends."


class Predictor:
    """Applies the model of an evaluation task to the batches of a data set."""

    def __init__(self, task: EvalTask):
        self.task = task
        self._make = functools.partial(
            make_predict_step, task.apply, precision=task.precision, rngs=task.rngs
        )
        self.programs = Programs()

    @debugging_explained()
    @without_mesh()
    def __call__(
        self,
        state: PyTree,
        data: Data,
        strategy: Strategy,
        *,
        n_steps: int | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> PyTree:
        """Returns the outputs of the model as NumPy arrays, one row per example.

        Args:
          state: a state with the parameters to use.
          data: anything that `as_stream` takes.
          strategy: where arrays live.
          n_steps: the number of batches to predict; None: all of one pass.
          watch: a function of the number of predicted batches, called after each of them.

        Raises:
          ValueError: the data holds no batches, or the outputs of its batches have different
            shapes.
        """
        found, outputs = self.over(state, data, strategy, n_steps=n_steps), []
        while (each := found.take()) is not None:
            outputs.append(each[1])
            if watch is not None:
                watch(len(outputs))
        if not outputs:
            raise ValueError("There is nothing to predict: the data holds no batches.")
        return _joined(outputs)

    def over(
        self, state: PyTree, data: Data, strategy: Strategy, *, n_steps: int | None = None
    ) -> "Predictions":
        """Returns an iterator over the batches and their outputs; the arguments are as above."""
        return Predictions(self, state, data, strategy, n_steps)

    def check(self, strategy: Strategy, state: PyTree, batch: Batch, *, may_pad: bool) -> str:
        """Validates the model on a batch; returns why padding, if it may be needed, is unsafe.

        Raises:
          ValueError: it combines rows, and would see a part of them, or returns no row for each
            example.
        """
        key, found = (structure_of((state, batch.inputs)), strategy, may_pad), self.programs.found
        if key not in found:
            with (
                calls_explained(batch.inputs),
                tracers_explained(),
                streams_explained("Model(..., eval_rngs=...)", self.task.rngs),
            ):
                traced = trace(strategy.bind(self._make()), state, batch)
            _check_rows(traced.shapes, n_examples(batch) if has_rows(batch) else None)
            division, mixed = Division(strategy, self._pass), ""
            if division.text or may_pad:
                mixed, changed = division.find(state, batch, ())
                division.check(changed)
            found[key] = MIXES if mixed else ""
        return found[key]

    def _pass(self, state: PyTree, batch: Batch, states: PyTree, seed: PyTree) -> Pass:
        position = (seed,) if self.task.rngs else ()
        return Pass({MODEL: self._make()(state, batch, *position)})

    def compile(
        self, layout: StateLayout, portion: Portion, arguments: tuple[PyTree, ...]
    ) -> Function:
        """Compiles `(leaves, *position, arrays of the inputs) -> outputs` for such batches."""
        strategy, structure = portion.strategy, jax.tree.structure(portion.batch.inputs)
        step = self._make(axis_name=strategy.axis_name, virtual_replicas=strategy.virtual_replicas)

        def predict(leaves: PyTree, *positioned: PyTree) -> PyTree:
            *position, arrays = positioned
            return step(layout.unflatten(leaves), Batch(structure.unflatten(arrays)), *position)

        return strategy.compile_split(predict, arguments)


class Predictions(Iterator[tuple[Batch, Any]]):
    """Iterates over the batches of one pass and the outputs of the model for them, unpadded.

    A few batches are read ahead of the one that is returned.
    """

    def __init__(
        self, predictor: Predictor, state: PyTree, data: Data, strategy: Strategy, n: int | None
    ):
        task = predictor.task
        self._feed = feed_of_pass(
            data,
            n,
            strategy,
            task.roles.inputs_of,
            is_whole=may_be_whole(task, strategy),
            endless=_ENDLESS,
        )
        self._strategy = strategy
        self._predictor = predictor
        self._loaded = enumerate(itertools.islice(self._feed, n))
        owner = f"Predictor(rngs={task.rngs})"
        self._state = strategy.share(evaluated(state, task.rngs, owner))
        self._shapes = repr(structure_of(self._state))  # A text, since a text keeps its hash.
        self._layout = StateLayout(self._state)
        self._leaves = self._layout.flatten(self._state)
        self._in_flight: deque[tuple[PyTree, Strategy, PyTree, int | None]] = deque()

    def __iter__(self) -> Self:
        return self

    @debugging_explained()
    @without_mesh()
    def _next(self) -> tuple[Batch, PyTree] | None:
        found = self.take()
        return None if found is None else (self._batch(found[0]), found[1])

    def __next__(self) -> tuple[Batch, PyTree]:
        found = self._next()
        if found is None:
            raise StopIteration
        return found

    def take(self) -> tuple[PyTree, PyTree] | None:
        """Returns the next item of the data and its outputs; None at the end."""
        if not self._feed.is_decided and (first := self._feed.first()) is not None:
            self._decide(first)
        while len(self._in_flight) <= _BATCHES_IN_FLIGHT:
            numbered = next(self._loaded, None)
            if numbered is None:
                break
            number, (item, loaded) = numbered
            self._dispatch(number, item, loaded)
        if not self._in_flight:
            return None
        item, strategy, output, n = self._in_flight.popleft()
        rows = strategy.join(output)
        return item, rows if n is None else self._feed.without_padding(rows, n)

    def _dispatch(self, number: int, item: PyTree, loaded: Loaded) -> None:
        portion, strategy, leaves = loaded.portion, loaded.portion.strategy, self._leaves
        if strategy is not self._strategy:  # Fewer devices hold what cannot be divided by all.
            leaves = self._layout.flatten(strategy.share(self._state))
        position = (np.uint32(number),) if self._predictor.task.rngs else ()
        n_inputs = jax.tree.structure(portion.batch.inputs).num_leaves
        arguments = (leaves, *position, loaded.arrays[:n_inputs])
        key, programs = (strategy, portion.signature, self._shapes), self._predictor.programs
        program = programs.compiled.get(key)
        if program is None:
            self._predictor.check(strategy, self._state, portion.batch, may_pad=False)
            program = self._predictor.compile(self._layout, portion, arguments)
            programs.compiled[key] = program
        n = portion.n_examples if has_rows(portion.batch) else None
        self._in_flight.append((item, strategy, program(*arguments), n))

    def _decide(self, first: PyTree) -> None:
        """Validates the model on the first batch, which decides how all are padded or split."""
        task, feed = self._predictor.task, self._feed
        batch, may_pad = feed.begin(first), feed.may_pad
        feed.decide("")
        batch = feed.padded(batch)._replace(targets=(), weights=None)
        why_not = self._predictor.check(self._strategy, self._state, batch, may_pad=may_pad)
        # Rows that only the loss combines (`across`) do not depend on one another here.
        if not task.pad and task.across is None:
            why_not = why_not or "the task has pad=False"
        feed.decide(why_not)

    def _batch(self, item: PyTree) -> Batch:
        """Returns the batch of an item, with the targets and weights that it has."""
        item, roles = self._feed.cursor.examples(item), self._predictor.task.roles
        try:
            item = roles(item)
        except ValueError:  # Its columns of targets are missing, as they may be.
            item = roles.inputs_of(item)
        return normalize(item, is_whole=self._feed.is_whole)


def _check_rows(outputs: PyTree, n: int | None) -> None:
    """Checks that predictions have a row for each of `n` examples; None: that they have rows."""
    for path, leaf in flat(outputs).items():
        if leaf.shape[:1] != (n,) and (n is not None or not leaf.shape):
            size = "any number of" if n is None else n
            raise ValueError(
                f"predict joins the rows of batches, and output {path or 0} has shape {leaf.shape} "
                f"for a batch of {size} examples. Return one row per example, or apply the module "
                "itself: module.apply(model.state.variables, x)."
            )


def _joined(outputs: list[PyTree]) -> PyTree:
    """Concatenates the outputs of batches.

    Raises:
      ValueError: they differ in more than the number of their rows.
    """
    first = _shape_of_rows(outputs[0])
    other = next((each for each in outputs if _shape_of_rows(each) != first), None)
    if other is not None:
        shapes = [jax.tree.map(np.shape, each) for each in (outputs[0], other)]
        raise ValueError(
            "Cannot join the outputs of all batches: those of the first batch have the shapes "
            f"{shapes[0]}, those of another one {shapes[1]}. Pad the inputs to one length, or read "
            "them batch by batch: for batch, outputs in model.predictions(x)."
        )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


def _shape_of_rows(outputs: PyTree) -> object:
    leaves, structure = jax.tree.flatten(outputs)
    return structure, [np.shape(leaf)[1:] for leaf in leaves]

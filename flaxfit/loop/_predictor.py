"""Predictor: applies a model to a data set, in order, and returns NumPy arrays."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np

from flaxfit.data._batch import Batch, has_rows, n_examples, normalize
from flaxfit.loop._assembly import Loaded
from flaxfit.loop._division import MIXES, Division
from flaxfit.loop._feed import Feed, feed_of_pass
from flaxfit.loop._padding import PreparedBatch
from flaxfit.loop._programs import Programs
from flaxfit.loop._state_layout import StateLayout
from flaxfit.step import (
    Pass,
    by_output,
    calls_explained,
    evaluated,
    make_predict_step,
    streams_explained,
    trace,
    tracers_explained,
)
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask
from flaxfit.tree import (
    Data,
    Function,
    PyTree,
    debugging_explained,
    flat,
    structure_of,
    without_mesh,
)

# Enough to overlap computation, copies to the host and preparation; bounds device memory.
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
        outputs = []
        for _, rows in self._begin(state, data, strategy, n_steps, as_views=True)[1]:
            outputs.append(rows)
            if watch is not None:
                watch(len(outputs))
        if not outputs:
            raise ValueError("There is nothing to predict: the data holds no batches.")
        return _joined(outputs)

    def over(
        self, state: PyTree, data: Data, strategy: Strategy, *, n_steps: int | None = None
    ) -> Iterator[tuple[Batch, PyTree]]:
        """Iterates over batches and their outputs; the arguments are as in `__call__`."""
        # No views: the user may write to the data between two batches.
        feed, results = self._begin(state, data, strategy, n_steps, as_views=False)

        @debugging_explained()
        @without_mesh()
        def take() -> tuple[Batch, PyTree] | None:
            found = next(results, None)
            return None if found is None else (self._batch(feed, found[0]), found[1])

        return iter(take, None)

    def _batch(self, feed: Feed, item: PyTree) -> Batch:
        """Returns the batch of an item, with its targets and weights if it has any."""
        item, roles = feed.cursor.examples(item), self.task.roles
        try:
            item = roles(item)
        except ValueError:  # Prediction needs no targets, so their columns may be missing.
            item = roles.inputs_of(item)
        return normalize(item, is_whole=feed.is_whole)

    def _begin(
        self, state: PyTree, data: Data, strategy: Strategy, n_steps: int | None, *, as_views: bool
    ) -> tuple[Feed, Iterator[tuple[PyTree, PyTree]]]:
        """Returns the feed of one pass, and an iterator over items and outputs."""
        task = self.task
        feed = feed_of_pass(data, n_steps, task, strategy, task.roles.inputs_of, endless=_ENDLESS)
        state = strategy.share(evaluated(state, task.rngs, f"Predictor(rngs={task.rngs})"))
        batches = itertools.islice(feed.batches(as_views=as_views), n_steps)
        return feed, self._results(feed, batches, state, strategy)

    def _results(
        self,
        feed: Feed,
        batches: Iterator[tuple[PyTree, Loaded]],
        state: PyTree,
        strategy: Strategy,
    ) -> Iterator[tuple[PyTree, PyTree]]:
        """Yields items and their outputs without padding; runs a few batches ahead."""
        first = feed.first()
        if not first:
            return
        self._decide(feed, state, strategy, first[0])
        layout, shapes = StateLayout(state), structure_of(state)
        leaves = layout.flatten(state)
        latest = program = n_cut = None
        n_inputs, in_flight = 0, deque[tuple[PyTree, Strategy, PyTree, int | None]]()

        def finish() -> tuple[PyTree, PyTree]:
            item, strategy, output, n_cut = in_flight.popleft()
            rows = strategy.join(output)
            return item, rows if n_cut is None else feed.without_padding(rows, n_cut)

        for number, (item, loaded) in enumerate(batches):
            prepared, batch = loaded.prepared, loaded.prepared.batch
            if prepared is not latest:  # Batches with a cached plan share one object.
                latest = prepared
                if prepared.strategy is not strategy:  # A remainder may run on fewer devices.
                    strategy = prepared.strategy
                    leaves = layout.flatten(strategy.share(state))
                program = self.programs.compiled.get((strategy, prepared.signature, shapes))
                n_inputs = jax.tree.structure(batch.inputs).num_leaves
                may_cut = strategy.n_processes > 1 or n_examples(batch) != prepared.n_examples
                n_cut = prepared.n_examples if may_cut and has_rows(batch) else None
            position = (np.uint32(number),) if self.task.rngs else ()
            arguments = (leaves, *position, loaded.arrays[:n_inputs])
            if program is None:
                self.check(strategy, state, batch, may_pad=False)
                program = self._compile(layout, prepared, arguments)
                self.programs.compiled[strategy, prepared.signature, shapes] = program
            in_flight.append((item, strategy, program(*arguments), n_cut))
            if len(in_flight) > _BATCHES_IN_FLIGHT:
                yield finish()
        while in_flight:
            yield finish()

    def _decide(self, feed: Feed, state: PyTree, strategy: Strategy, first: PyTree) -> None:
        """Validates the model on the first batch, and decides how all batches are padded."""
        batch, may_pad = feed.begin(first), feed.may_pad
        feed.decide("")
        padded = feed.padded(batch)

        def why_not(batch: Batch) -> str:
            batch = batch._replace(targets=(), weights=None)
            found = self.check(strategy, state, batch, may_pad=may_pad)
            # With `across`, only the loss combines rows, and prediction computes no loss.
            if not self.task.pad and self.task.across is None:
                return found or "the task has pad=False"
            return found

        feed.decide(why_not(padded), why_not)

    def check(self, strategy: Strategy, state: PyTree, batch: Batch, *, may_pad: bool) -> str:
        """Validates the model on a batch; returns why padding is unsafe, or "".

        Raises:
          ValueError: the model mixes rows of a divided batch, or its outputs are not one row per
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
        return Pass(by_output((self._make()(state, batch, *position),)))

    def _compile(
        self, layout: StateLayout, prepared: PreparedBatch, arguments: tuple[PyTree, ...]
    ) -> Function:
        """Compiles `(leaves, *position, input arrays) -> outputs` for a signature."""
        strategy, structure = prepared.strategy, jax.tree.structure(prepared.batch.inputs)
        step = self._make(axis_name=strategy.axis_name, virtual_replicas=strategy.virtual_replicas)

        def predict(leaves: PyTree, *positioned: PyTree) -> PyTree:
            *position, arrays = positioned
            return step(layout.unflatten(leaves), Batch(structure.unflatten(arrays)), *position)

        return strategy.compile_split(predict, arguments)


def _check_rows(outputs: PyTree, n: int | None) -> None:
    """Checks that outputs have one row for each of `n` examples; None: any number of rows."""
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
      ValueError: they differ in more than the number of rows.
    """
    first = _shape_of_rows(outputs[0])
    other = next((each for each in outputs if _shape_of_rows(each) != first), None)
    if other is not None:
        shapes = [jax.tree.map(np.shape, each) for each in (outputs[0], other)]
        raise ValueError(
            f"Cannot join the outputs of all batches: the first batch has outputs of shapes "
            f"{shapes[0]}, another one {shapes[1]}. Pad the inputs to one length, or read the "
            "outputs batch by batch: for batch, outputs in model.predictions(x)."
        )
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)


def _shape_of_rows(outputs: PyTree) -> object:
    leaves, structure = jax.tree.flatten(outputs)
    return structure, [np.shape(leaf)[1:] for leaf in leaves]

"""Predictor: the outputs of a model over a data set, in order, as NumPy arrays."""

import functools
from collections import deque
from collections.abc import Hashable

import jax
import numpy as np

from flaxfit.data import one_pass
from flaxfit.data._batch import Batch, has_rows, n_examples
from flaxfit.data._stream import pass_length
from flaxfit.loop._local_rows import LocalBatches
from flaxfit.loop._padding import Padder, may_be_whole
from flaxfit.step._error_messages import calls_explained
from flaxfit.step._eval_step import evaluated, make_predict_step
from flaxfit.step._validate import check_rows, streams_explained, structure_of, trace
from flaxfit.strategies import Strategy
from flaxfit.task._task import EvalTask
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._jax_debugging import debugging_explained
from flaxfit.tree._types import Data, Function, PyTree

# While these are computed and copied, others are prepared; no more of them wait on the devices.
_BATCHES_IN_FLIGHT = 4


class Predictor:
    """Applies the model of an evaluation task to the batches of a data set."""

    def __init__(self, task: EvalTask):
        self._rngs = task.rngs
        self._task = task
        self._make = functools.partial(
            make_predict_step, task.apply, precision=task.precision, rngs=task.rngs
        )
        self._programs: dict[Hashable, Function] = {}

    @debugging_explained()
    @without_mesh()
    def __call__(self, state: PyTree, data: Data, strategy: Strategy) -> PyTree:
        """Returns the outputs of the model as NumPy arrays, one row per example."""
        stream = one_pass(data)
        pass_length(stream, "Give data that ends.")
        is_whole = may_be_whole(self._task, strategy)
        form = self._task.roles.inputs_of
        batches = LocalBatches(stream, strategy, form, is_whole=is_whole)
        feed = Padder(
            strategy,
            pad=True,
            size=batches.batch_size,
            is_own=batches.is_own,
            is_whole=is_whole,
        )
        state = strategy.share(evaluated(state, self._rngs, f"Predictor(rngs={self._rngs})"))
        shapes = structure_of(state)
        outputs: list[PyTree] = []
        in_flight: deque[tuple[Strategy, PyTree, int | None]] = deque()

        def fetch() -> None:
            own, output, n = in_flight.popleft()
            rows = own.join(output)
            outputs.append(rows if n is None else batches.without_padding(rows, n))

        for n, item in enumerate(batches):
            portion, batch, *_ = batches.load(item, feed)
            position = (np.uint32(n),) if self._rngs else ()
            arguments = (state, *position, batch._replace(targets=(), weights=None))
            own, key = portion.strategy, (portion.strategy, portion.signature, shapes)
            if key not in self._programs:
                self._programs[key] = self._compile(own, portion.batch, arguments)
            n_rows = portion.n_examples if has_rows(portion.batch) else None
            in_flight.append((own, self._programs[key](*arguments), n_rows))
            if len(in_flight) > _BATCHES_IN_FLIGHT:
                fetch()
        while in_flight:
            fetch()
        if not outputs:
            raise ValueError("There is nothing to predict: the data holds no batches.")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)

    def _compile(self, strategy: Strategy, batch: Batch, arguments: tuple[PyTree, ...]) -> Function:
        with (
            calls_explained(batch.inputs),
            streams_explained("Model(..., eval_rngs=...)", self._rngs),
        ):
            result = trace(strategy.bind(self._make()), arguments[0], batch).shapes
        check_rows(result, n_examples(batch) if has_rows(batch) else None)
        step = self._make(axis_name=strategy.axis_name, virtual_replicas=strategy.virtual_replicas)

        def predict(state: PyTree, *positioned: PyTree) -> PyTree:
            *position, batch = positioned
            return step(state, batch, *position)

        return strategy.compile_split(predict, arguments)

"""Predictor: the outputs of a model over a data set, in order, as NumPy arrays."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flaxfit.data import one_pass
from flaxfit.data._batch import n_examples
from flaxfit.data._stream import pass_length
from flaxfit.loop._local_rows import LocalBatches
from flaxfit.loop._padding import Padder
from flaxfit.step._error_messages import calls_explained
from flaxfit.step._train_step import evaluated, make_predict_step
from flaxfit.step._validate import check_rows, streams_explained, structure_of, trace
from flaxfit.strategies import Strategy
from flaxfit.tree._jax_debugging import debugging_explained
from flaxfit.tree._types import Data, Function, PyTree

# While these are computed and copied, others are prepared; no more of them wait on the devices.
_BATCHES_IN_FLIGHT = 4


class Predictor:
    """Applies a model to the batches of a data set; each shape of them is compiled once.

    >>> from flaxfit import DataParallel, InferenceState
    >>> predict = Predictor(lambda variables, x: variables["params"] * x)
    >>> predict(InferenceState(np.int32(0), np.float32(2), {}), [np.arange(3.0)], DataParallel())
    array([0., 2., 4.], dtype=float32)

    Args:
      apply: `(variables, *inputs) -> outputs`.
      precision: as of a `TrainTask`.
      rngs: the random streams to supply, as of an `EvalTask`.
    """

    def __init__(self, apply: Function, *, precision: Any = None, rngs: Sequence[str] = ()):
        self._apply = apply
        self._precision = precision
        self._rngs = tuple(rngs)
        self._executables: dict[Any, Function] = {}

    @debugging_explained()
    def __call__(self, state: PyTree, data: Data, strategy: Strategy) -> Any:
        """The outputs with a state, one row per example.

        Raises:
          ValueError: the data holds no batches, or the outputs are not one row per example.
        """
        stream = one_pass(data)
        pass_length(stream, "Give data that ends.")
        batches = LocalBatches(stream, strategy)
        feed = Padder(strategy, pad=True, size=batches.batch_size, is_own=batches.is_own)
        state = strategy.share(evaluated(state, self._rngs, f"Predictor(rngs={self._rngs})"))
        shapes = structure_of(state)
        outputs: list[Any] = []
        in_flight: deque[tuple[Strategy, Any, int]] = deque()

        def fetch() -> None:
            own, output, n = in_flight.popleft()
            outputs.append(batches.without_padding(own.join(output), n))

        for n, item in enumerate(batches):
            position = (np.uint32(n),) if self._rngs else ()
            portion, batch, *_ = batches.load(item, feed)
            own = portion.strategy
            arguments = (state, *position, batch._replace(targets=(), weights=None))
            key = (own, portion.signature, shapes)
            if key not in self._executables:
                self._executables[key] = self._compile(own, portion.batch, arguments)
            in_flight.append((own, self._executables[key](*arguments), portion.n_examples))
            if len(in_flight) > _BATCHES_IN_FLIGHT:
                fetch()
        while in_flight:
            fetch()
        if not outputs:
            raise ValueError("There is nothing to predict: the data holds no batches.")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)

    def _compile(
        self, strategy: Strategy, batch: PyTree, arguments: tuple[PyTree, ...]
    ) -> Function:
        make = functools.partial(
            make_predict_step, self._apply, precision=self._precision, rngs=self._rngs
        )
        with (
            calls_explained(batch.inputs),
            streams_explained("Model(..., eval_rngs=...)", self._rngs),
        ):
            result = trace(strategy.bind(make()), arguments[0], batch).shapes
        check_rows(result, n_examples(batch))
        step = make(
            axis_name=strategy.axis_name,
            virtual_replicas=strategy.virtual_replicas,
        )

        def predict(state: PyTree, *positioned: PyTree) -> Any:
            *position, batch = positioned
            return step(state, batch, *position)

        return strategy.compile_split(predict, arguments)

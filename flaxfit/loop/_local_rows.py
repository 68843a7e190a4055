"""The rows of a global batch that belong to this process."""

from collections.abc import Callable

import jax

from flaxfit.data._batch import n_examples, normalize
from flaxfit.data._sample_weights import times
from flaxfit.data._stream import is_shared
from flaxfit.distributed import process_count
from flaxfit.loop._padding import PreparedBatch, signature_of
from flaxfit.strategies import Strategy
from flaxfit.tree import Data, PyTree


def knows_rows(stream: Data) -> bool:
    """Returns whether processes divide a stream's batches by row number (an `ArrayStream`'s).

    Other streams yield only this process's rows.
    """
    return process_count() > 1 and hasattr(stream, "next_rows")


def check_divided(stream: Data, strategy: Strategy) -> None:
    """Raises if a stream may yield the same rows in all processes."""
    if strategy.n_processes > 1 and is_shared(stream):
        name = getattr(stream, "name", type(stream).__name__)
        raise ValueError(
            f"Cannot divide the batches of a {name} among {strategy.n_processes} processes: all "
            "of them would compute with the same rows. Pass arrays or an ArrayStream, which "
            "flaxfit divides. Or divide the data yourself: pass a Grain DataLoader with "
            "shard_options=grain.sharding.ShardByJaxProcess(), or wrap an iterable that yields "
            "other rows in each process: flaxfit.data.as_stream(data, shared=False)."
        )


def local_rows(prepared: PreparedBatch) -> PreparedBatch:
    """Selects the rows of a padded batch that belong to the devices of this process."""
    if prepared.strategy.n_processes == 1:
        return prepared
    rows = prepared.strategy.rows(n_examples(prepared.batch))
    batch = jax.tree.map(lambda x: x[rows], prepared.batch)
    signature = signature_of(prepared.strategy, batch, prepared.is_weighted)
    return prepared._replace(batch=batch, signature=signature)


def local_examples(prepared: PreparedBatch, pick: Callable[[PyTree], PyTree]) -> PreparedBatch:
    """Selects the examples of this process, given a batch of row numbers for all processes."""
    own = local_rows(prepared)
    (rows,) = own.batch.inputs
    batch = normalize(pick(rows))
    has_weights = batch.weights is not None
    if own.batch.weights is not None:
        batch = batch._replace(weights=times(batch.weights, own.batch.weights))
    signature = signature_of(own.strategy, batch, has_weights)
    return own._replace(batch=batch, is_weighted=has_weights, signature=signature)

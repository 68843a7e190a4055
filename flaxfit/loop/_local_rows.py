"""The rows of each batch that belong to this process."""

from collections.abc import Callable

import jax

from flaxfit.data._batch import n_examples, normalize
from flaxfit.data._sample_weights import times
from flaxfit.data._stream import is_shared
from flaxfit.distributed import process_count
from flaxfit.loop._padding import Portion, signature_of
from flaxfit.strategies import Strategy
from flaxfit.tree import Data, PyTree


def knows_rows(stream: Data) -> bool:
    """Whether several processes divide each batch of a stream by row numbers, as in `ArrayStream`.

    Other streams give each process its own share of each batch.
    """
    return process_count() > 1 and hasattr(stream, "next_rows")


def check_divided(stream: Data, strategy: Strategy) -> None:
    """Raises if a stream may give all processes of a strategy the same rows."""
    if strategy.n_processes > 1 and is_shared(stream):
        name = getattr(stream, "name", type(stream).__name__)
        raise ValueError(
            f"Cannot divide the batches of a {name} among {strategy.n_processes} processes, all of "
            "which would compute with the same rows. Pass arrays or an ArrayStream, which flaxfit "
            "divides. Or divide the data yourself: pass a Grain DataLoader with "
            "shard_options=grain.sharding.ShardByJaxProcess(), or any iterable "
            "that yields other rows in each process as "
            "flaxfit.data.as_stream(data, shared=False)."
        )


def local_rows(portion: Portion) -> Portion:
    """Returns the rows of a padded portion that belong to the devices of this process."""
    if portion.strategy.n_processes == 1:
        return portion
    rows = portion.strategy.rows(n_examples(portion.batch))
    batch = jax.tree.map(lambda x: x[rows], portion.batch)
    signature = signature_of(portion.strategy, batch, portion.is_weighted)
    return portion._replace(batch=batch, signature=signature)


def local_examples(portion: Portion, pick: Callable[[PyTree], PyTree]) -> Portion:
    """Returns the examples of this process, from a portion with the row numbers of all."""
    own = local_rows(portion)
    (rows,) = own.batch.inputs
    batch = normalize(pick(rows))
    has_weights = batch.weights is not None
    if own.batch.weights is not None:
        batch = batch._replace(weights=times(batch.weights, own.batch.weights))
    signature = signature_of(own.strategy, batch, has_weights)
    return own._replace(batch=batch, is_weighted=has_weights, signature=signature)

"""Metric classes of clu and metrax as a `Metric`: states of single examples, weighted and added."""

import inspect
from typing import Any, TypeGuard, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric, ratio, weighted, weights_of
from flaxfit.tree import Array, ArrayLike, Function, PyTree, Sums


def is_metric_class(metric: object) -> TypeGuard[type[Any]]:
    """Returns whether this is a class with `from_model_output`, `merge` and `compute`."""
    protocol = ("from_model_output", "merge", "compute")
    return isinstance(metric, type) and all(hasattr(metric, name) for name in protocol)


def is_collection_class(metrics: object) -> TypeGuard[type[Any]]:
    """Returns whether this is a class of several metric classes, like clu's `Collection`."""
    protocol = ("single_from_model_output", "merge", "compute")
    return isinstance(metrics, type) and all(hasattr(metrics, name) for name in protocol)


def members_of(collection_class: type) -> dict[str, type]:
    """Returns the metric classes of a collection by name, without the mean of the loss."""
    hints = get_type_hints(collection_class)
    members = {name: member for name, member in hints.items() if not name.startswith("_")}
    if "loss" in members and _reads_loss(members["loss"]):
        del members["loss"]  # The loop reports it by that name.
    return members


def _reads_loss(metric_class: type[Any]) -> bool:
    """Returns whether it reads the model output "loss", like `Average.from_output("loss")`."""
    try:
        metric_class.from_model_output()
    except KeyError as error:
        return error.args == ("loss",)
    except Exception:
        return False
    return False


def from_metric_class(metric_class: type[Any]) -> Metric:
    """Makes a `Metric` of a class whose states merge by addition.

    The class is called with one example at a time, so that weights and padding work without its
    support, and the value does not depend on the batches. It is also called with each whole batch:
    that call raises the class's own errors, and a different value for it is an error. It gets the
    outputs and the targets by position, or as `logits` and `labels` if it has these parameters.
    """
    name = metric_class.__name__

    def measure(*arguments: PyTree, weights: Array | None = None) -> Sums:
        call = caller_of(metric_class, arguments)
        arguments = jax.tree.map(jnp.asarray, arguments)
        one_row_each = jax.tree.map(lambda array: array[:, None], arguments)
        # A number of rows that no other axis has: else wrong shapes could match by accident.
        n = 1 + max(max(leaf.shape) for leaf in jax.tree.leaves(arguments))
        longer = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), arguments
        )
        try:
            jax.eval_shape(call, *longer)
            whole, states = call(*arguments), jax.vmap(call)(*one_row_each)
        except jax.errors.JAXTypeError as error:
            raise cannot_use(name, "it computes outside of JAX") from error
        except KeyError as error:
            why = f"it asks for the model output {error}, and flaxfit passes logits and labels"
            raise cannot_use(name, why) from error
        first = jax.tree.map(lambda leaf: leaf[0], states)
        kept = _kept_leaves(first, name)
        n_examples = len(jax.tree.leaves(states)[0])

        def merged(weights: Array | None) -> PyTree:
            by_example = weights_of(jnp.zeros(n_examples), weights)
            added = jax.tree.map(
                lambda leaf: weighted(leaf, weights_of(leaf, by_example)).sum(0), states
            )
            return jax.tree.map(lambda keep, a, b: a if keep else b, kept, first, added)

        sizes = jax.tree.map(lambda leaf: 1e-4 * jnp.abs(leaf).sum(0), states)
        differs = ~_are_same(whole, merged(None), sizes)
        return {"state": merged(weights), "n_sums": jnp.ones((), int), "differ": differs * 1}

    def compute(sums: Sums) -> ArrayLike:
        if sums["differ"]:
            why = "of a batch it gives another value than of its examples one by one"
            raise cannot_use(name, f"{why}: it compares them, or broadcasts the shapes")
        kept = _kept_leaves(sums["state"], name)
        state = jax.tree.map(
            lambda keep, leaf: _mean_of(leaf, sums["n_sums"]) if keep else leaf, kept, sums["state"]
        )
        with np.errstate(all="ignore"):
            value = np.asarray(state.compute())
        return value if value.ndim else value.item()

    return Metric(measure, compute, name)


def _are_same(one: PyTree, other: PyTree, sizes: PyTree) -> jax.Array:
    """Returns whether two states, or their values, are equal up to rounding."""

    def close(a: ArrayLike, b: ArrayLike, atol: ArrayLike) -> jax.Array:
        return jnp.isclose(a * 1.0, b * 1.0, 1e-4, atol, equal_nan=True).all()

    same = jnp.array(jax.tree.leaves(jax.tree.map(close, one, other, sizes))).all()
    try:
        return same | close(one.compute(), other.compute(), 1e-6)
    except Exception:  # Some compute only on the host, which fails in many ways here.
        return same


def caller_of(metric_class: type[Any], arguments: tuple[PyTree, ...]) -> Function:
    """Returns `from_model_output` of a class as a function of positional arguments."""
    make = metric_class.from_model_output
    parameters = inspect.signature(make).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    by_name = any(p.kind is p.VAR_KEYWORD for p in parameters) and not required
    if by_name or any(p.kind is p.KEYWORD_ONLY for p in required):
        wanted = {p.name for p in required}
        if len(arguments) == 2 and wanted <= {"logits", "labels"}:
            return lambda logits, labels: make(logits=logits, labels=labels)
    elif len(required) == len(arguments):
        return make
    raise cannot_use(
        metric_class.__name__,
        f"from_model_output{inspect.signature(make)} does not fit the {len(arguments)} outputs "
        "and targets",
    )


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _kept_leaves(state: PyTree, name: str) -> PyTree:
    """Returns which leaves `merge` keeps (True) or adds (False), by trying two numbers."""
    leaves, structure = jax.tree.flatten(state)
    # Merge in both orders: a leaf that takes the maximum or minimum neither keeps nor adds.
    low, high = (
        [np.full(np.shape(leaf), number, jnp.result_type(leaf)) for leaf in leaves]
        for number in (3, 50)
    )
    with jax.ensure_compile_time_eval():
        try:
            up = structure.unflatten(low).merge(structure.unflatten(high))
            down = structure.unflatten(high).merge(structure.unflatten(low))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise cannot_use(name, f"its merge() failed ({error})") from error
    does_add = jax.tree.structure(up) == jax.tree.structure(down) == structure
    kept = []
    for a, b, ab, ba in zip(low, high, jax.tree.leaves(up), jax.tree.leaves(down), strict=False):
        keeps = np.array_equal(ab, a) and np.array_equal(ba, b)
        adds = np.array_equal(ab, a + b) and np.array_equal(ba, a + b)
        does_add = does_add and (keeps or adds)
        kept.append(keeps)
    if not does_add:
        raise cannot_use(name, "its merge() does not add the two states")
    return structure.unflatten(kept)


def _mean_of(leaf: ArrayLike, n_sums: ArrayLike) -> np.ndarray:
    """Returns a constant, in its own dtype, from the sum of its copies."""
    constant = np.asarray(ratio(leaf, n_sums))
    return constant.astype(np.asarray(leaf).dtype)


def cannot_use(name: str, why: str) -> ValueError:
    """Returns the error for a metric class that cannot be computed exactly from sums."""
    return ValueError(
        f"Cannot use the metric class {name}: {why}. Pass a Metric(measure, compute), or bring the "
        "arguments into its form with flaxfit.metrics.on(arguments, metric). Or compute it on the "
        "host, of all outputs at once: flaxfit.metrics.collected(lambda outputs, targets: "
        f"{name}.from_model_output(...).compute())."
    )

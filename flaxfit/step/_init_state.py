"""init_state: initializes a model and its optimizer in one compiled call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flaxfit.data._batch import call
from flaxfit.modules._switch import as_init
from flaxfit.state import TrainState, as_key, at_start
from flaxfit.step._error_messages import calls_explained, tracers_explained
from flaxfit.tree import ArrayLike, Function, PyTree, Variables, put, single_replica_of_any_axis


def init_state(
    init: Function,
    optimizer: Any,
    key: ArrayLike,
    inputs: PyTree,
    *,
    collections: Sequence[str] = ("params", "dropout"),
    shardings: PyTree = None,
) -> TrainState:
    """Initializes a model and its optimizer in one jitted call.

    >>> import optax
    >>> init = lambda rngs, x: {"params": jnp.ones(x.shape[1])}
    >>> init_state(init, optax.adam(0.1), 0, (jnp.ones((2, 3)),)).params.shape
    (3,)

    Args:
      init: a Linen or NNX module, or a function `init(rngs, *inputs) -> variables`.
      optimizer: an Optax transformation.
      key: a random key or an integer seed.
      inputs: the model's input, or a tuple or a dict of keyword inputs: arrays or
        `jax.ShapeDtypeStruct`s; only shapes and dtypes matter.
      collections: the random streams to pass to `init`.
      shardings: where to create the state: a pytree of `jax.sharding.Sharding`s (or one for all),
        or a function from the abstract state to one. No array is ever whole on one device, except
        weights that `init` holds.

    Returns:
      The state at step 0. Boxes of logical axis names are removed; the names are its `axes`.

    Raises:
      TypeError: `init` is neither a module nor a function.
    """
    init = as_init("init_state", init)
    if not callable(init):
        raise TypeError(
            "init_state needs a module or a function init(rngs, *inputs) -> variables, got "
            f"{type(init).__name__}: {init!r:.60}"
        )
    key = as_key(key)
    inputs = (inputs,) if hasattr(inputs, "shape") else inputs
    # 64-bit inputs become 32-bit without a warning, as in batches.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), inputs
    )

    def create(key: jax.Array) -> TrainState:
        init_key, train_key = jax.random.split(key)
        keys = jax.random.split(init_key, len(collections))
        rngs = dict(zip(collections, keys, strict=True))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        with calls_explained(zeros), tracers_explained():
            variables = call(single_replica_of_any_axis(init), rngs, zeros)
        return at_start(optimizer, variables, train_key)

    # An `init` that holds weights is not traced: they would become constants of the program. If it
    # can initialize without them (`fresh`), `load` then reads them into their shardings.
    if _gives_weights(init):
        given: Any = init
        fresh = getattr(given, "fresh", given)
        if shardings is not None and not _gives_weights(fresh):
            state = init_state(
                fresh, optimizer, key, inputs, collections=collections, shardings=shardings
            )
            return _with_weights(state, given.load(state.variables), optimizer)
        state = create(key)
        if shardings is None:
            return state
        shardings = shardings(state) if callable(shardings) else shardings
        return jax.tree.map(_put_part, shardings, state)  # A prefix tree: one may serve many.
    if callable(shardings):
        shardings = shardings(jax.eval_shape(create, key))
    # Within another trace it cannot be compiled ahead: it becomes a part of that program.
    is_traced = isinstance(jax.device_put(np.zeros(())), Tracer)
    if is_traced or jax.config.jax_disable_jit:
        return jax.jit(create, out_shardings=shardings)(key)
    return jax.jit(create, out_shardings=shardings).lower(key).compile(_compiler_options())(key)


def _gives_weights(init: Function) -> bool:
    return getattr(init, "gives_weights", False)


def _with_weights(state: TrainState, variables: Variables, optimizer: Any) -> TrainState:
    """Replaces the variables of a state, and reinitializes the optimizer with its shardings."""
    rest = dict(variables)
    params = rest.pop("params")
    places = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    # Without its old `opt_state`: those arrays are freed before new ones are made.
    state = state.replace(params=params, model_state=rest, opt_state=None)
    return state.replace(opt_state=jax.jit(optimizer.init, out_shardings=places)(params))


def _put_part(sharding: jax.sharding.Sharding, part: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: put(leaf, sharding, may_alias=False), part)


def _compiler_options() -> dict[str, int] | None:
    """Returns compiler options for a program that runs once, where compilation dominates on a CPU.

    Fewer LLVM passes cut its time to a half or a third, and the older emitters of JAX 0.10 more.
    JAX's initializers draw the same numbers.
    """
    if jax.default_backend() != "cpu":
        return None
    older = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 1, **older}

"""The initial state of a run: fresh, given by the user, or restored by a reader."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxfit.modules._switch import as_init
from flaxfit.optim._extended import first_state, wrap_state
from flaxfit.optim._plain_rate import live_rate, matched
from flaxfit.state import Checkpoint, TemplateOf, TrainState, with_opt_state
from flaxfit.step import init_state
from flaxfit.task import TrainTask, frozen_as_saved
from flaxfit.tree import ArrayLike, Function, Json, PyTree, flat


def start(
    init: Any,
    task: TrainTask,
    key: ArrayLike,
    sample: Callable[[], PyTree],
    say: Callable[[str], None],
    shardings: Callable[[PyTree], PyTree] | None = None,
    *,
    freezes_as_saved: bool = False,
) -> tuple[TrainState, Any, bool, TrainTask]:
    """Creates or restores the initial state.

    Args:
      init: a module, an `init` function, a `TrainState`, or a reader: an object with `target` (one
        of the others) and `read(template)`, which returns a checkpoint file or None.
      task: the task to train.
      key: a random key or seed, or None if `init` holds a state.
      sample: returns the inputs of a batch.
      say: prints a line.
      shardings: maps an abstract state to the shardings of its arrays.
      freezes_as_saved: whether to freeze the parameters that were frozen in the saved run.

    Returns:
      The state; the file that held it, or None; whether steps may donate its arrays, because
      nobody else holds them; and the task.
    """
    init = as_init("TrainLoop", init, task.apply)
    streams = ("params", *task.rngs)
    if hasattr(init, "read"):
        # Only shapes are needed of a warm start, not its weights.
        target = as_init("The reader of a TrainLoop", init.target, task.apply)
        shapes = getattr(target, "fresh", target)

        def template(optimizer: optax.GradientTransformation) -> PyTree:
            made = _template(shapes, optimizer, task, sample, streams)
            return made if shardings is None else jax.tree.map(_in_place, made, shardings(made))

        is_free = freezes_as_saved and getattr(init, "takes_template_of", False)
        found, task = read_for(init.read, template, task, freezes_as_saved=is_free)
        if found is not None:
            say(f"restored step {int(found.state.step):,} from {found.path}")
            return found.state, found, False, task
        say("no checkpoint found, starting fresh")
        init = target
    if isinstance(init, TrainState):
        return _prepared(init, task), None, False, task
    if not callable(init):
        raise TypeError(
            "TrainLoop needs an init function, a TrainState or a CheckpointFileReader, got "
            f"{type(init).__name__}: {init!r:.60}"
        )
    if key is None:
        raise ValueError(
            "TrainLoop needs a random key to initialize the model: pass rnkey=0 or "
            "rnkey=jax.random.key(0)."
        )
    state = init_state(
        init, task.optimizer, key, sample(), collections=streams, shardings=shardings
    )
    # A compiled program returns new arrays, but loaded weights or an eager `init` may return
    # arrays that someone else holds, and donation would delete these.
    may_donate = not getattr(init, "gives_weights", False) and not jax.config.jax_disable_jit
    return state, None, may_donate, task


def _template(
    shapes: Any,
    optimizer: optax.GradientTransformation,
    task: TrainTask,
    sample: Callable[[], PyTree],
    streams: tuple[str, ...],
) -> PyTree:
    """Returns the shapes and dtypes of the state that a reader is to restore."""
    if isinstance(shapes, TrainState):
        if getattr(optimizer, "freeze", ()) != getattr(task.optimizer, "freeze", ()):
            return jax.eval_shape(lambda: shapes.replace_optimizer(optimizer))
        return jax.eval_shape(lambda: _prepared(shapes, task, optimizer))
    if callable(shapes):
        return _shapes(
            lambda k: init_state(shapes, optimizer, k, sample(), collections=streams),
            jax.random.key(0),
        )
    raise TypeError(
        "TrainLoop needs a reader that knows the model, got one with the target "
        f"{shapes!r:.60}: pass its init, CheckpointFileReader(folder, module.init)."
    )


def read_for(
    read: Function, template: Function, task: TrainTask, *, freezes_as_saved: bool = False
) -> tuple[Any, TrainTask]:
    """Reads a checkpoint; also returns the task, with the saved `freeze` if requested.

    If the template does not fit, it tries that of a plain optimizer whose rate was set: the rate
    is then a part of the saved optimizer state.
    """
    saved = task

    def asked(optimizer_of: Function) -> Any:
        if not freezes_as_saved:
            return template(optimizer_of(task.optimizer))

        def of(running: Json) -> PyTree:
            nonlocal saved
            saved = frozen_as_saved(task, running)
            try:
                return template(optimizer_of(saved.optimizer))
            except ValueError:  # The file is of another model: the reader explains the mismatch.
                saved = task
                return template(optimizer_of(task.optimizer))

        return TemplateOf(of)

    try:
        return read(asked(lambda optimizer: optimizer)), saved
    except ValueError as error:
        if task.step is not None or live_rate(task.optimizer) is None:
            raise
        with contextlib.suppress(ValueError):
            return read(asked(live_rate)), saved
        raise error from None


def check_trains(state: TrainState, say: Callable[[str], None]) -> None:
    """Checks that there are parameters to train; reports arrays that may be meant as parameters."""
    constants = flat(state.model_state.get("constants", {}))
    names = [
        f"self.{path.replace('/', '.')} {list(x.shape)}"
        for path, x in constants.items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    arrays = (
        f"plain arrays in attributes are constants: {', '.join(names)}. To train one, wrap it: "
        "self.w = nnx.Param(array)"
    )
    if not jax.tree.leaves(state.params):
        others = f"its collections: {', '.join(state.model_state) or 'none'}"
        raise ValueError(
            "The model has no parameters, so there is nothing to train; "
            f"{arrays if names else others}."
        )
    if names:
        say(arrays)


def check_same_arrays(own: TrainState, given: TrainState) -> None:
    """Checks that a given state has the shapes and dtypes of the present one."""
    if not (lines := _differences(own, given, _kind)):
        return
    n = "1 array differs" if len(lines) == 1 else f"{len(lines)} arrays differ"
    raise ValueError(
        f"Cannot continue from a state of another model or optimizer; {n}:\n"
        + "\n".join(lines[:30])
        + "\nIf other parameters were frozen when it was saved, set `freeze` as it was then, "
        "restore, and set it back."
    )


def _differences(own: PyTree, given: PyTree, kind: Callable[[Any], Any]) -> list[str]:
    here, there = ({path: kind(x) for path, x in flat(tree).items()} for tree in (own, given))
    paths = [path for path in {**here, **there} if here.get(path) != there.get(path)]
    return [f"  {p}: here {here.get(p, '-')}, given {there.get(p, '-')}" for p in paths]


def _kind(leaf: ArrayLike) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _shapes(create: Function, key: ArrayLike) -> PyTree:
    """Returns the shapes and dtypes of a state."""
    if not jax.config.jax_disable_jit:
        return jax.eval_shape(create, key)
    # In debug mode the user's code must see values: compute the state instead of tracing it.
    state = create(key)
    return jax.eval_shape(lambda: state)


def _prepared(state: TrainState, task: TrainTask, optimizer: Any = None) -> TrainState:
    """Prepares a user's state for an optimizer; None: that of the task."""
    state = jax.tree.map(_read, state)
    # A state made by hand may have a Python integer or an int64 as its step.
    state = state.replace(step=jnp.asarray(state.step, jnp.int32))
    # The optimizer state of a custom step is not checked.
    if task.step is not None:
        return state
    return _with_options(state, task.optimizer if optimizer is None else optimizer)


def _read(leaf: ArrayLike) -> ArrayLike:
    """Reads a lazy array, as importers may return."""
    is_lazy = hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array | np.ndarray)
    return np.asarray(leaf) if is_lazy else leaf


def _with_options(state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
    """Adds the optimizer state of the task's options (such as `ema`), and checks all shapes."""
    optimizer, opt_state = matched(optimizer, state.opt_state)
    opt_state = wrap_state(opt_state, optimizer, state.params, state.model_state)
    shapes = jax.eval_shape(lambda: first_state(optimizer, state.params, state.model_state))
    if lines := _differences(shapes, opt_state, np.shape):
        raise ValueError(
            f"The optimizer state does not match task.optimizer; {len(lines)} arrays differ:\n"
            + "\n".join(lines[:20])
            + "\nMake it with init_state(init, task.optimizer, ...) or "
            "state.replace(opt_state=task.optimizer.init(state.params))."
        )
    return state if opt_state is state.opt_state else with_opt_state(state, opt_state)


def _in_place(array: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def as_checkpoint(found: Any) -> Checkpoint | None:
    """Converts a checkpoint file to a checkpoint without a state."""
    if found is None:
        return None
    fields = ("metrics", "data_state", "running", "stop")
    known = {name: getattr(found, name) for name in fields if hasattr(found, name)}
    step, known = int(found.state.step), {"metrics": {}, **known}
    return Checkpoint(step=step, state=found.state, **known).replace(state=None)

"""The initial state of a run: a fresh one, a given one, or one that a reader restores."""

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
      freezes_as_saved: whether the task freezes what was frozen in the saved run.

    Returns:
      The state; the file that held it, or None; whether nobody else holds its arrays, so that
      steps may donate them; and the task.
    """
    init = as_init("TrainLoop", init, task.apply)
    streams = ("params", *task.rngs)
    if hasattr(init, "read"):
        # A warm start is asked for shapes only, not for its weights.
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
    # Results of a program are new arrays; weights that are read, or an eager init, may not be.
    is_own = not getattr(init, "gives_weights", False) and not jax.config.jax_disable_jit
    return state, None, is_own, task


def _template(
    shapes: Any,
    optimizer: optax.GradientTransformation,
    task: TrainTask,
    sample: Callable[[], PyTree],
    streams: tuple[str, ...],
) -> PyTree:
    """The state that a reader is asked for, as shapes and dtypes."""
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
    """Reads a checkpoint, in which the rate of a plain optimizer may have been set.

    Also returns the task, which may freeze what was frozen in the saved run.
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
            except ValueError:  # Of another model, as the reader says with more words.
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
    """Checks that there are parameters to train, and names arrays that may be meant as such."""
    constants = flat(state.model_state.get("constants", {}))
    names = [
        f"self.{path.replace('/', '.')} {list(x.shape)}"
        for path, x in constants.items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    arrays = (
        f"plain arrays in attributes are constants: {', '.join(names)}. Wrap those that are to be "
        "trained: self.w = nnx.Param(array)"
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
    """Checks that a state has the arrays of the present one."""
    if not (lines := _differences(own, given, _kind)):
        return
    n = "1 array differs" if len(lines) == 1 else f"{len(lines)} arrays differ"
    raise ValueError(
        f"Cannot continue from a state of another model or optimizer; {n}:\n"
        + "\n".join(lines[:30])
        + "\nIf other parameters were frozen then, set `freeze` as it was, restore, and set it "
        "back."
    )


def _differences(own: PyTree, given: PyTree, kind: Callable[[Any], Any]) -> list[str]:
    here, there = ({path: kind(x) for path, x in flat(tree).items()} for tree in (own, given))
    paths = [path for path in {**here, **there} if here.get(path) != there.get(path)]
    return [f"  {p}: here {here.get(p, '-')}, given {there.get(p, '-')}" for p in paths]


def _kind(leaf: ArrayLike) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _shapes(create: Function, key: ArrayLike) -> PyTree:
    """The shapes and dtypes of a state; under `jax.disable_jit` it is made, not traced."""
    if not jax.config.jax_disable_jit:
        return jax.eval_shape(create, key)
    state = create(key)
    return jax.eval_shape(lambda: state)


def _prepared(state: TrainState, task: TrainTask, optimizer: Any = None) -> TrainState:
    """Prepares a state that the user gave, for the optimizer of the task or a variant of it."""
    state = jax.tree.map(_read, state)
    # It may have been made by hand, with a Python integer or an int64 as its step.
    state = state.replace(step=jnp.asarray(state.step, jnp.int32))
    # The optimizer state of a custom step is not checked.
    if task.step is not None:
        return state
    return _with_options(state, task.optimizer if optimizer is None else optimizer)


def _read(leaf: ArrayLike) -> ArrayLike:
    """Reads a lazy array, as imports may leave them."""
    is_lazy = hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array | np.ndarray)
    return np.asarray(leaf) if is_lazy else leaf


def _with_options(state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
    """Adds what the options of the task keep beside the optimizer's own state, and checks both."""
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
    """The checkpoint that a file holds, without its state."""
    if found is None:
        return None
    fields = ("metrics", "data_state", "running", "stop")
    known = {name: getattr(found, name) for name in fields if hasattr(found, name)}
    step, known = int(found.state.step), {"metrics": {}, **known}
    return Checkpoint(step=step, state=found.state, **known).replace(state=None)

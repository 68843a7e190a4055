"""nnx_step: makes a pure step of a training step in NNX's idiom."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from flaxfit.modules._nnx import from_nnx, update_nnx
from flaxfit.tree import Function, PyTree, Sums, copied, parameters


def nnx_step(function: Function, **objects: Any) -> "NNXStep":
    """Makes the `step` of a task of a function that updates NNX modules and optimizers in place.

    The function is called with the modules and the optimizers by the names given here, with
    `batch`, and with `rngs`, an `nnx.Rngs` of the step, if it has that argument. It returns the
    metrics of the step by name. It is traced, as under `nnx.jit`, on copies that hold the state of
    the run; the modules keep their current modes.

    >>> import flaxfit as ff, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def train_step(model, optimizer, batch):
    ...     (x,), (y,) = batch.inputs, batch.targets
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return {"loss": loss}
    >>> step = nnx_step(train_step, model=model, optimizer=optimizer)
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> loop = ff.TrainLoop(step.init, ff.TrainTask(step=step, data=[(x, 3 * x)] * 50), 0)
    >>> *_, last = loop
    >>> step.write_back(last.state)
    >>> last.loss < 0.1, int(optimizer.step[...])
    (True, 50)

    Args:
      function: `(..., batch)` or `(..., batch, rngs)`, which returns the sums of a step; see
        `TrainTask.step`.
      **objects: instances of NNX modules, `nnx.Optimizer`s and `nnx.ModelAndOptimizer`s. The
        state of one module is that of the module, so that an `EvalTask` of it measures the state;
        of several modules it has their names at the top.

    Returns:
      `(state, batch) -> (state, sums)`, with `init`, which a loop begins with, and
      `write_back(state)`, which writes a state into the objects that were given.

    Raises:
      TypeError: an object is neither a module nor an optimizer, or the function does not take them.
        When the step is taken: the function does not return a mapping.
      ValueError: there is no module, or an optimizer keeps states for none of the modules.
    """
    return NNXStep(function, objects)


class NNXStep:
    """The step that `nnx_step` makes: `(state, batch) -> (state, sums)`."""

    init: Function
    """The `init` of a loop: copies of the current variables. The task adds the optimizers'
    states."""
    apply: Function
    """The module as the `apply` of the task; several modules are in an `nnx.Dict` by name, which
    `checkpoint.module()` returns."""
    optimizer: optax.GradientTransformation
    """The optimizer of the task: its `init` returns copies of the current states, by name."""

    def __init__(self, function: Function, objects: Mapping[str, Any]):
        from flax import nnx

        from flaxfit.modules import _nnx_modes, _nnx_optimizer, _nnx_state

        _check_kinds(objects)
        self._takes_rngs = "rngs" in parameters(function)
        _check_call(function, objects, self._takes_rngs)
        self._function, self._objects = function, dict(objects)
        self._optimizers = {n: x for n, x in objects.items() if isinstance(x, nnx.Optimizer)}
        self._modules, held = _modules(objects)
        several = len(self._modules) != 1
        whole: Any = nnx.Dict(self._modules) if several else next(iter(self._modules.values()))
        for name, optimizer in self._optimizers.items():
            _check_fits(name, optimizer, [*self._modules.values(), whole])
        self._split = {
            name: _nnx_optimizer.split(optimizer, held.get(name))
            for name, optimizer in self._optimizers.items()
        }
        self._whole = whole
        view = _nnx_modes.viewed(whole, {})
        self._graph, self._random, self._template = _nnx_state.split(view)
        self.init, self.apply = from_nnx(whole, call=None if callable(whole) else _no_call)
        self.optimizer = optax.GradientTransformation(self._opt_states, _no_update)

    def __call__(self, state: Any, batch: PyTree) -> tuple[Any, Mapping[str, Sums]]:
        """Takes a step on copies of the modules and optimizers that hold the state."""
        from flax import nnx

        from flaxfit.modules import _nnx_effects, _nnx_optimizer, _nnx_state

        if not isinstance(state.opt_state, Mapping) or {*state.opt_state} != {*self._split}:
            raise ValueError(
                "The state does not hold what the optimizers of nnx_step keep: begin with "
                "TrainLoop(step.init, TrainTask(step=step, ...))."
            )
        # Functions of the step, as all randomness; streams in modules are not parts of a state.
        keys = jax.random.split(jax.random.fold_in(state.key, state.step))
        variables = {"params": state.params, **state.model_state}
        streams = _nnx_state.keyed(self._random, keys[0])

        def fresh() -> Any:
            values = _nnx_state.filled(self._template, variables)
            return nnx.merge(self._graph, streams, values, copy=True)

        def run(whole: Any) -> tuple[Mapping[str, Sums], PyTree]:
            is_one = len(self._modules) == 1
            modules = {name: whole if is_one else whole[name] for name in self._modules}
            optimizers = {
                name: _nnx_optimizer.merged(each, state.opt_state[name], modules)
                for name, each in self._split.items()
            }
            objects = {name: {**modules, **optimizers}[name] for name in self._objects}
            rngs = {"rngs": nnx.Rngs(keys[1])} if self._takes_rngs else {}
            sums = self._function(**objects, batch=batch, **rngs)
            return sums, {n: _nnx_optimizer.values_of(each) for n, each in optimizers.items()}

        whole = fresh()
        before = _nnx_effects.facts_of(whole)
        sums, opt_state = run(whole)
        if not isinstance(sums, Mapping):
            raise TypeError(
                f"The function of nnx_step returned {type(sums).__name__}; expected numbers by "
                "the names of metrics, such as {'loss': loss}, or {}."
            )
        model_state = _nnx_state.persistent(_nnx_state.variables_of(whole))
        params = model_state.pop("params", {})
        _nnx_effects.check_repeats(before, whole, fresh, run)
        return state.replace(params=params, model_state=model_state, opt_state=opt_state), sums

    def write_back(self, state: Any) -> None:
        """Writes copies of a state into the given modules and optimizers."""
        from flaxfit.modules import _nnx_optimizer

        opt_state = copied(state.opt_state)
        update_nnx(self._whole, state.variables)
        for name, optimizer in self._optimizers.items():
            _nnx_optimizer.assign(optimizer, opt_state[name])

    def _opt_states(self, params: PyTree) -> PyTree:
        from flaxfit.modules._nnx_optimizer import values_of

        states = {name: values_of(each) for name, each in self._optimizers.items()}
        return copied(states)


def _check_kinds(objects: Mapping[str, Any]) -> None:
    from flax import nnx

    for name, given in objects.items():
        if isinstance(given, nnx.Module | nnx.Optimizer):
            continue
        advice = "pass an instance of an NNX module, or an nnx.Optimizer"
        if isinstance(given, nnx.Rngs):
            advice = "a function with an argument rngs is given an nnx.Rngs of the step"
        elif isinstance(given, nnx.metrics.Metric):
            advice = "return what it measures, by name; flaxfit adds it up over the steps"
        elif hasattr(given, "init") and hasattr(given, "update"):
            advice = "wrap it: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)"
        raise TypeError(f"nnx_step cannot use {name}={given!r:.60}: {advice}.")


def _check_call(function: Function, objects: Mapping[str, Any], takes_rngs: bool) -> None:
    names = [*objects, "batch", *(["rngs"] if takes_rngs else [])]
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"nnx_step calls its function with {', '.join(f'{name}=' for name in names)}, and it "
            f"takes {inspect.signature(function)}: {error}."
        ) from None


def _modules(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the modules by name, and the names of the modules that optimizers hold."""
    from flax import nnx

    modules = {name: x for name, x in objects.items() if isinstance(x, nnx.Module)}
    held = {}
    for name, given in objects.items():
        if isinstance(given, nnx.ModelAndOptimizer):
            own = (known for known, module in modules.items() if module is given.model)
            held[name] = next(own, name)
            modules.setdefault(held[name], given.model)
    if not modules:
        raise ValueError("nnx_step needs the module that it trains: nnx_step(f, model=model, ...).")
    return modules, held


def _check_fits(name: str, optimizer: Any, modules: list[Any]) -> None:
    """Checks by paths that an optimizer belongs to a module or to a part of one."""
    from flax import nnx

    from flaxfit.modules._nnx_optimizer import paths_of

    paths = paths_of(optimizer)
    for module in modules:
        for _, part in nnx.iter_modules(module):
            if paths <= {path for path, _ in nnx.to_flat_state(nnx.state(part, optimizer.wrt))}:
                return
    listed = ", ".join("/".join(map(str, path)) for path in sorted(paths, key=str)[:5])
    raise ValueError(
        f"{name} is an optimizer of another module: it keeps states for {listed}, and no module "
        "of nnx_step has these. Pass its module too; one optimizer of several modules is made of "
        "an nnx.Dict of them, which is passed as one module."
    )


def _no_call(module: Any, *inputs: PyTree, **named: PyTree) -> PyTree:
    raise TypeError(
        f"The modules of nnx_step have no call, so there is nothing to apply: {module!r:.60}. Name "
        "what is to be measured: from_nnx(module, call=lambda module, x: ..., train=False).apply."
    )


def _no_update(updates: PyTree, state: PyTree, params: PyTree = None) -> PyTree:
    raise TypeError("The optimizers of nnx_step are updated in its function alone.")

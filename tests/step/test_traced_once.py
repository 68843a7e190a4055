"""TracedOnce: a model is traced once for its inspection and all programs, which stay the same."""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import slow, thorough

import flaxfit as ff
from flaxfit import make_train_step
from flaxfit.data._batch import normalize
from flaxfit.step._traced_once import TracedOnce

X, Y = np.ones((8, 6), np.float32), np.ones((8, 4), np.float32)
CALLS = []


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        CALLS.append("init" if self.is_initializing() else "call")
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(
            use_running_average=not train,
        )(x)
        return nn.Dropout(0.1, deterministic=not train)(nn.remat(nn.Dense)(4)(nn.relu(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        CALLS.append("call")
        return self.dropout(self.last(nnx.gelu(self.norm(self.first(x)))))


MODELS = {
    "linen": Linen,
    "nnx instance": lambda: Nnx(nnx.Rngs(0)),
    "nnx factory": lambda: lambda rngs: Nnx(rngs),
}
STRATEGIES = {
    "one device": lambda: ff.DataParallel(jax.devices()[:1]),
    "sharded": ff.Sharded.fsdp,
}
models = pytest.mark.parametrize("name", ["nnx instance", slow("linen"), thorough("nnx factory")])


def make_loop(model, strategy="one device", **options):
    data = ff.ArrayStream(X, Y, batch_size=8)
    task = ff.TrainTask(model, optax.sgd(0.1), "mse", data, ["mae"], **options)
    return ff.TrainLoop(model, task, 0, n_steps=4, stdout=False, strategy=STRATEGIES[strategy]())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("nnx instance", "one device"),
        slow("linen", "sharded"),
        thorough("nnx factory", "one device"),
        thorough("linen", "one device"),
        thorough("nnx instance", "sharded"),
        thorough("nnx factory", "sharded"),
    ],
)
def test_the_code_of_a_model_runs_once_for_all_programs_that_train_it(name, strategy):
    loop = make_loop(MODELS[name](), strategy)
    CALLS.clear()
    loop.next_step()
    assert CALLS == ["call"]
    loop.steps_per_call = 2
    next(loop)  # Another program.
    assert CALLS == ["call"]


@models
def test_fit_evaluation_and_prediction_run_it_once_each(name):
    model = ff.Model(MODELS[name](), optax.sgd(0.1), "mse", strategy=STRATEGIES["one device"]())
    for method in (model.fit, model.evaluate):
        CALLS.clear()
        method(X, Y, batch_size=8, verbose=0)
        assert CALLS.count("call") == 1
    CALLS.clear()
    model.predict(X, batch_size=8, verbose=0)
    assert CALLS == ["call"]


@pytest.mark.slow
def test_its_code_runs_again_for_other_shapes_and_after_a_change_of_what_is_frozen():
    loop = make_loop(Nnx(nnx.Rngs(0)))
    loop.next_step()
    CALLS.clear()
    loop.next_step((X[:4], Y[:4]))
    assert CALLS == ["call"]
    loop.freeze = "first/.*"
    loop.next_step()
    assert CALLS == ["call"] * 2


@models
def test_the_program_is_that_of_the_code(name):
    loop = make_loop(MODELS[name]())
    state, batch = loop.state, normalize((X, Y))

    def text(task):
        return jax.jit(make_train_step(task)).lower(state, batch).as_text()

    once = TracedOnce()(loop.task)
    assert text(once) == text(once) == text(loop.task)


class Keeps:
    """A model that keeps what it has returned; with `uses`, it also reads it later."""

    def __init__(self, uses=False):
        self.kept, self.uses, self.n_calls = [], uses, 0

    def __call__(self, variables, x, **_):
        self.n_calls += 1
        outputs = x @ variables["params"]
        if self.uses and self.kept:
            outputs = outputs + self.kept[-1].mean()
        self.kept.append(outputs)
        return outputs, {}


def weights(rngs, x):
    return {"params": jnp.ones((6, 4))}


def loop_of(apply):
    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y))
    strategy = STRATEGIES["one device"]()
    return ff.TrainLoop(weights, task, 0, stdout=False, strategy=strategy)


@pytest.mark.slow
def test_a_model_that_keeps_arrays_is_traced_again_and_refused_where_it_uses_one():
    apply = Keeps()
    loop_of(apply).next_step()
    assert apply.n_calls == 5
    with pytest.raises(TypeError, match="kept an array of an earlier call"):
        loop_of(Keeps(uses=True)).next_step()


def test_what_it_keeps_for_some_shapes_alone_may_be_read_by_the_loss():
    kept = []

    def apply(variables, x, **_):
        outputs = x @ variables["params"]
        kept[:] = [outputs] if len(x) > 4 else []
        return outputs, {}

    def loss(outputs, targets):
        return ((outputs - targets) ** 2 + sum(kept)).mean(-1)

    def losses(*sizes):
        data = [(X[:n], Y[:n]) for n in sizes]
        task = ff.TrainTask(apply, optax.sgd(0.0), loss, data, pad=False)
        loop = ff.TrainLoop(weights, task, 0, stdout=False, strategy=STRATEGIES["one device"]())
        return [loop.next_step().loss for _ in sizes]

    assert losses(4, 8, 4) == [25, 31, 25]  # (6 - 1)**2, and 6 more.


def test_an_objective_calls_the_code_itself():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, by=1):
            return nn.Dense(4, use_bias=False, kernel_init=nn.initializers.ones)(x) * by

    def ten_times(call, arguments, options, _):
        return 10 * call(*arguments, **options)

    def objective(apply, batch, rngs):
        (x,) = batch.inputs
        found = apply(x, 1), apply(x, True), apply(x, 1.0)
        with nn.intercept_methods(ten_times):
            inside = apply(x, 1)
        return sum(each.mean(-1) for each in found) + inside.mean(-1)

    task = ff.TrainTask(Scaled(), optax.sgd(0.1), data=(X, Y), objective=objective)
    loop = ff.TrainLoop(Scaled(), task, 0, stdout=False, strategy=STRATEGIES["one device"]())
    assert loop.next_step().loss == 3 * 6 + 100 * 6  # The module and its layer, each ten times.


def test_results_may_be_constants_and_numbers():
    table, seen = np.arange(3), []

    def apply(x, flag):
        seen.append(flag)
        return {"x": x + 1, "n": 3, "table": table, "none": None}

    once = TracedOnce()(ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y)))

    def read(x):
        once.apply(x, "flag")
        found = once.apply(x, "flag")
        assert found["n"] == 3 and isinstance(found["n"], int)
        assert found["table"] is table and found["none"] is None
        return found["x"]

    np.testing.assert_array_equal(jax.jit(read)(X), X + 1)
    assert seen == ["flag"]


@flax.struct.dataclass
class Static:
    by: object = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Leaf:
    by: object


@pytest.mark.parametrize("form", [lambda by: by, Static, Leaf, lambda by: {by: 0}])
def test_arguments_that_are_equal_but_of_other_types_are_other_calls(form):
    seen = []

    def apply(x, given):
        by = given if isinstance(given, int | float) else getattr(given, "by", None)
        by = next(iter(given)) if by is None else by
        seen.append(by)
        kind = {int: 0.0, bool: 10.0, float: 100.0}[type(by)]
        return x * (kind + math.copysign(1, by))

    once = TracedOnce()(ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y)))
    values = [1, True, 1.0, 0.0, -0.0, 1, -0.0]
    found = jax.jit(lambda x: [once.apply(x, form(by)) for by in values])(np.float32(1))
    assert found == [1, 11, 101, 101, 99, 1, 99]
    assert len(seen) == 5  # The last two were seen before.


def test_a_call_with_values_or_with_arrays_of_the_program_around_it_runs_the_code():
    seen = []

    def apply(x, y=None):
        seen.append(isinstance(y, np.ndarray))
        return x * 2

    once = TracedOnce()(ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y)))
    once.apply(X)
    once.apply(X)
    jax.jit(lambda x: once.apply(x, Y))(X)
    with jax.disable_jit():
        jax.grad(lambda x: once.apply(x).sum())(X)
    assert seen == [False, False, True, False]

    def closes(x):
        inner = TracedOnce()
        task = ff.TrainTask(lambda y: seen.append("closed") or x + y, optax.sgd(0.1), "mse", (X, Y))
        bound = inner(task)
        return bound.apply(x) + bound.apply(x)

    np.testing.assert_array_equal(jax.jit(closes)(X), 4 * X)
    assert seen[4:] == ["closed"] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_may_name_the_axis_of_replicas(strategy):
    def apply(variables, x, **_):
        outputs = x @ variables["params"]
        return outputs - jax.lax.pmean(outputs.mean(), "replica"), {}

    task = ff.TrainTask(apply, optax.sgd(0.1), "mse", (X, Y))
    loop = ff.TrainLoop(weights, task, 0, stdout=False, strategy=STRATEGIES[strategy]())
    assert np.isfinite(loop.next_step().loss)

"""Results that a division of the batch or padding would change: refused, or kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import slow, thorough
from own_rules import centered_slopes

import flaxfit as ff
from flaxfit.step._trial import N_ROWS

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 4)).astype(np.float32)
Y = rng.normal(size=(20, 2)).astype(np.float32)
W = rng.normal(size=(4, 2)).astype(np.float32)
TABLE = np.eye(4, dtype=np.float32)
STRATEGIES = {
    "one": lambda: ff.DataParallel(jax.devices()[:1]),
    "shard_map": lambda: ff.DataParallel(jax.devices()[:4]),
    "pmap": lambda: ff.DataParallel(jax.devices()[:4], implementation="pmap"),
    "virtual": lambda: ff.DataParallel(jax.devices()[:1], virtual_replicas=4),
}
MIXES = "model mixes examples of a batch"
COMPARES = "The loss gives each example a value that depends on"
PENALTY = "the penalty that the model adds"


def model_with(module, strategy="one", loss="mse", **options):
    return ff.Model(module, optax.sgd(0.1), loss, strategy=STRATEGIES[strategy](), **options)


def model_of(function, strategy="one", loss="mse", state=None, **options):
    """A model of `function(params, inputs, state) -> outputs, collections`, with these options."""

    def init(rngs, *inputs):
        return {"params": {"w": jnp.asarray(W)}, **(state or {})}

    def apply(variables, *inputs, rngs=None, mutable=False):
        found = function(variables["params"]["w"], *inputs, variables)
        outputs, updates = found if isinstance(found, tuple) else (found, {})
        return outputs if mutable is False else (outputs, updates)

    return model_with((init, apply), strategy, loss, **options)


def loss_of(model, size=20, rows=20):
    """The loss of an epoch in batches of that size."""
    history = model.fit(X[:rows], Y[:rows], size, shuffle=False, verbose=0)
    assert np.isfinite(history["loss"]).all()
    return history["loss"][0]


def assert_refused(model, words=MIXES, size=20, rows=20):
    with pytest.raises(ValueError, match=words):
        loss_of(model, size, rows)


def linear(w, x, _):
    return x @ w


def squared(outputs, targets):
    return ((outputs - targets) ** 2).mean(-1)


def segments(w, x, variables):
    """Message passing: each row receives the sum over its group."""
    group = jnp.zeros(len(x), int)
    return (x + jax.ops.segment_sum(x, group, 1)[group]) @ w


def parents(w, x, _):
    return (x[jnp.arange(len(x)) // 2] + x) @ w


# More functions that combine rows are in step/test_trial.py.


@pytest.mark.parametrize(
    ("function", "strategy"),
    [(segments, "shard_map"), (parents, "virtual"), slow(segments, "pmap")],
)
def test_a_model_that_combines_rows_is_not_divided(function, strategy):
    model = model_of(function, strategy)
    for call in (
        lambda: model.fit(X, Y, 20, verbose=0),
        lambda: model.evaluate(X, Y, batch_size=20, verbose=0),
        lambda: model.predict(X, batch_size=20, verbose=0),
    ):
        with pytest.raises(ValueError, match=rf"{MIXES}.*Sharded\(\)"):
            call()


def gated(w, x, variables):
    return (x + variables["params"]["gate"] * x.mean(0)) @ w


def from_step(strength, later):
    """Mixes rows with a strength that depends on a state, which changes with each step."""

    def warmed(w, x, variables):
        known = variables["stats"]["known"]
        return (x - strength(known) * x.mean(0)) @ w, {"stats": {"known": later(known)}}

    return warmed


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (lambda w, x, _: (x + jnp.arange(len(x))[:, None]) @ w, {}),
        slow(lambda w, x, _: (x - 9e-3 * x.mean(0)) @ w, {}),
        (gated, {"params": {"w": W, "gate": 0.0}}),
        (gated, {"params": {"w": W, "gate": 1e-6}}),
        (from_step(lambda i: i >= 100, lambda i: i + 1), 0.0),
        slow(from_step(lambda i: i >= 1500, lambda i: i + 1), 0),
        slow(from_step(lambda i: i > 65100, lambda i: i + 32), np.float16(65000)),
        slow(from_step(lambda i: (i[0] > 1) & (i[0] < 900), lambda i: i + 1), np.array([0])),
        slow(from_step(lambda is_on: is_on, lambda is_on: True), False),
        slow(from_step(lambda gate: gate, lambda gate: gate + 0.1), np.zeros(4, "f4")),
    ],
)
def test_rows_that_are_hardly_or_not_yet_mixed_are_not_divided(function, state):
    state = state if isinstance(state, dict) else {"stats": {"known": state}}
    arrays = {name: jax.tree.map(jnp.asarray, each) for name, each in state.items()}
    assert_refused(model_of(function, "shard_map", state=arrays))


@pytest.mark.parametrize(
    ("function", "where", "rows"),
    [
        (lambda x: {"a": x, "b": x - x.mean(0)}, " in its output 'b'", lambda o: o["a"]),
        slow(
            lambda x: {"a/b": x, "a": {"b": x - x.mean(0)}},
            " in its output 'a/b'",
            lambda o: o["a/b"],
        ),
        slow(lambda x: [*x], "", jnp.stack),
        slow(lambda x: [x] if len(x) < 15 else [x, x], "", lambda o: o[0]),
    ],
)
def test_the_output_that_mixes_rows_is_named(function, where, rows):
    model = model_of(lambda w, x, _: function(x @ w), "shard_map", lambda o, t: squared(rows(o), t))
    assert_refused(model, rf"of a batch{where}, .*psum\(x, 'replica'\)")


def test_a_model_without_outputs_is_divided():
    def penalized(w, x, _):
        return {}, {"losses": {"size": jnp.square(x @ w).mean()}}

    one, four = (
        model_of(penalized, strategy, None).fit(X, batch_size=20, verbose=0).history["loss"]
        for strategy in ("one", "shard_map")
    )
    assert four == pytest.approx(one, rel=1e-6)


def loss_by_hand(loss):
    """The loss of an epoch of 16 rows and then 4, of `loss(w, x, y)`, in a loop of its own."""
    w, sums = W, []
    for rows in (slice(16), slice(16, 20)):
        value, gradient = jax.value_and_grad(loss)(w, X[rows], Y[rows])
        w = w - 0.1 * gradient
        sums.append(float(value) * len(X[rows]))
    return pytest.approx(sum(sums) / len(X), rel=1e-5)


@pytest.mark.slow
def test_a_loss_that_compares_rows_may_be_computed_without_padding():
    def loss(outputs, targets):
        return squared(outputs, targets) * outputs.mean()

    words = "set across='batch' in the task, or pad=False"
    assert_refused(model_of(linear, loss=loss), words, 16)
    found = loss_of(model_of(linear, loss=loss, pad=False), 16)
    assert found == loss_by_hand(lambda w, x, y: loss(x @ w, y).mean())


@pytest.mark.parametrize(
    ("function", "size"),
    [
        slow(segments, 16),
        (parents, 16),
        (lambda w, x, _: (x - x.mean(0) if len(x) > 15 else x) @ w, 16),
        (lambda w, x, _: (2.0 if len(x) >= 6 else 1.0) * x @ w, 16),
        slow(lambda w, x, _: (2.0 if len(x) >= 7 else 1.0) * x @ w, 7),
        slow(lambda w, x, _: (2.0 if len(x) >= 9 else 1.0) * x @ w, 9),
    ],
)
def test_remainders_that_padding_would_change_are_not_padded(function, size):
    model = model_of(function)
    parts = np.split(X, range(size, 20, size))
    outputs = np.concatenate([np.asarray(function(W, jnp.asarray(x), {})) for x in parts])
    found = model.predict(X, batch_size=size, verbose=0)
    np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)
    found = model.evaluate(X, Y, batch_size=size, verbose=0)["loss"]
    assert found == pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-5)


def counted(w, x, variables):
    return x @ w, {"stats": {"rows": variables["stats"]["rows"] + len(x)}}


def averaged(w, x, variables):
    return x @ w, {"stats": {"rows": 0.9 * variables["stats"]["rows"] + 0.1 * x.mean()}}


@pytest.mark.parametrize(
    ("strategy", "accumulate", "start", "option"),
    [
        ("shard_map", 1, 0.0, "4 devices.*jax.lax.psum"),
        slow("virtual", 1, 1e6, "virtual_replicas=4"),
        ("one", 4, 1.0, "accumulate=4.*accumulate=1"),
    ],
)
def test_a_state_that_is_not_the_mean_of_its_parts_is_refused(strategy, accumulate, start, option):
    function = counted if accumulate == 1 else averaged
    state = {"stats": {"rows": jnp.asarray(start)}}
    model = model_of(function, strategy, state=state, accumulate=accumulate)
    assert_refused(model, f"(?s)(?=.*'stats/rows').*{option}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "options"),
    [(averaged, {"strategy": "shard_map"}), (counted, {"accumulate": 4})],
    ids=["mean", "chained sum"],
)
def test_one_that_is_has_the_value_of_one_device(function, options):
    found, state = [], {"stats": {"rows": jnp.asarray(0.0)}}
    for each in (options, {}):
        model = model_of(function, state=state, **each)
        loss_of(model)
        found.append(model.state.model_state["stats"]["rows"])
    np.testing.assert_allclose(*found, rtol=1e-6)


def recentred(w, x, variables):
    """Reads the mean of an earlier batch; of the part before where parts compute in turn."""
    h = x @ w
    return h - variables["stats"]["mean"], {"stats": {"mean": h.mean(0)}}


def annealed(w, x, variables):
    return x @ w, {"stats": {"calls": variables["stats"]["calls"] + 1}}


@pytest.mark.parametrize(
    ("function", "state", "words"),
    [
        slow(recentred, {"mean": jnp.zeros(2)}, "accumulate=1"),
        (annealed, {"calls": jnp.zeros(())}, "'stats/calls'"),
    ],
)
def test_parts_that_continue_from_one_another_have_the_state_of_the_batch(function, state, words):
    assert_refused(model_of(function, state={"stats": state}, accumulate=2), words)


def test_replicas_do_not_continue_from_one_another():
    model = model_of(annealed, "pmap", state={"stats": {"calls": jnp.zeros(())}})
    loss_of(model)
    assert model.state.model_state["stats"]["calls"] == 1


@pytest.mark.slow
def test_a_module_that_sums_over_the_replicas_is_right():
    """Counts in the step how often each output is the highest, over all replicas."""

    def counting(w, x, _):
        used = jax.nn.one_hot((x @ w).argmax(-1), 2).sum(0)
        return x @ w, {"codes": {"usage": jax.lax.psum(used, "replica")}}

    model = model_of(counting, "shard_map", state={"codes": {"usage": jnp.zeros(2)}})
    loss_of(model)
    usage = model.state.model_state["codes"]["usage"]
    np.testing.assert_array_equal(usage, np.bincount((X @ W).argmax(-1), minlength=2))
    assert_refused(model_of(lambda w, x, _: x @ w + jax.lax.axis_index("replica"), "pmap"))


def summed(w, x, _):
    return x @ w, {"losses": {"size": jnp.square(x @ w).sum()}}


def beside_a_large_constant(w, x, _):
    """The negative entropy of the mean prediction."""
    mean = jax.nn.softmax(0.2 * x @ w).mean(0)
    return x @ w, {"losses": {"entropy": (mean * jnp.log(mean)).sum()}}


def straight_through(mean):
    return mean - jax.lax.stop_gradient(mean)


def in_the_gradient(w, x, _):
    return x @ w, {"losses": {"size": straight_through(((x @ w).mean(0) ** 2).sum())}}


@pytest.mark.parametrize(
    ("function", "strategy", "accumulate"),
    [
        (summed, "shard_map", 1),
        slow(summed, "one", 4),
        (beside_a_large_constant, "shard_map", 1),
        (in_the_gradient, "shard_map", 1),
    ],
)
def test_a_penalty_that_is_no_mean_is_refused(function, strategy, accumulate):
    model = model_of(function, strategy, accumulate=accumulate)
    assert_refused(model, f"{PENALTY} .* a mean over")


class Balanced(nn.Module):
    """The penalty of a mixture of experts: a product of means, of random numbers."""

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.Dropout(0.2, deterministic=not train)(nn.Dense(8)(x))
        p = jax.nn.softmax(nn.Dense(4)(h))
        f = jax.nn.one_hot(p.argmax(-1), 4)
        self.sow("losses", "balance", 4 * (f.mean(0) * p.mean(0)).sum())
        return nn.Dense(2)(h)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 7])  # On average over masks, these look divisible.
def test_a_penalty_hidden_by_dropout_is_compared_in_evaluation_mode(seed):
    x = np.random.default_rng(seed).normal(size=(20, 4)).astype(np.float32)
    model = model_with(Balanced(), "shard_map", seed=seed)
    with pytest.raises(ValueError, match=PENALTY):
        model.fit(x, Y, 20, verbose=0, shuffle=False)


class Normalized(nnx.Module):
    """BatchNorm, and perhaps the mean of the batch besides."""

    def __init__(self, *, is_centered=False):
        self.layer, self.is_centered = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), is_centered
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.norm(self.layer(x))
        return h - h.mean(0) if self.is_centered else h


@pytest.mark.slow
def test_batchnorm_is_tried_in_evaluation_mode():
    assert_refused(model_with(Normalized(is_centered=True), "pmap"))
    loss_of(model_with(Normalized(), "pmap"))

    def loss(outputs, targets):
        return squared(outputs - outputs.mean(0), targets)

    assert_refused(model_with(Normalized(), "pmap", loss), COMPARES)


class Dropped(nn.Module):
    is_placed: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        x = x + jnp.arange(len(x))[:, None] if self.is_placed else x
        return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_placed", "words"), [(False, "The loss .* other examples"), (True, "mixes examples")]
)
def test_dropout_hides_neither_the_number_nor_the_place_of_rows(is_placed, words):
    def loss(outputs, targets):
        return squared(outputs, targets) / (1 if is_placed else len(outputs))

    assert_refused(model_with(Dropped(is_placed), "shard_map", loss), words)
    loss_of(model_with(Dropped(), "shard_map"))


class Autoencoder(nnx.Module):
    """Draws from a key of its own, and leaves a penalty; perhaps knows the number of its rows."""

    def __init__(self, *, is_scaled):
        self.encode, self.decode = (nnx.Linear(4, n, rngs=nnx.Rngs(0)) for n in (4, 2))
        self.is_scaled, self.rngs = is_scaled, nnx.Rngs(0)

    def __call__(self, x):
        mean, scale = self.encode(x), 0.1
        self.divergence = nnx.Intermediate((mean**2).mean())
        z = mean + scale * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decode(z) / (len(x) if self.is_scaled else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("shard_map", 1), thorough("virtual", 1), ("one", 2)]
)
def test_numbers_that_a_module_draws_by_itself_are_no_combination_of_rows(strategy, accumulate):
    options = {"losses": nnx.Intermediate, "accumulate": accumulate}
    loss_of(model_with(Autoencoder(is_scaled=False), strategy, **options))
    assert_refused(model_with(Autoencoder(is_scaled=True), strategy, **options))


def longer(w, x, _):
    """Rows of sequences, which are centred on the batch where they are long."""
    outputs = (x @ w).mean(1)
    return outputs - outputs.mean(0) if x.shape[1] > 2 else outputs


SEQUENCES = [rng.normal(size=(n, t, 4)).astype(np.float32) for n, t in ((20, 2), (20, 3), (6, 3))]


@pytest.mark.parametrize("way", ["fit", "evaluate", slow("train_on_batch")])
def test_batches_of_another_shape_are_tried_by_themselves(way):
    short, long, _ = ((x, Y[: len(x)]) for x in SEQUENCES)
    model = model_of(longer, "shard_map")
    with pytest.raises(ValueError, match=MIXES):
        if way == "train_on_batch":
            model.train_on_batch(*short)
            model.train_on_batch(*long)
        else:
            getattr(model, way)([short, long], verbose=0)


def test_a_remainder_of_another_shape_is_not_padded():
    short, _, rest = ((x, Y[: len(x)]) for x in SEQUENCES)
    found = model_of(longer).evaluate([short, rest], verbose=0)["loss"]
    errors = [(longer(W, x, None) - y) ** 2 for x, y in (short, rest)]
    assert found == pytest.approx(np.concatenate(errors).mean(), rel=1e-5)


def balance(w, x):
    """A load balancing term, which is a product of means."""
    p = jax.nn.softmax(x @ w)
    return (jax.nn.one_hot(p.argmax(-1), 2).mean(0) * p.mean(0)).sum()


def beside_values(outputs, balance, targets):
    return squared(outputs, targets), 0.1 * balance


def in_a_mean(outputs, balance, targets):
    return squared(outputs, targets).mean() + 0.1 * balance


@pytest.mark.slow
@pytest.mark.parametrize("loss", [beside_values, in_a_mean])
def test_an_output_for_the_whole_batch_has_to_be_the_mean_of_those_of_parts(loss):
    def model(term):
        return model_of(lambda w, x, _: ((x @ w, term(w, x)), {}), "shard_map", loss)

    assert_refused(model(balance), "the model in its output '1' .* differs from the mean")
    history = model(lambda w, x: (x @ w).mean()).fit(X, Y, 20, verbose=0)
    found = history["loss"][0] + sum(history.get("penalty", ()))
    expected = ((X @ W - Y) ** 2).mean() + 0.1 * (X @ W).mean()
    assert found == pytest.approx(expected, rel=1e-5)


class Watched(nnx.Module):
    """BatchNorm beside a scale of the inputs that does not pass through it."""

    def __init__(self, moment):
        self.normalize = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.scale, self.moment = nnx.Variable(jnp.zeros(4)), moment

    def __call__(self, x):
        self.scale[...] = 0.9 * self.scale[...] + 0.1 * self.moment(x)
        return self.dense(self.normalize(x))


@pytest.mark.slow
def test_batchnorm_does_not_hide_a_state_beside_it():
    for options in ({"strategy": "shard_map"}, {"accumulate": 2}):
        model = model_with(Watched(lambda x: x.std(0)), **options)
        assert_refused(model, "state 'Variable/scale'")
    loss_of(model_with(Watched(lambda x: x.mean(0)), "shard_map"))


def test_position_is_seen_where_it_repeats():
    def even(outputs, targets):
        return (jnp.arange(len(outputs)) % 2 == 0) * squared(outputs, targets)

    assert_refused(model_of(linear, "shard_map", even), COMPARES, 12, rows=12)


def own_metric(measure):
    return ff.metrics.Metric(measure, lambda sums: sums["s"] / sums["n"], "mine", mode="min")


def weighted_mean(outputs, targets, weights):
    error = jnp.abs(outputs - targets).mean(-1)
    return {"s": (weights * error).sum() / weights.sum(), "n": 1}


def unweighted(outputs, targets, weights):
    return {"s": jnp.abs(outputs - targets).mean(-1).sum(), "n": len(outputs)}


@pytest.mark.parametrize(
    ("measure", "refused", "accepted"),
    [(weighted_mean, "shard_map", "one"), (unweighted, "one", "shard_map")],
)
def test_sums_of_a_metric_add_up_and_leave_out_rows_of_weight_0(measure, refused, accepted):
    """One whole batch need not add up, and batches that need no padding have no such rows."""
    metrics = [own_metric(measure)]
    with pytest.raises(ValueError, match="'mine' cannot be measured .*sums"):
        model_of(linear, refused, metrics=metrics).evaluate(X, Y, batch_size=16, verbose=0)
    model = model_of(linear, accepted, metrics=metrics)
    found = model.evaluate(X, Y, batch_size=20, verbose=0)["mine"]
    assert found == pytest.approx(np.abs(X @ W - Y).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "loss"),
    [
        (  # An axis as long as the trial is not taken for rows.
            lambda w, x, _: ((x @ w, jnp.stack([x.mean(0)] * N_ROWS).sum(-1)), {}),
            lambda outputs, others, targets: squared(outputs, targets),
        ),
        (  # The penalty is sown, so that the loss is not given the rows of all devices.
            lambda w, x, _: ((x @ w, x.std(0)), {"losses": {"size": (x @ w).mean()}}),
            lambda outputs, deviation, targets: squared(outputs, targets),
        ),
    ],
    ids=["as long as the trial", "of the own device"],
)
def test_an_output_that_the_loss_leaves_out_may_be_anything(function, loss):
    loss_of(model_of(function, "shard_map", loss))


def test_a_state_that_replicas_alone_would_change_hides_nothing_else():
    """With `accumulate` on one device a counter of rows is right, and the loss is not."""

    def by_number(outputs, targets):
        return squared(outputs, targets) / len(outputs)

    state = {"stats": {"rows": jnp.zeros((), int)}}
    assert_refused(model_of(counted, "one", by_number, state, accumulate=2), COMPARES)


class Ghosts(nn.Module):
    """BatchNorm over groups of 5 rows."""

    @nn.compact
    def __call__(self, x, train: bool):
        groups = x.reshape(-1, 5, 4)
        normalize = nn.BatchNorm(use_running_average=not train, axis=-1)
        return nn.Dense(2)(normalize(groups).reshape(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("mutable", [None, ["batch_stats"]])
def test_batchnorm_over_groups_of_rows_is_accepted(mutable):
    task = ff.TrainTask(Ghosts(), optax.sgd(0.1), "mse", [(X, Y)], mutable=mutable)
    loop = ff.TrainLoop(Ghosts(), task, 0, strategy=STRATEGIES["shard_map"](), stdout=False)
    assert np.isfinite(loop.next_step().loss)


def residual(apply, batch, rngs):
    """The square of u' + u at each point, and of u - 1 at a fixed boundary."""
    (x,) = batch.inputs
    slopes = jax.vmap(jax.grad(lambda row: apply(row[None])[0, 0]))(x)
    boundary = apply(jnp.zeros((3, 4)))
    return (slopes[:, 0] + apply(x)[:, 0]) ** 2 + ((boundary[:, 0] - 1) ** 2).mean()


@pytest.mark.slow
def test_an_objective_that_differentiates_by_row_is_accepted():
    found = []
    for strategy in ("one", "shard_map"):
        model = model_of(linear, strategy, None, objective=residual)
        found.append(model.fit(X, batch_size=20, epochs=2, verbose=0)["loss"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_what_is_neither_divided_nor_padded_is_not_asked():
    model = model_of(segments, loss=lambda o, t: squared(o - o.mean(0), t))
    model.fit(X, Y, 10, verbose=0)
    model.evaluate(X, Y, batch_size=10, verbose=0)
    model.predict(X, batch_size=10, verbose=0)


def beyond(w, x, _):
    """Changes a row that a trial of a few rows does not reach."""
    return x.at[17].set(0) @ w


def doubled(w, x, _):
    """Doubles full batches by another constant, in the same operations."""
    return (2.0 if len(x) > 15 else 1.0) * x @ w


@pytest.mark.parametrize("function", [beyond, doubled])
def test_the_whole_batch_is_divided_as_in_training(function):
    assert_refused(model_of(function, "shard_map"))
    assert_refused(model_of(function, accumulate=2))


def scaled(w, x, _):
    return (2.0 if len(x) > 1 else 1.0) * x @ w


def beside_a_table(w, x, _):
    """A single row is multiplied with each row of the table, four rows with one each."""
    return (x + (x * TABLE).mean(0)) @ w


def apart_in_values(w, x, _):
    return centered_slopes(x @ w)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (scaled, {"accumulate": 4}),
        (beside_a_table, {"strategy": "shard_map"}),
        (apart_in_values, {"accumulate": 4}),
        slow(apart_in_values, {"example_grads_hook": lambda grads: grads}),
    ],
)
def test_a_model_that_computes_single_rows_differently_is_not_divided_into_them(function, options):
    assert_refused(model_of(function, **options), size=4)


def sown_beside_a_table(w, x, _):
    return x @ w, {"losses": {"size": ((x * TABLE) @ w).mean()}}


def kept_beside_a_table(w, x, state):
    return x @ w, {"kept": {"mean": 0 * state["kept"]["mean"] + (x * TABLE).mean()}}


@pytest.mark.parametrize(
    "options", [slow({"strategy": "shard_map"}), slow({"strategy": "virtual"}), {"accumulate": 4}]
)
def test_state_and_penalty_are_compared_by_part_where_no_halves_are_accepted(options):
    assert_refused(model_of(sown_beside_a_table, **options), PENALTY, 4)
    state = {"kept": {"mean": np.float32(0)}}
    model = model_of(kept_beside_a_table, state=state, **options)
    assert_refused(model, "the model updates the state 'kept/mean'", 4)


@pytest.mark.slow
def test_a_model_of_an_operation_for_each_row_is_divided():
    def stacked(w, x, _):
        return jnp.stack([jnp.tanh(row) for row in x]) @ w

    one, four = (loss_of(model_of(stacked, each), 4) for each in ("one", "shard_map"))
    assert four == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_rows_that_are_mixed_in_the_gradient_alone_are_not_divided():
    def mixing(w, x, _):
        return x @ w - straight_through((x @ w).mean(0))

    assert_refused(model_of(mixing, "shard_map"), "would change its outputs or gradients")
    found = loss_of(model_of(mixing), 16)
    assert found == loss_by_hand(lambda w, x, y: squared(mixing(w, x, None), y).mean())

    def baseline(outputs, targets):
        weight = jnp.exp(straight_through(outputs[:, 0]))
        return weight * targets[:, 0] + (1 - weight) * targets[:, 0].mean()

    assert_refused(model_of(linear, loss=baseline), COMPARES, 16)


def test_a_constant_of_the_state_is_no_counter():
    def waves(w, x, variables):
        scale = variables["stats"]["scale"]
        ordered = jnp.take_along_axis(x, jnp.argsort(x, 1), 1)  # No proof knows this to keep rows.
        return jnp.sin(2 * jnp.pi * scale * ordered) @ w, {"stats": {"scale": scale}}

    loss_of(model_of(waves, "shard_map", state={"stats": {"scale": jnp.asarray(1.0)}}))


@pytest.mark.slow
def test_examples_whose_gradients_are_taken_alone_must_not_be_mixed():
    def joint(w, x, _):
        return (x - jax.lax.pmean(x.mean(0), "replica")) @ w

    hook = {"example_grads_hook": lambda grads: grads}
    for model in (model_of(parents, **hook), model_of(joint, "shard_map", **hook)):
        assert_refused(model, r"mixes examples .* whole batch. BatchNorm")
    expected = ((X @ W - Y) ** 2).mean()
    assert loss_of(model_of(linear, **hook)) == pytest.approx(expected, rel=1e-5)


def test_the_weights_of_padded_batches_are_tried_in_an_objective():
    def normalized(apply, batch, rngs):
        values = squared(apply(*batch.inputs), batch.targets[0])
        return values if batch.weights is None else values * batch.weights / batch.weights.mean()

    model = model_of(linear, loss=None, objective=normalized)
    assert_refused(model, "Cannot compute this objective with batches that may be", 16)
    model = model_of(linear, loss=None, objective=normalized)
    assert loss_of(model) == pytest.approx(((X @ W - Y) ** 2).mean(), rel=1e-5)

    def unpadded(apply, batch, rngs):
        values = squared(apply(*batch.inputs), batch.targets[0])
        return values / values.mean() if batch.weights is None else values

    model = model_of(linear, "shard_map", None, objective=unpadded, pad=False)
    assert_refused(model, "Cannot compute this objective with 4 devices", 16)


@pytest.mark.parametrize("way", ["fit", slow("evaluate")])
def test_a_state_with_a_row_for_each_example_cannot_be_divided(way):
    def recurrent(w, x, variables):
        return (x + variables["stats"]["carry"]) @ w, {"stats": {"carry": x}}

    model = model_of(recurrent, "shard_map", state={"stats": {"carry": jnp.zeros((20, 4))}})
    with pytest.raises(ValueError, match=r"a part of it has 5 examples.*Sharded\(\)"):
        getattr(model, way)(X, Y, batch_size=20, verbose=0)

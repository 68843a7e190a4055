"""Results that a division of the batch or padding would change: refused, or kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from marks import slow
from own_rules import centered_slopes

import flaxfit as ff
from flaxfit.step._trial import N_ROWS

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 4)).astype(np.float32)
Y = rng.normal(size=(20, 2)).astype(np.float32)
W = rng.normal(size=(4, 2)).astype(np.float32)
TABLE = np.eye(4, dtype=np.float32)
ONE = jax.devices()[:1]
FOUR = {
    "shard_map": lambda: ff.DataParallel(jax.devices()[:4]),
    "pmap": lambda: ff.DataParallel(jax.devices()[:4], implementation="pmap"),
    "virtual": lambda: ff.DataParallel(ONE, virtual_replicas=4),
}


def model_of(function, strategy, loss="mse", state=None, **options):
    """A model of `function(params, inputs, state) -> outputs, collections`, with these options."""

    def init(rngs, *inputs):
        return {"params": {"w": jnp.asarray(W)}, **(state or {})}

    def apply(variables, *inputs, rngs=None, mutable=False):
        found = function(variables["params"]["w"], *inputs, variables)
        outputs, updates = found if isinstance(found, tuple) else (found, {})
        return outputs if mutable is False else (outputs, updates)

    return ff.Model((init, apply), optax.sgd(0.1), loss, strategy=strategy, **options)


def segments(w, x, variables):
    """Message passing: each row receives the sum over its group."""
    group = jnp.zeros(len(x), int)
    return (x + jax.ops.segment_sum(x, group, 1)[group]) @ w


COMBINING = {
    "segments": segments,
    "parents": lambda w, x, _: (x[jnp.arange(len(x)) // 2] + x) @ w,
    "ranks": lambda w, x, _: (x + jnp.argsort(jnp.argsort(x, 0), 0)) @ w,
    "first row": lambda w, x, _: (x - x[0]) @ w,
    "Fourier transform": lambda w, x, _: jnp.abs(jnp.fft.fft(x, axis=0)) @ w,
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("segments", "shard_map"),
        ("parents", "virtual"),
        slow("ranks", "pmap"),
        slow("first row", "shard_map"),
        slow("Fourier transform", "pmap"),
    ],
)
def test_a_model_that_combines_rows_is_not_divided(name, strategy):
    model = model_of(COMBINING[name], FOUR[strategy]())
    for call in (
        lambda: model.fit(X, Y, 20, verbose=0),
        lambda: model.evaluate(X, Y, batch_size=20, verbose=0),
        lambda: model.predict(X, batch_size=20, verbose=0),
    ):
        with pytest.raises(ValueError, match=r"model mixes examples of a batch.*Sharded\(\)"):
            call()


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
    def loss(outputs, targets):
        return jnp.square(rows(outputs) - targets).mean(-1)

    model = model_of(lambda w, x, _: function(x @ w), FOUR["shard_map"](), loss)
    with pytest.raises(ValueError, match=rf"of a batch{where}, .*psum\(x, 'replica'\)"):
        model.fit(X, Y, 20, verbose=0)


def test_a_model_without_outputs_is_divided():
    def penalized(w, x, _):
        return {}, {"losses": {"size": jnp.square(x @ w).mean()}}

    one, four = (
        model_of(penalized, strategy, None).fit(X, batch_size=20, verbose=0).history["loss"]
        for strategy in (ff.DataParallel(ONE), FOUR["shard_map"]())
    )
    assert four == pytest.approx(one, rel=1e-6)


def test_a_loss_that_compares_rows_may_be_computed_without_padding():
    def loss(outputs, targets):
        return jnp.square(outputs - targets).mean(-1) * outputs.mean()

    def fit(**options):
        model = model_of(lambda w, x, _: x @ w, ff.DataParallel(ONE), loss, **options)
        return model.fit(X, Y, 16, shuffle=False, verbose=0).history["loss"][0]

    with pytest.raises(ValueError, match="set across='batch' in the task, or pad=False"):
        fit()
    w, sums = W, []
    for rows in (slice(16), slice(16, 20)):
        step = jax.value_and_grad(lambda w, rows=rows: loss(X[rows] @ w, Y[rows]).mean())
        value, gradient = step(w)
        w = w - 0.1 * gradient
        sums.append(float(value) * len(X[rows]))
    assert fit(pad=False) == pytest.approx(sum(sums) / len(X), rel=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_a_weight_that_begins_near_zero_hides_nothing(size):
    def gated(w, x, variables):
        return (x + variables["params"]["gate"] * x.mean(0)) @ w

    state = {"params": {"w": jnp.asarray(W), "gate": jnp.asarray(size)}}
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model_of(gated, FOUR["shard_map"](), state=state).fit(X, Y, 20, verbose=0)


@pytest.mark.parametrize("name", [slow("segments"), "parents"])
def test_its_rests_are_not_padded(name):
    model = model_of(COMBINING[name], ff.DataParallel(ONE))
    parts = [slice(0, 16), slice(16, 20)]
    outputs = [np.asarray(COMBINING[name](W, jnp.asarray(X[part]), {})) for part in parts]
    np.testing.assert_allclose(
        model.predict(X, batch_size=16, verbose=0), np.concatenate(outputs), rtol=1e-5
    )
    expected = np.mean((np.concatenate(outputs) - Y) ** 2)
    found = model.evaluate(X, Y, batch_size=16, verbose=0)["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["position", slow("number of rows")])
def test_rows_that_depend_on_their_place_or_number_are_refused(name):
    functions = {
        "position": lambda w, x, _: (x + jnp.arange(len(x))[:, None]) @ w,
        "number of rows": lambda w, x, _: (x / len(x)) @ w,
    }
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model_of(functions[name], FOUR["shard_map"]()).fit(X, Y, 20, verbose=0)


def counted(w, x, variables):
    return x @ w, {"stats": {"rows": variables["stats"]["rows"] + len(x)}}


def averaged(w, x, variables):
    return x @ w, {"stats": {"rows": 0.9 * variables["stats"]["rows"] + 0.1 * x.mean()}}


@pytest.mark.parametrize(
    ("strategy", "accumulate", "start", "option"),
    [
        ("shard_map", 1, 0.0, "4 devices.*jax.lax.psum"),
        slow("pmap", 1, 1e6, "4 devices.*jax.lax.psum"),
        slow("virtual", 1, 0.0, "virtual_replicas=4"),
        (None, 4, 1.0, "accumulate=4.*accumulate=1"),
    ],
)
def test_a_state_that_is_not_the_mean_of_its_parts_is_refused(strategy, accumulate, start, option):
    function = counted if accumulate == 1 else averaged
    state = {"stats": {"rows": jnp.asarray(start)}}
    place = FOUR[strategy]() if strategy else ff.DataParallel(ONE)
    model = model_of(function, place, state=state, accumulate=accumulate)
    with pytest.raises(ValueError, match=f"{option}") as error:
        model.fit(X, Y, 20, verbose=0)
    assert "'stats/rows'" in str(error.value)


@pytest.mark.parametrize(
    ("function", "accumulate"), [(averaged, 1), slow(counted, 4)], ids=["mean", "chained sum"]
)
def test_one_that_is_has_the_value_of_one_device(function, accumulate):
    state = {"stats": {"rows": jnp.asarray(0.0)}}
    place = FOUR["shard_map"]() if accumulate == 1 else ff.DataParallel(ONE)
    models = [
        model_of(function, place, state=state, accumulate=accumulate),
        model_of(function, ff.DataParallel(ONE), state=state),
    ]
    found = []
    for model in models:
        model.fit(X, Y, 20, verbose=0)
        found.append(model.state.model_state["stats"]["rows"])
    np.testing.assert_allclose(*found, rtol=1e-6)


class Recentred(nn.Module):
    """Reads the mean of an earlier batch; of the part before where parts compute in turn."""

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.Dense(2)(x)
        kept = self.variable("stats", "mean", lambda: jnp.zeros(2))
        before = kept.value
        if train and not self.is_initializing():
            kept.value = h.mean(0)
        return h - before


class Annealed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        n_calls = self.variable("stats", "calls", lambda: jnp.zeros(()))
        if train and not self.is_initializing():
            n_calls.value += 1
        return nn.Dense(2)(x)


@pytest.mark.parametrize(
    ("module", "words"), [slow(Recentred(), "accumulate=1"), (Annealed(), "'stats/calls'")]
)
def test_parts_that_continue_from_one_another_have_the_state_of_the_batch(module, words):
    model = ff.Model(module, optax.sgd(0.1), "mse", strategy=ff.DataParallel(ONE), accumulate=2)
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, 20, verbose=0)
    model = ff.Model(Annealed(), optax.sgd(0.1), "mse", strategy=FOUR["pmap"]())
    model.fit(X, Y, 20, verbose=0)
    assert model.state.model_state["stats"]["calls"] == 1


@pytest.mark.slow
def test_a_small_part_of_other_rows_is_found_on_replicas_too():
    model = model_of(lambda w, x, _: (x - 9e-3 * x.mean(0)) @ w, FOUR["shard_map"]())
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model.fit(X, Y, 20, verbose=0)


class Codebook(nn.Module):
    """Counts in the step how often each row of a table is the nearest, over all replicas."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        usage = self.variable("codes", "usage", jnp.zeros, (4,))
        used = jax.nn.one_hot(nn.Dense(4)(x).argmax(-1), 4).sum(0)
        if self.axis is not None and not self.is_initializing():
            used = jax.lax.psum(used, self.axis)
        usage.value = used
        return nn.Dense(2)(x)


@pytest.mark.slow
def test_a_module_that_sums_over_the_replicas_is_right():
    counts = []
    for place, axis in ((ff.DataParallel(ONE), None), (FOUR["shard_map"](), "replica")):
        model = ff.Model(Codebook(axis), optax.sgd(0.1), "mse", strategy=place)
        model.fit(X, Y, 20, verbose=0)
        counts.append(model.state.model_state["codes"]["usage"])
    np.testing.assert_array_equal(*counts)
    numbered = model_of(lambda w, x, _: x @ w + jax.lax.axis_index("replica"), FOUR["pmap"]())
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        numbered.fit(X, Y, 20, verbose=0)
    with pytest.raises(ValueError, match="'codes/usage'"):
        ff.Model(Codebook(), optax.sgd(0.1), "mse", strategy=FOUR["pmap"]()).fit(
            X, Y, 20, verbose=0
        )


class Sown(nn.Module):
    reduce: str

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2)(x)
        self.sow("losses", "size", getattr(jnp, self.reduce)(h**2))
        return h


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("shard_map", 1), slow("virtual", 1), slow(None, 4)]
)
def test_a_penalty_that_is_a_sum_is_refused(strategy, accumulate):
    place = FOUR[strategy]() if strategy else ff.DataParallel(ONE)
    model = ff.Model(Sown("sum"), optax.sgd(0.1), "mse", strategy=place, accumulate=accumulate)
    with pytest.raises(ValueError, match="the penalty that the model adds .* a mean over"):
        model.fit(X, Y, 20, verbose=0)


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
def test_a_random_penalty_is_compared_on_average():
    model = ff.Model(Balanced(), optax.sgd(0.1), "mse", strategy=FOUR["shard_map"]())
    with pytest.raises(ValueError, match="the penalty that the model adds"):
        model.fit(X, Y, 20, verbose=0)


class Normalized(nnx.Module):
    """BatchNorm, and perhaps the mean of the batch besides."""

    def __init__(self, *, is_centered):
        self.layer, self.is_centered = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), is_centered
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.norm(self.layer(x))
        return h - h.mean(0) if self.is_centered else h


@pytest.mark.slow
def test_batchnorm_is_tried_in_evaluation_mode():
    model = ff.Model(Normalized(is_centered=True), optax.sgd(0.1), "mse", strategy=FOUR["pmap"]())
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model.fit(X, Y, 20, verbose=0)
    model = ff.Model(Normalized(is_centered=False), optax.sgd(0.1), "mse", strategy=FOUR["pmap"]())
    model.fit(X, Y, 20, verbose=0)


@pytest.mark.slow
def test_a_loss_that_compares_rows_is_refused_beside_batchnorm_too():
    def loss(outputs, targets):
        return ((outputs - outputs.mean(0) - targets) ** 2).mean(-1)

    model = ff.Model(Normalized(is_centered=False), optax.sgd(0.1), loss, strategy=FOUR["pmap"]())
    with pytest.raises(ValueError, match="The loss gives each example a value that depends"):
        model.fit(X, Y, 20, verbose=0)


class Dropped(nn.Module):
    is_placed: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        x = x + jnp.arange(len(x))[:, None] if self.is_placed else x
        return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


@pytest.mark.parametrize(
    ("is_placed", "words"), [(False, "The loss .* other examples"), slow(True, "mixes examples")]
)
def test_dropout_hides_neither_the_number_nor_the_place_of_rows(is_placed, words):
    def loss(outputs, targets):
        return ((outputs - targets) ** 2).sum(-1) / (1 if is_placed else len(outputs))

    model = ff.Model(Dropped(is_placed), optax.sgd(0.1), loss, strategy=FOUR["shard_map"]())
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, 20, verbose=0)
    model = ff.Model(Dropped(), optax.sgd(0.1), "mse", strategy=FOUR["shard_map"]())
    model.fit(X, Y, 20, verbose=0)


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


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("shard_map", 1), slow("virtual", 1), slow(None, 2)]
)
def test_numbers_that_a_module_draws_by_itself_are_no_combination_of_rows(strategy, accumulate):
    def fit(*, is_scaled):
        place = FOUR[strategy]() if strategy else ff.DataParallel(ONE)
        options = {"losses": nnx.Intermediate, "strategy": place, "accumulate": accumulate}
        module = Autoencoder(is_scaled=is_scaled)
        return ff.Model(module, optax.sgd(0.1), "mse", **options).fit(X, Y, 20, verbose=0)

    assert np.isfinite(fit(is_scaled=False)["loss"]).all()
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        fit(is_scaled=True)


def longer(w, x, _):
    """Rows of sequences, which are centred on the batch where they are long."""
    outputs = (x @ w).mean(1)
    return outputs - outputs.mean(0) if x.shape[1] > 2 else outputs


SEQUENCES = [rng.normal(size=(n, t, 4)).astype(np.float32) for n, t in ((20, 2), (20, 3), (6, 3))]


@pytest.mark.parametrize("way", ["fit", "evaluate", slow("train_on_batch")])
def test_batches_of_another_shape_are_tried_by_themselves(way):
    short, long, rest = ((x, Y[: len(x)]) for x in SEQUENCES)
    model = model_of(longer, FOUR["shard_map"]())
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        if way == "train_on_batch":
            model.train_on_batch(*short)
            model.train_on_batch(*long)
        else:
            getattr(model, way)([short, long], verbose=0)
    one = model_of(longer, ff.DataParallel(ONE))
    found = one.evaluate([short, rest], verbose=0)["loss"]
    errors = [(longer(W, x, None) - y) ** 2 for x, y in (short, rest)]
    assert found == pytest.approx(np.concatenate(errors).mean(), rel=1e-5)


def test_a_branch_on_the_number_of_rows_is_tried_at_that_number():
    def branched(w, x, _):
        return (x - x.mean(0) if len(x) > 15 else x) @ w

    model = model_of(branched, ff.DataParallel(ONE))
    errors = [(branched(W, X[part], None) - Y[part]) ** 2 for part in (slice(16), slice(16, 20))]
    found = model.evaluate(X, Y, batch_size=16, verbose=0)["loss"]
    assert found == pytest.approx(np.concatenate(errors).mean(), rel=1e-5)


def balance(w, x):
    """A load balancing term, which is a product of means."""
    p = jax.nn.softmax(x @ w)
    return (jax.nn.one_hot(p.argmax(-1), 2).mean(0) * p.mean(0)).sum()


def beside_values(outputs, balance, targets):
    return ((outputs - targets) ** 2).mean(-1), 0.1 * balance


def in_a_mean(outputs, balance, targets):
    return ((outputs - targets) ** 2).mean() + 0.1 * balance


@pytest.mark.parametrize("loss", [beside_values, slow(in_a_mean)])
def test_an_output_for_the_whole_batch_has_to_be_the_mean_of_those_of_parts(loss):
    def fit(term):
        model = model_of(lambda w, x, _: ((x @ w, term(w, x)), {}), FOUR["shard_map"](), loss)
        return model.fit(X, Y, 20, verbose=0)

    with pytest.raises(ValueError, match="the model in its output '1' .* differs from the mean"):
        fit(balance)
    history = fit(lambda w, x: (x @ w).mean())
    found = history["loss"][0] + sum(history.get("penalty", ()))
    expected = ((X @ W - Y) ** 2).mean() + 0.1 * (X @ W).mean()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_large_constant_does_not_hide_a_penalty_that_is_no_mean():
    def spread(w, x, variables):  # The negative entropy of the mean prediction.
        mean = jax.nn.softmax(0.2 * x @ w).mean(0)
        return x @ w, {"losses": {"entropy": (mean * jnp.log(mean)).sum()}}

    with pytest.raises(ValueError, match="the penalty that the model adds"):
        model_of(spread, FOUR["shard_map"]()).fit(X, Y, 20, verbose=0)


class Watched(nnx.Module):
    """BatchNorm beside a scale of the inputs that does not pass through it."""

    def __init__(self, moment):
        self.normalize = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        self.scale, self.moment = nnx.Variable(jnp.zeros(4)), moment

    def __call__(self, x):
        self.scale[...] = 0.9 * self.scale[...] + 0.1 * self.moment(x)
        return self.dense(self.normalize(x))


@pytest.mark.parametrize("moment", [lambda x: x.std(0), slow(lambda x: x.sum(0))])
def test_batchnorm_does_not_hide_a_state_beside_it(moment):
    model = ff.Model(Watched(moment), optax.sgd(0.1), "mse", strategy=FOUR["shard_map"]())
    with pytest.raises(ValueError, match="state 'Variable/scale'"):
        model.fit(X, Y, 20, verbose=0)
    parts = ff.Model(
        Watched(moment), optax.sgd(0.1), "mse", strategy=ff.DataParallel(ONE), accumulate=2
    )
    with pytest.raises(ValueError, match="state 'Variable/scale'"):
        parts.fit(X, Y, 20, verbose=0)
    kept = ff.Model(Watched(lambda x: x.mean(0)), optax.sgd(0.1), "mse", strategy=model.strategy)
    assert np.isfinite(kept.fit(X, Y, 20, verbose=0)["loss"]).all()


def test_position_is_seen_where_it_repeats():
    def even(outputs, targets):
        return (jnp.arange(len(outputs)) % 2 == 0) * ((outputs - targets) ** 2).mean(-1)

    with pytest.raises(ValueError, match="The loss gives each example a value that depends on"):
        model_of(lambda w, x, _: x @ w, FOUR["shard_map"](), even).fit(
            X[:12], Y[:12], 12, verbose=0
        )


def own_metric(measure):
    return ff.metrics.Metric(measure, lambda sums: sums["s"] / sums["n"], "mine", mode="min")


def weighted_mean(outputs, targets, weights):
    error = jnp.abs(outputs - targets).mean(-1)
    return {"s": (weights * error).sum() / weights.sum(), "n": 1}


def unweighted(outputs, targets, weights):
    return {"s": jnp.abs(outputs - targets).mean(-1).sum(), "n": len(outputs)}


@pytest.mark.parametrize(
    ("measure", "strategy"), [(weighted_mean, FOUR["shard_map"]), (unweighted, lambda: None)]
)
def test_sums_of_a_metric_add_up_and_leave_out_rows_of_weight_0(measure, strategy):
    strategy = strategy() or ff.DataParallel(ONE)
    model = model_of(lambda w, x, _: x @ w, strategy, metrics=[own_metric(measure)])
    with pytest.raises(ValueError, match="'mine' cannot be measured .*sums"):
        model.evaluate(X, Y, batch_size=16, verbose=0)


def test_sums_of_a_metric_may_be_numbers():
    metric = own_metric(weighted_mean)
    model = model_of(lambda w, x, _: x @ w, ff.DataParallel(ONE), metrics=[metric])
    found = model.evaluate(X, Y, batch_size=20, verbose=0)["mine"]
    assert found == pytest.approx(np.abs(X @ W - Y).mean(), rel=1e-5)


def test_an_axis_as_long_as_the_trial_is_not_taken_for_rows():
    def stacked(w, x, _):
        return (x @ w, jnp.stack([x.mean(0)] * N_ROWS).sum(-1)), {}

    def first(outputs, others, targets):
        return ((outputs - targets) ** 2).mean(-1)

    model = model_of(stacked, FOUR["shard_map"](), first)
    assert np.isfinite(model.fit(X, Y, 20, verbose=0)["loss"]).all()


def test_a_state_that_replicas_alone_would_change_hides_nothing_else():
    """With `accumulate` on one device a counter of rows is right, and the loss is not."""

    def by_number(outputs, targets):
        return ((outputs - targets) ** 2).mean(-1) / len(outputs)

    options = {"state": {"stats": {"rows": jnp.zeros((), int)}}, "accumulate": 2}
    model = model_of(counted, ff.DataParallel(ONE), by_number, **options)
    with pytest.raises(ValueError, match="The loss gives each example a value that depends on"):
        model.fit(X, Y, 20, verbose=0)


def test_sums_may_count_all_rows_where_none_are_added():
    model = model_of(lambda w, x, _: x @ w, FOUR["shard_map"](), metrics=[own_metric(unweighted)])
    found = model.evaluate(X, Y, batch_size=20, verbose=0)["mine"]
    assert found == pytest.approx(np.abs(X @ W - Y).mean(), rel=1e-5)


def test_an_output_that_the_loss_gets_from_its_own_device_may_be_anything():
    """The penalty is sown, so that the loss is not given the rows of all devices."""

    def spread(w, x, variables):
        return (x @ w, x.std(0)), {"losses": {"size": (x @ w).mean()}}

    model = model_of(spread, FOUR["shard_map"](), lambda y, std, t: ((y - t) ** 2).mean(-1))
    assert np.isfinite(model.fit(X, Y, 20, verbose=0)["loss"]).all()


class Ghosts(nn.Module):
    """BatchNorm over groups of 5 rows."""

    @nn.compact
    def __call__(self, x, train: bool):
        groups = x.reshape(-1, 5, 4)
        normalize = nn.BatchNorm(use_running_average=not train, axis=-1)
        return nn.Dense(2)(normalize(groups).reshape(x.shape))


@pytest.mark.parametrize("mutable", [None, ["batch_stats"]])
def test_batchnorm_over_groups_of_rows_is_accepted(mutable):
    task = ff.TrainTask(Ghosts(), optax.sgd(0.1), "mse", [(X, Y)], mutable=mutable)
    loop = ff.TrainLoop(Ghosts(), task, 0, strategy=FOUR["shard_map"](), stdout=False)
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
    for place in (ff.DataParallel(ONE), FOUR["shard_map"]()):
        model = model_of(lambda w, x, _: x @ w, place, None, objective=residual)
        found.append(model.fit(X, batch_size=20, epochs=2, verbose=0)["loss"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_what_is_neither_divided_nor_padded_is_not_asked():
    model = model_of(
        segments, ff.DataParallel(ONE), lambda o, t: ((o - o.mean(0) - t) ** 2).mean(-1)
    )
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
    for options in ({"strategy": FOUR["shard_map"]()}, {"strategy": None, "accumulate": 2}):
        options["strategy"] = options["strategy"] or ff.DataParallel(ONE)
        with pytest.raises(ValueError, match="model mixes examples of a batch"):
            model_of(function, **options).fit(X, Y, 20, verbose=0)


@pytest.mark.parametrize(("size", "least"), [(16, 6), slow(16, 16), slow(7, 7), slow(9, 9)])
def test_a_remainder_that_is_computed_otherwise_is_not_padded(size, least):
    def scaled(w, x, _):
        return (2.0 if len(x) >= least else 1.0) * x @ w

    model = model_of(scaled, ff.DataParallel(ONE))
    parts = np.split(X, range(size, 20, size))
    outputs = np.concatenate([scaled(W, part, None) for part in parts])
    found = model.evaluate(X, Y, batch_size=size, verbose=0)["loss"]
    assert found == pytest.approx(((outputs - Y) ** 2).mean(), rel=1e-5)


def scaled(w, x, _):
    return (2.0 if len(x) > 1 else 1.0) * x @ w


def beside_a_table(w, x, _):
    """A single row is multiplied with each row of the table, four rows with one each."""
    return (x + (x * TABLE).mean(0)) @ w


def apart_in_values(w, x, _):
    return centered_slopes(x @ w)


@pytest.mark.parametrize("function", [scaled, beside_a_table, apart_in_values])
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 4}, {"strategy": "four"}, slow({"example_grads_hook": lambda grads: grads})],
)
def test_a_model_that_computes_single_rows_differently_is_not_divided_into_them(function, options):
    is_one = "strategy" not in options
    options = {**options, "strategy": ff.DataParallel(ONE) if is_one else FOUR["shard_map"]()}
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model_of(function, **options).fit(X, Y, 4, verbose=0)


def sown_beside_a_table(w, x, _):
    return x @ w, {"losses": {"size": ((x * TABLE) @ w).mean()}}


def kept_beside_a_table(w, x, state):
    return x @ w, {"kept": {"mean": 0 * state["kept"]["mean"] + (x * TABLE).mean()}}


@pytest.mark.parametrize("strategy", ["shard_map", "virtual", "accumulate"])
def test_state_and_penalty_are_compared_by_part_where_no_halves_are_accepted(strategy):
    options = {"accumulate": 4, "strategy": ff.DataParallel(ONE)}
    options = options if strategy == "accumulate" else {"strategy": FOUR[strategy]()}
    with pytest.raises(ValueError, match="the penalty that the model adds"):
        model_of(sown_beside_a_table, **options).fit(X, Y, 4, verbose=0)
    state = {"kept": {"mean": np.float32(0)}}
    with pytest.raises(ValueError, match="the model updates the state 'kept/mean'"):
        model_of(kept_beside_a_table, state=state, **options).fit(X, Y, 4, verbose=0)


def test_a_model_of_an_operation_for_each_row_is_divided():
    def stacked(w, x, _):
        return jnp.stack([jnp.tanh(row) for row in x]) @ w

    losses = [
        model_of(stacked, strategy()).fit(X, Y, 4, shuffle=False, verbose=0)["loss"][0]
        for strategy in (lambda: ff.DataParallel(ONE), FOUR["shard_map"])
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def straight_through(mean):
    return mean - jax.lax.stop_gradient(mean)


def in_the_gradient(w, x, _):
    return x @ w - straight_through((x @ w).mean(0))


def test_rows_that_are_mixed_in_the_gradient_alone_are_not_divided():
    with pytest.raises(ValueError, match="would change its outputs or gradients"):
        model_of(in_the_gradient, FOUR["shard_map"]()).fit(X, Y, 20, verbose=0)
    found = model_of(in_the_gradient, ff.DataParallel(ONE)).fit(X, Y, 16, shuffle=False, verbose=0)

    def loss(w, part):
        return ((in_the_gradient(w, X[part], None) - Y[part]) ** 2).mean()

    first, rest = slice(16), slice(16, 20)
    w = W - 0.1 * jax.grad(loss)(W, first)
    expected = float(16 * loss(W, first) + 4 * loss(w, rest)) / 20
    assert found["loss"][0] == pytest.approx(expected, rel=1e-5)

    def sown(w, x, _):
        return x @ w, {"losses": {"size": straight_through(((x @ w).mean(0) ** 2).sum())}}

    with pytest.raises(ValueError, match="the penalty that the model adds"):
        model_of(sown, FOUR["shard_map"]()).fit(X, Y, 20, verbose=0)

    def baseline(outputs, targets):
        weight = jnp.exp(straight_through(outputs[:, 0]))
        return weight * targets[:, 0] + (1 - weight) * targets[:, 0].mean()

    with pytest.raises(ValueError, match="The loss gives each example a value that depends"):
        model_of(lambda w, x, _: x @ w, ff.DataParallel(ONE), baseline).fit(X, Y, 16, verbose=0)


@pytest.mark.parametrize(
    ("start", "strength", "later"),
    [
        (0.0, lambda step: step >= 100, lambda step: step + 1),
        slow(0, lambda step: step >= 1500, lambda step: step + 1),
        slow(np.float16(65000), lambda step: step > 65100, lambda step: step + 32),
        slow([0], lambda step: (step[0] > 1) & (step[0] < 900), lambda step: step + 1),
        slow(False, lambda is_on: is_on, lambda is_on: True),
        slow(np.zeros(4, "f4"), lambda gate: gate, lambda gate: gate + 0.1),
    ],
)
def test_rows_that_are_mixed_from_a_later_step_on_are_not_divided(start, strength, later):
    def warmed(w, x, variables):
        known = variables["stats"]["known"]
        return (x - strength(known) * x.mean(0)) @ w, {"stats": {"known": later(known)}}

    state = {"stats": {"known": jnp.asarray(start)}}
    with pytest.raises(ValueError, match="model mixes examples of a batch"):
        model_of(warmed, FOUR["shard_map"](), state=state).fit(X, Y, 20, verbose=0)


def test_a_constant_of_the_state_is_no_counter():
    def waves(w, x, variables):
        scale = variables["stats"]["scale"]
        ordered = jnp.take_along_axis(x, jnp.argsort(x, 1), 1)  # No proof knows this to keep rows.
        return jnp.sin(2 * jnp.pi * scale * ordered) @ w, {"stats": {"scale": scale}}

    state = {"stats": {"scale": jnp.asarray(1.0)}}
    found = model_of(waves, FOUR["shard_map"](), state=state).fit(X, Y, 20, verbose=0)
    assert np.isfinite(found["loss"]).all()


@pytest.mark.slow
def test_examples_whose_gradients_are_taken_alone_must_not_be_mixed():
    def joint(w, x, _):
        return (x - jax.lax.pmean(x.mean(0), "replica")) @ w

    options = {"example_grads_hook": lambda grads: grads, "strategy": ff.DataParallel(ONE)}
    over_four = options | {"strategy": FOUR["shard_map"]()}
    for model in (model_of(COMBINING["first row"], **options), model_of(joint, **over_four)):
        with pytest.raises(ValueError, match=r"mixes examples .* whole batch. BatchNorm"):
            model.fit(X, Y, 20, verbose=0)
    found = model_of(lambda w, x, _: x @ w, **options).fit(X, Y, 20, verbose=0)
    assert found["loss"][0] == pytest.approx(((X @ W - Y) ** 2).mean(), rel=1e-5)


def test_the_weights_of_padded_batches_are_tried_in_an_objective():
    def normalized(apply, batch, rngs):
        values = ((apply(*batch.inputs) - batch.targets[0]) ** 2).mean(-1)
        return values if batch.weights is None else values * batch.weights / batch.weights.mean()

    def model():
        return model_of(lambda w, x, _: x @ w, ff.DataParallel(ONE), None, objective=normalized)

    with pytest.raises(ValueError, match="Cannot compute this objective with batches that may be"):
        model().fit(X, Y, 16, verbose=0)
    found = model().fit(X, Y, 20, verbose=0)["loss"][0]
    assert found == pytest.approx(((X @ W - Y) ** 2).mean(), rel=1e-5)

    def unpadded(apply, batch, rngs):
        values = ((apply(*batch.inputs) - batch.targets[0]) ** 2).mean(-1)
        return values / values.mean() if batch.weights is None else values

    options = {"objective": unpadded, "pad": False}
    with pytest.raises(ValueError, match="Cannot compute this objective with 4 devices"):
        model_of(lambda w, x, _: x @ w, FOUR["shard_map"](), None, **options).fit(
            X, Y, 16, verbose=0
        )


@pytest.mark.parametrize("way", ["fit", slow("evaluate")])
def test_a_state_with_a_row_for_each_example_cannot_be_divided(way):
    def recurrent(w, x, variables):
        return (x + variables["stats"]["carry"]) @ w, {"stats": {"carry": x}}

    state = {"stats": {"carry": jnp.zeros((20, 4))}}
    model = model_of(recurrent, FOUR["shard_map"](), state=state)
    with pytest.raises(ValueError, match=r"a part of it has 5 examples.*Sharded\(\)"):
        getattr(model, way)(X, Y, batch_size=20, verbose=0)

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core.scope import DenyList
from loops import assert_close

from flaxfit.modules import from_nnx, update_nnx

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Net(nnx.Module):
    """A dense layer, batch normalization and dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class TwoDropouts(nnx.Module):
    """Gives the masks of two layers."""

    def __init__(self, rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.first(x), self.second(x)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_variables_are_plain_dicts_of_arrays_without_random_states():
    variables = from_nnx(Net).init(jax.random.key(0), X)
    assert shapes(variables) == {
        "params": {
            "hidden": {"kernel": (4, 6), "bias": (6,)},
            "norm": {"scale": (6,), "bias": (6,)},
            "out": {"kernel": (6, 2), "bias": (2,)},
        },
        "batch_stats": {"norm": {"mean": (6,), "var": (6,)}},
    }
    assert all(type(leaf) is type(jnp.ones(1)) for leaf in jax.tree.leaves(variables))


def test_init_of_a_factory_draws_the_weights_that_nnx_draws_of_the_same_key():
    key = jax.random.key(3)
    init, _ = from_nnx(lambda rngs: Net(rngs))
    expected = from_nnx(Net(nnx.Rngs(key))).init(None)
    assert_equal(init(key, X), expected)
    dropout = jax.random.key(1)
    assert_equal(
        init({"params": key, "dropout": dropout}, X),
        from_nnx(Net(nnx.Rngs(key, dropout=dropout))).init(None),
    )
    assert shapes(jax.eval_shape(init, key, X)) == shapes(expected)
    assert_close(jax.jit(init)(key, X), expected, atol=1e-6)


def test_evaluation_computes_what_the_module_in_eval_mode_computes():
    net = Net(nnx.Rngs(0))
    net.norm.mean[...] = jnp.arange(6.0)
    init, apply = from_nnx(net, train=False)
    outputs, updates = jax.jit(lambda v, x: apply(v, x, mutable=["batch_stats"]))(init(None), X)
    expected = nnx.view(net, deterministic=True, use_running_average=True)(X)
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    assert_equal(updates, {"batch_stats": init(None)["batch_stats"]})


@pytest.mark.slow
def test_batch_statistics_move_in_training_as_they_do_in_the_module_itself():
    net = Net(nnx.Rngs(0))
    init, apply = from_nnx(net, train=True)
    variables = init(None)
    apply_ = jax.jit(lambda v, x, k: apply(v, x, rngs={"dropout": k}, mutable=DenyList("params")))
    _, updates = apply_(variables, X, jax.random.key(0))
    net(X)
    moved = from_nnx(net).init(None)["batch_stats"]
    assert updates.keys() == {"batch_stats"}
    assert_close(updates["batch_stats"], moved, rtol=1e-5)
    assert np.abs(moved["norm"]["mean"] - variables["batch_stats"]["norm"]["mean"]).max() > 1e-3


@pytest.mark.parametrize(
    ("mutable", "collections"),
    [
        (True, {"params", "batch_stats"}),
        ("batch_stats", {"batch_stats"}),
        (["params"], {"params"}),
        ([], set()),
        (DenyList("batch_stats"), {"params"}),
    ],
)
def test_updates_hold_the_mutable_collections(mutable, collections):
    init, apply = from_nnx(Net, train=False)
    variables = init(jax.random.key(0))
    outputs, updates = apply(variables, X, mutable=mutable)
    assert outputs.shape == (8, 2)
    assert updates.keys() == collections
    assert_equal(updates, {name: variables[name] for name in collections})


@pytest.mark.parametrize("rngs", [nnx.Rngs(0), nnx.Rngs(params=0, dropout=1)])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_each_call_and_each_layer_has_the_masks_of_its_key(rngs, make_key):
    apply = from_nnx(TwoDropouts(rngs), train=True).apply
    masks = jax.jit(lambda key: apply({}, jnp.ones((8, 32)), rngs={"dropout": key}))
    first, second = masks(make_key(0))
    assert not np.array_equal(first, second)
    assert 0.3 < np.mean(np.asarray(first) > 0) < 0.7
    assert_equal(masks(make_key(0)), (first, second))
    assert not np.array_equal(masks(make_key(1))[0], first)
    assert_equal(apply({}, jnp.ones((8, 32)), rngs=make_key(0)), (first, second))


def test_a_stream_has_the_key_of_its_name():
    apply = from_nnx(TwoDropouts(nnx.Rngs(params=0, dropout=1)), train=True).apply
    x, (a, b) = jnp.ones((8, 32)), jax.random.split(jax.random.key(0))
    alone = apply({}, x, rngs={"dropout": b})
    assert_equal(apply({}, x, rngs={"params": a, "noise": a, "dropout": b}), alone)


def test_drawing_without_a_key_is_an_error_in_training_and_needs_none_in_evaluation():
    module = TwoDropouts(nnx.Rngs(0))
    with pytest.raises(ValueError, match="first/rngs, second/rngs.*given no key.*rngs="):
        from_nnx(module, train=True).apply({}, jnp.ones((2, 3)))
    assert_equal(from_nnx(module, train=False).apply({}, X), (X, X))
    batch_norm = from_nnx(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), train=True)
    assert batch_norm.apply(batch_norm.init(None), X).shape == X.shape


@pytest.mark.slow
def test_layers_repeated_by_scan_draw_masks_of_their_own():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def create(rngs):
                return nnx.Dropout(0.5, rngs=rngs)

            self.layers = create(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    first, second, third = from_nnx(Deep, train=True).apply({}, X, rngs=jax.random.key(0))
    assert not np.array_equal(first == 0, second == 0)
    assert not np.array_equal(second == 0, third == 0)
    assert_equal(from_nnx(Deep, train=False).apply({}, X), np.stack([X] * 3))


@pytest.mark.slow
def test_tied_weights_stay_one_leaf_with_the_gradients_of_both_uses():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encode = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.decode = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.decode.kernel = self.encode.kernel

        def __call__(self, x):
            return self.decode(self.encode(x))

    init, apply = from_nnx(Tied)
    params = init(jax.random.key(0))["params"]
    (kernel,) = jax.tree.leaves(params)
    gradient = jax.grad(lambda p: apply({"params": p}, X).sum())(params)
    expected = jax.grad(lambda w: (X @ w @ w).sum())(kernel)
    np.testing.assert_allclose(jax.tree.leaves(gradient)[0], expected, rtol=1e-4)


def test_variables_of_another_type_are_a_collection_and_so_are_bare_arrays():
    def define():
        class Calls(nnx.Variable):
            pass

        class Counting(nnx.Module):
            def __init__(self):
                self.n = Calls(jnp.zeros((), jnp.int32))
                self.layers = nnx.List([nnx.data(jnp.arange(3.0))])

            def __call__(self, x):
                self.n[...] += 1
                return x * self.layers[0]

        return Counting()

    # Twice, as a notebook cell that is run again defines the same names anew.
    for init, apply in (from_nnx(define()), from_nnx(define())):
        variables = init(None)
        assert shapes(variables) == {"Calls": {"n": ()}, "constants": {"layers": {"0": (3,)}}}
        outputs, updates = apply(variables, jnp.ones(3), mutable=["Calls"])
        assert_equal((outputs, updates), (np.arange(3.0), {"Calls": {"n": 1}}))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_belong_to_a_call_and_not_to_the_model():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            self.last = nnx.Intermediate(x)
            return x

    module = Sowing()
    module(X[:2])  # leaves what it sowed in the instance
    init, apply = from_nnx(module)
    assert init(None) == {}
    _, updates = apply({}, X, mutable=["intermediates"])
    assert_equal(updates, {"intermediates": {"seen": (X,), "last": X}})
    assert apply({}, X, mutable=DenyList("intermediates"))[1] == {}
    assert module.seen.get_value()[0].shape == (2, 4)


def test_the_module_has_its_own_switch_set_and_its_named_inputs_passed_on():
    class Switch(nnx.Module):
        def __call__(self, x, scale=1.0, *, train):
            return x * scale if train else -x * scale

    assert_equal(from_nnx(Switch(), train=True).apply({}, X), X)
    assert_equal(from_nnx(Switch(), train=False).apply({}, X, scale=2.0), -2 * X)
    assert_equal(from_nnx(Switch(), call=lambda m, x: m(x, train=True)).apply({}, X), X)
    assert_equal(from_nnx(Switch()).apply({}, X, train=False), -X)


def test_modes_reach_the_layers_that_have_them():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(from_nnx(dropout, deterministic=True).apply({}, X), X)
    assert not dropout.deterministic


def test_init_returns_the_present_weights_and_update_nnx_writes_them_back():
    net, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    init, apply = from_nnx(net, train=False)
    variables = from_nnx(other).init(None)
    update_nnx(net, variables)
    assert_equal(init(None), variables)
    before = apply(variables, X)
    for donated in variables, init(None):
        jax.tree.map(lambda leaf: leaf.delete(), donated)
    np.testing.assert_allclose(
        nnx.view(net, deterministic=True, use_running_average=True)(X), before
    )


def test_update_nnx_writes_all_variables_or_none_and_names_what_does_not_fit():
    net = Net(nnx.Rngs(0))
    variables = from_nnx(net).init(None)
    other = from_nnx(Net(nnx.Rngs(1))).init(None)
    wrong = {**other, "batch_stats": {"norm": {"mean": jnp.zeros(5), "var": jnp.ones(6)}}}
    with pytest.raises(ValueError, match=r"batch_stats/norm/mean is \(6,\) .* and \(5,\)"):
        update_nnx(net, wrong)
    params = {"params": other["params"]}
    for use in partial(update_nnx, net), partial(from_nnx(net, train=False).apply, x=X):
        with pytest.raises(ValueError, match="lack batch_stats/norm/mean, .*var, .*holds them"):
            use(params)
    assert_equal(from_nnx(net).init(None), variables)
    with pytest.raises(TypeError, match="instance of an NNX module"):
        update_nnx(Net, variables)
    with pytest.raises(TypeError, match="by collection, such as .* got NoneType"):
        update_nnx(net, None)


def test_a_trace_calls_the_module_once():
    calls = []

    def call(module, x):
        calls.append(x)
        return module(x)

    init, apply = from_nnx(lambda rngs: nnx.Linear(4, 6, rngs=rngs), call=call)
    jax.jit(apply)(init(jax.random.key(0)), X)
    assert len(calls) == 1


@pytest.mark.slow
def test_training_under_pmap_is_training_of_the_same_replicas_one_by_one():
    init, apply = from_nnx(Net, train=True)
    variables, keys = init(jax.random.key(0)), jax.random.split(jax.random.key(1), 4)

    def gradients(params, x, key):
        def loss(params):
            inputs = {**variables, "params": params}
            y, updates = apply(inputs, x, rngs={"dropout": key}, mutable=["batch_stats"])
            return jnp.square(y).mean(), updates

        return jax.grad(loss, has_aux=True)(params)

    parallel = jax.pmap(gradients, in_axes=(None, 0, 0))(
        variables["params"], X.reshape(4, 2, 4), keys
    )
    one = jax.jit(gradients)
    for i in range(4):
        expected = one(variables["params"], X.reshape(4, 2, 4)[i], keys[i])
        mine = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], parallel)
        assert_close(mine, expected, atol=1e-5)
    masks = np.asarray(parallel[0]["out"]["kernel"])
    assert not np.array_equal(masks[0], masks[1])


def test_a_class_that_needs_more_than_rngs_and_what_makes_no_module_are_worded_errors():
    for wrong, name in (nnx.Linear, "Linear"), (lambda rngs: 3, "lambda"), ("a text", "'a text'"):
        with pytest.raises(TypeError, match=f"makes one of its rngs alone, got .*{name}"):
            from_nnx(wrong)


class Noisy(nnx.Module):
    """Draws noise also in evaluation, and keeps the streams that it was given."""

    def __init__(self, rngs):
        self.rngs = rngs

    def __call__(self, x):
        return x + jax.random.normal(self.rngs.noise(), x.shape)


@pytest.mark.parametrize("make", [lambda: Noisy, lambda: Noisy(nnx.Rngs(0))])
def test_a_module_may_keep_its_streams_and_draws_no_key_when_it_is_taken_apart(make):
    model = make()
    training, evaluation = (from_nnx(model, train=train) for train in (True, False))
    first, again, other = (training.apply({}, X, rngs=jax.random.key(i)) for i in (0, 0, 1))
    assert_equal(first, again)
    assert not np.array_equal(first, other)
    assert_equal(evaluation.apply({}, X, rngs={"noise": jax.random.key(0)}), first)
    if isinstance(model, Noisy):
        assert model.rngs.default.count[...] == 0


def test_drawing_in_evaluation_without_a_key_is_an_error_that_names_the_stream():
    apply = jax.jit(from_nnx(Noisy(nnx.Rngs(params=0, noise=1)), train=False).apply)
    with pytest.raises(ValueError, match=r"from rngs/noise.*eval_rngs=\('noise',\)"):
        apply({}, X)


def test_streams_that_are_split_without_any_effect_need_no_key_in_evaluation():
    class Split(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            scanned = nnx.scan(lambda drop, x: drop(x), in_axes=(0, 0), out_axes=0)
            return nnx.split_rngs(splits=len(x))(scanned)(self.dropout, x)

    model = Split(nnx.Rngs(0))
    assert_equal(from_nnx(model, train=False).apply({}, X), X)
    with pytest.raises(ValueError, match="given no key"):
        from_nnx(model, train=True).apply({}, X)


def test_the_types_that_losses_names_are_terms_of_the_loss_and_belong_to_a_call():
    class Kl(nnx.Variable):
        pass

    class Variational(nnx.Module):
        def __init__(self):
            self.before = Kl(jnp.ones(()))

        def __call__(self, x):
            self.before[...] += 1
            self.after = Kl(x.sum())
            return x

    for losses in (Kl, "Kl", [Kl]):
        init, apply = from_nnx(Variational(), losses=losses)
        assert init(None) == {}
        _, updates = apply({}, jnp.ones(3), mutable=True)
        assert_equal(updates, {"losses": {"before": 1, "after": 3}})
        assert apply({}, jnp.ones(3), mutable=["Kl"])[1] == {}
        update_nnx(Variational(), {}, losses=losses)
    with pytest.raises(ValueError, match="variables lack Kl/before, which the model has"):
        update_nnx(Variational(), {})
    with pytest.raises(ValueError, match="losses contains Kll, .* only in Kl"):
        from_nnx(Variational(), losses="Kll").apply(
            from_nnx(Variational()).init(None), X, mutable=True
        )


@pytest.mark.slow
def test_a_class_may_keep_plain_arrays_as_its_instances_do():
    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 2, rngs=rngs)
            self.shift, self.order = jnp.ones(2), jnp.arange(2)
            self.several = nnx.List([nnx.data(jnp.ones(3))])

        def __call__(self, x):
            return self.layer(x)[:, self.order] + self.shift

    shape = {"shift": (2,), "order": (2,), "several": {"0": (3,)}}
    for model in (Plain, Plain, Plain(nnx.Rngs(0))):
        init, apply = from_nnx(model)
        variables = jax.jit(init)(jax.random.key(0))
        assert shapes(variables)["constants"] == shape
        assert apply(variables, X).shape == (8, 2)


class Streams(nnx.Module):
    """Draws from the streams that its call is given."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, rngs=None):
        if rngs is None:
            return []
        return [rngs.dropout(), rngs.noise(), rngs.noise(), rngs()]


def drawn(rngs):
    """The numbers of the keys that a call draws."""
    init, apply = from_nnx(Streams)
    keys = apply(init(jax.random.key(0), X), X, rngs=rngs)
    return [int(jax.random.bits(key)) for key in keys]


KEYS = dict(zip(("dropout", "noise"), jax.random.split(jax.random.key(1)), strict=True))


def test_a_call_that_takes_rngs_is_given_the_streams_of_the_step():
    numbers = drawn(KEYS)
    assert len(set(numbers)) == 4
    assert numbers == drawn(KEYS)  # A function of the keys alone.
    other = drawn({**KEYS, "noise": jax.random.key(7)})
    assert other[0] == numbers[0] and not {*other[1:3]} & {*numbers[1:3]}


def test_streams_without_a_key_of_their_own_draw_from_one_that_no_other_has():
    alone = drawn({"dropout": KEYS["dropout"]})
    assert len(set(alone)) == 4 and alone[0] == drawn(KEYS)[0]
    assert len(set(drawn(KEYS["dropout"]))) == 4
    for none in None, {}, {"params": jax.random.key(0)}:
        assert drawn(none) == []


def test_a_function_in_the_place_of_the_call_may_take_rngs_too():
    def call(module, x, *, rngs):
        return rngs is not None

    init, apply = from_nnx(Streams, call=call)
    variables = init(jax.random.key(0), X)
    assert apply(variables, X, rngs=KEYS) and not apply(variables, X)


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_variables_that_are_references_are_refused(kind):
    with nnx.var_defaults(**{kind: True}):
        layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=rf"(bias|kernel) is a variable with {kind}=True"):
        from_nnx(layer)


def test_modules_of_tree_mode_are_as_those_of_graph_mode():
    def outputs():
        init, apply = from_nnx(Net, train=False)
        return apply(init(jax.random.key(0), X), X)

    expected = outputs()
    with nnx.set_graph_mode(False):
        np.testing.assert_array_equal(outputs(), expected)


class Own(nnx.Module):
    """Draws from a stream of its own and from one of the call."""

    def __init__(self, rngs):
        self.own = nnx.Dropout(0.5, rngs=rngs)
        self.free = nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return self.own(x), self.free(x, rngs=rngs), self.free(x, rngs=rngs)


def test_streams_of_a_call_are_not_those_of_the_module():
    init, apply = from_nnx(Own, train=True)
    x = jnp.ones((1, 256))
    masks = apply(init(jax.random.key(0), x), x, rngs={"dropout": jax.random.key(3)})
    for i, mask in enumerate(masks):
        assert not any((mask == other).all() for other in masks[:i])


@pytest.mark.slow
def test_a_sequence_of_layers_hands_the_streams_on():
    net = nnx.Sequential(nnx.Linear(4, 64, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    init, apply = from_nnx(net, train=True)
    assert (apply(init(None), X, rngs=jax.random.key(0)) == 0).any()
    _, evaluate = from_nnx(net, train=False)
    np.testing.assert_allclose(evaluate(init(None), X), net.layers[0](X), rtol=1e-6)


def call_of(call):
    return type("Called", (nnx.Module,), {"__call__": call})()


@pytest.mark.parametrize(
    ("call", "inputs", "message"),
    [
        (lambda self, rngs, x: x, 1, "rngs as its first argument: put it after the inputs"),
        (lambda self, x, rngs, /: x, 1, "positional-only argument: remove the '/' after it"),
        (lambda self, x, rngs=None, y=None: x, 2, "rngs as argument 2, and there are 2 inputs"),
        (lambda self, x, rngs=None: rngs.noise(), 1, r"eval_rngs=\('noise',\)"),
        (lambda self, x, rngs=None: {"a": (x, self)}, 1, "returned a module, Called"),
    ],
    ids=["first", "positional", "two inputs", "noise", "itself"],
)
def test_calls_that_cannot_be_made_are_explained(call, inputs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_nnx(call_of(call)).apply({}, *[X] * inputs)


def test_a_module_without_a_call_needs_the_name_of_a_method():
    class Forward(nnx.Module):
        def forward(self, x):
            return x

    with pytest.raises(TypeError, match="Forward has no __call__.*call=Forward.forward"):
        from_nnx(Forward())
    assert from_nnx(Forward(), call=Forward.forward).apply({}, X) is X

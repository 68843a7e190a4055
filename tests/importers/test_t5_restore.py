"""T5 checkpoints in states, and training from there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from marks import slow
from t5_models import FIRST, LARGE, MIDDLE, SMALL, T5, create, variables

import flaxfit as ff
from flaxfit.importers import LazyArray, fill, load_tf_ckpt, restore_from_t5, t5_translator


@pytest.fixture(scope="module")
def state():
    optimizer = optax.adafactor(1e-3)
    return create(optimizer, variables(T5(**SMALL)))


def test_a_train_state_takes_weights_statistics_and_step(state, small_t5, truth):
    restored = restore_from_t5(state, small_t5)
    expected = t5_translator.apply(truth["small_t5"]())
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored.step == 1000
    for path, leaf in flatten_dict(restored.params, sep="/").items():
        np.testing.assert_array_equal(leaf, expected[f"target/{path}"].astype(np.float32))
        assert leaf.dtype == jnp.float32
    statistics = restored.opt_state[0]
    assert statistics.count == 1000
    for path, leaf in flatten_dict(statistics.v, sep="/").items():
        np.testing.assert_array_equal(leaf, expected[f"state/param_states/{path}/v"])


FACTORED = {"static_args": ("min_dim_size_to_factor",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        slow(ff.optim.OptimizerDef(optax.adafactor, learning_rate=1e-2)),
        slow(optax.inject_hyperparams(optax.adafactor, **FACTORED)(learning_rate=1e-2)),
        slow(optax.MultiSteps(optax.adafactor(1e-2), 2)),
        ff.TrainTask(lambda v, x: x, optax.adafactor(1e-2), "mse", None, ema=0.9).optimizer,
    ],
    ids=["definition", "injected", "several steps", "average"],
)
def test_what_is_no_statistic_stays_as_it_is(state, small_t5, optimizer):
    target = create(optimizer, {"params": state.params})
    fresh = ff.TrainState.create(optimizer, {"params": state.params})
    target = target.replace(opt_state=fresh.opt_state)
    restored = restore_from_t5(target, small_t5)
    direct = ff.importers.restore_from_t5(state, small_t5).opt_state[0]
    found = flatten_dict(restored.state_dict()["state"]["param_states"], sep="/")
    begun = flatten_dict(target.state_dict()["state"]["param_states"], sep="/")
    names = "encoder/layers_0/mlp/wo/kernel"
    assert found.keys() == begun.keys()
    for name, value in found.items():
        if name.endswith(("count", "gradient_step")):
            assert value == 1000
        elif f"v/{names}" in name:
            np.testing.assert_array_equal(
                value, direct.v["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
            )
        elif f"average/{names}" in name:
            np.testing.assert_array_equal(
                value, restored.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
            )
        elif "hyperparams" in name or "mini_step" in name or "acc_grads" in name:
            np.testing.assert_array_equal(value, begun[name])


def test_a_moving_average_begins_at_the_imported_weights(state, small_t5):
    task = ff.TrainTask(lambda v, x: x, optax.adam(1e-2), "mse", None, ema=0.9)
    target = create(task.optimizer, {"params": state.params})
    restored = restore_from_t5(target, small_t5, optimizer_state=False)
    assert np.any(restored.params["token_embedder"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state.average, restored.params)


def test_statistics_that_the_checkpoint_lacks_are_named_with_a_way_out(
    state, small_t5, tmp_path, truth
):
    target = create(optax.adafactor(1e-3, momentum=0.9), {"params": state.params})
    with pytest.raises(ValueError, match="optimizer_state=False") as caught:
        restore_from_t5(target, small_t5)
    assert "ema/decoder/decoder_norm/scale is not in the checkpoint" in str(caught.value)
    assert "(1,)" not in str(caught.value)
    bare = {name: value for name, value in truth["small_t5"]().items() if "_slot" not in name}
    np.savez(tmp_path / "t5.npz", **bare)
    with pytest.raises(ValueError, match="optimizer_state=False"):
        restore_from_t5(state, tmp_path / "t5.npz")


@pytest.mark.slow
def test_factored_statistics_and_momentum_find_their_places(tmp_path, truth):
    np.savez(tmp_path / "t5.npz", **truth["factored"]())
    params = variables(T5(**LARGE))
    state = create(optax.adafactor(1e-3, momentum=0.9), params)
    restored = restore_from_t5(state, tmp_path / "t5.npz")
    expected = t5_translator.apply(truth["factored"]())
    prefix = "state/param_states/decoder/layers_0/self_attention/out/kernel"
    statistics = restored.opt_state[0]
    for slot in ("v_row", "v_col", "v"):
        found = getattr(statistics, slot)["decoder"]["layers_0"]["self_attention"]["out"]["kernel"]
        np.testing.assert_array_equal(found, expected[f"{prefix}/{slot}"])
    (average,) = [part for part in restored.opt_state if hasattr(part, "ema")]
    found = average.ema["decoder"]["layers_0"]["self_attention"]["out"]["kernel"]
    np.testing.assert_array_equal(found, expected[f"{prefix}/m"])


def test_a_state_dict_in_t5x_layout_is_filled_by_name(small_t5, truth):
    expected = t5_translator.apply(truth["small_t5"]())
    zeros = {name: np.zeros(value.shape, np.float32) for name, value in expected.items()}
    zeros["state/step"] = np.int32(0)
    nested = restore_from_t5(unflatten_dict(zeros, sep="/"), small_t5)
    restored = flatten_dict(nested, sep="/")
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        assert isinstance(restored[name], np.ndarray | np.generic)
        np.testing.assert_array_equal(restored[name], value.astype(zeros[name].dtype))


def test_the_state_dict_of_a_train_state_is_filled_too(state, small_t5):
    plain = restore_from_t5(state.state_dict(), small_t5)
    again = state.restore_state(plain)
    direct = restore_from_t5(state, small_t5)
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, direct.opt_state)
    jax.tree.map(np.testing.assert_array_equal, again.params, direct.params)


def test_states_without_statistics_take_the_weights_alone(state, small_t5):
    for target in (state.for_inference(), create(optax.sgd(0.1), {"params": state.params})):
        restored = restore_from_t5(target, small_t5)
        assert restored.step == 1000
        assert isinstance(restored, type(target))


@pytest.mark.slow
def test_another_optimizer_needs_to_be_left_as_it_is(state, small_t5):
    adam = create(optax.adam(0.1), {"params": state.params})
    with pytest.raises(ValueError, match="state/param_states/0/mu/.* is not in the checkpoint"):
        restore_from_t5(adam, small_t5)
    restored = restore_from_t5(adam, small_t5, optimizer_state=False)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, adam.opt_state)


def test_a_model_of_other_sizes_is_an_error_that_lists_them(small_t5):
    wrong = {"params": variables(T5(**SMALL | {"d_ff": 9, "n_layers": 3}))["params"]}
    state = create(optax.sgd(0.1), wrong)
    with pytest.raises(ValueError) as caught:
        restore_from_t5(state, small_t5)
    for part in (
        "target/decoder/layers_2/mlp/wo/kernel is not in the checkpoint",
        "target/encoder/layers_0/mlp/wi_0/kernel (from encoder/block_000/layer_001/DenseReluDense"
        "/wi_0/kernel) is bfloat16 (4, 8) in the checkpoint, float32 (4, 9) here",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="layers_2"):
        restore_from_t5(state, small_t5, strict=False)


def test_not_strict_takes_what_the_model_has(small_t5):
    smaller = create(optax.sgd(0.1), variables(T5(**SMALL | {"n_layers": 1})))
    with pytest.raises(ValueError, match="has no place here"):
        restore_from_t5(smaller, small_t5)
    assert restore_from_t5(smaller, small_t5, strict=False).step == 1000


def test_the_dtype_can_be_chosen_and_everything_left_to_be_read_later(state, small_t5):
    target = state.for_inference()
    restored = restore_from_t5(target, small_t5, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(restored.params)} == {jnp.dtype("bfloat16")}
    lazy = restore_from_t5(target, small_t5, lazy=True)
    kernel = lazy.params["decoder"]["logits_dense"]["kernel"]
    assert isinstance(kernel, LazyArray)
    assert kernel.get().dtype == np.float32


def test_the_bias_of_a_single_layer_follows_the_model(tmp_path, truth):
    shared = {name: value for name, value in truth["factored"]().items() if "_slot" not in name}
    np.savez(tmp_path / "t5.npz", **shared)
    for shared_bias in (True, False):
        own = variables(T5(**LARGE, shared_bias=shared_bias))
        restored = restore_from_t5(ff.InferenceState.create(own), tmp_path / "t5.npz")
        assert jax.tree.structure(restored.params) == jax.tree.structure(own["params"])


def reverse_task(model, optimizer, vocab):
    tokens = np.random.default_rng(0).integers(1, vocab, (256, 6)).astype(np.int32)
    data = ff.ArrayStream((tokens, tokens[:, ::-1]), tokens[:, ::-1], batch_size=64)
    return ff.TrainTask(model.apply, optimizer, "crossentropy", data)


@pytest.mark.thorough  # `examples/07_import_t5.py` trains one, too, but with a fresh optimizer.
def test_an_imported_model_is_trained_on_from_its_step(state, small_t5):
    task = reverse_task(T5(**SMALL), optax.adafactor(0.03), SMALL["vocab"])
    loop = ff.TrainLoop(restore_from_t5(state, small_t5), task, n_steps=1040, stdout=False)
    losses = [checkpoint.loss for checkpoint in loop.run(40)]
    assert loop.step == 1040
    assert losses[-1] < losses[0]


def model_of(name):
    """The model of a checkpoint that TensorFlow wrote."""
    options = FIRST | {"shared_bias": False} if name == "per_layer" else {}
    return T5(**(LARGE if name == "factored" else MIDDLE), **options)


@pytest.mark.thorough  # `examples/07_import_t5.py` trains one, too.
@pytest.mark.parametrize("name", ["factored", "bfloat16", "per_layer"])
def test_what_tensorflow_wrote_is_trained_on(written, name):
    model = model_of(name)
    optimizer = optax.adafactor(0.01, momentum=0.9 if name == "factored" else None)
    restored = restore_from_t5(create(optimizer, variables(model)), written / name)
    task = reverse_task(model, optimizer, 64)
    last = ff.TrainLoop(restored, task, stdout=False).run_until(1020)
    losses = [checkpoint.loss for checkpoint in last]
    # Over a whole epoch, of four batches: the made-up statistics allow small steps only.
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "per_layer", "factored"])
def test_what_tensorflow_wrote_is_imported(written, truth, name):
    optimizer = optax.adafactor(0.01, momentum=0.9 if name == "factored" else None)
    state = create(optimizer, variables(model_of(name)))
    restored = restore_from_t5(state, written / name)
    values = {
        path.removeprefix("target/"): value
        for path, value in t5_translator.apply(truth[name]()).items()
        if path.startswith("target/")
    }
    expected = fill(state.params, values)
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)
    assert load_tf_ckpt(written / name)["global_step"].get() == restored.step == 1000


@pytest.mark.thorough  # `examples/07_import_t5.py` does the same.
@pytest.mark.parametrize("name", ["factored", "bfloat16", "per_layer"])
def test_what_tensorflow_wrote_is_tuned_and_exported(written, name, tmp_path):
    model, optimizer = model_of(name), optax.adam(0.01)
    state = create(optimizer, variables(model))
    state = restore_from_t5(state, written / name, optimizer_state=False)
    task = reverse_task(model, optimizer, 64)
    *_, tuned = ff.TrainLoop(state, task, stdout=False).run(4)
    specs = (ff.export.InputSpec(("batch", "length"), "int32"),) * 2
    module = ff.export.from_state(tuned, model.apply, specs, trainable=True)
    tokens = np.random.default_rng(1).integers(1, 64, (3, 7)).astype(np.int32)
    apply = jax.jit(model.apply)
    expected = apply({"params": tuned.state.params}, tokens, tokens)
    before = apply({"params": state.params}, tokens, tokens)
    assert np.abs(before - expected).max() > 1e-3
    ff.export.save(module, tmp_path / "t5.stablehlo")
    loaded = ff.export.load(tmp_path / "t5.stablehlo")
    np.testing.assert_allclose(loaded(tokens, tokens), expected, rtol=1e-4, atol=1e-5)
    ff.export.save_saved_model(module, tmp_path / "t5")
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    served = tf.saved_model.load(str(tmp_path / "t5")).signatures["serving_default"]
    found = served(inputs_0=tf.constant(tokens), inputs_1=tf.constant(tokens))["outputs"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

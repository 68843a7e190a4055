"""T5: mesh-TensorFlow's names to T5X's, into states, and on from there."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import flaxfit as ff
from flaxfit.importers import (
    LazyArray,
    fill,
    load_tf_ckpt,
    restore_from_t5,
    t5_translator,
)

MODEL = Path(__file__).parents[2] / "examples" / "models" / "t5.py"
SMALL = {"vocab": 16, "d_model": 4, "d_ff": 8, "n_heads": 2, "d_kv": 2, "n_layers": 2}
MIDDLE = {"vocab": 64, "d_model": 16, "d_ff": 32, "n_heads": 2, "d_kv": 8, "n_layers": 2}
FIRST = {"gated": False, "tied_logits": True}  # What T5 v1.0 has otherwise than v1.1.
LARGE = {"vocab": 256, "d_model": 128, "d_ff": 192, "n_heads": 2, "d_kv": 64, "n_layers": 1}


@pytest.fixture(scope="module")
def T5():
    spec = importlib.util.spec_from_file_location("t5", MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda **sizes: module.T5(module.Sizes(**sizes))


def variables(model):
    """The model's variables, all zeros: nothing is compiled."""
    tokens = jnp.ones((2, 5), jnp.int32)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, tokens))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def create(optimizer, model_variables):
    """A state of zeros."""
    shapes = jax.eval_shape(lambda: ff.TrainState.create(optimizer, model_variables))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.replace(key=None))
    return jax.tree.map(jnp.asarray, zeros).replace(key=jax.random.key(0))


def parameters(names):
    return {name.removeprefix("target/") for name in names if name.startswith("target/")}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("small_t5", SMALL),
        ("bfloat16", MIDDLE),
        ("factored", LARGE),
        ("per_layer", MIDDLE | FIRST | {"shared_bias": False}),
    ],
)
def test_parameters_get_the_names_and_shapes_of_a_model(T5, truth, name, sizes):
    translated = t5_translator.apply(truth[name]())
    params = variables(T5(**sizes))["params"]
    expected = {k: v.shape for k, v in flatten_dict(params, sep="/").items()}
    assert expected == {
        k.removeprefix("target/"): v.shape for k, v in translated.items() if k.startswith("target/")
    }
    assert translated["state/step"] == 1000
    assert translated["state/step"].dtype == np.int32


def test_values_keep_their_identity(truth):
    checkpoint = truth["small_t5"]()
    translated = t5_translator.apply(checkpoint)
    for new, old in {
        "target/token_embedder/embedding": "shared/embedding",
        "target/encoder/layers_1/attention/out/kernel": "encoder/block_001/layer_000/"
        "SelfAttention/o",
        "target/decoder/layers_0/encoder_decoder_attention/key/kernel": "decoder/block_000/"
        "layer_001/EncDecAttention/k",
        "target/decoder/layers_1/pre_cross_attention_layer_norm/scale": "decoder/block_001/"
        "layer_001/rms_norm/scale",
        "target/decoder/layers_1/pre_mlp_layer_norm/scale": "decoder/block_001/layer_002/"
        "rms_norm/scale",
        "target/encoder/encoder_norm/scale": "encoder/rms_norm/scale",
        "target/decoder/logits_dense/kernel": "decoder/logits/kernel",
        "target/decoder/relpos_bias/rel_embedding": "decoder/block_000/layer_000/SelfAttention/"
        "relative_attention_bias",
        "state/param_states/encoder/layers_0/mlp/wi_1/kernel/v": "encoder/block_000/layer_001/"
        "DenseReluDense/wi_1/kernel_slot_v",
    }.items():
        assert translated[new] is checkpoint[old]


def test_a_decoder_alone_becomes_the_decoder_and_needs_no_statistics(truth):
    translated = t5_translator.apply(truth["decoder_only"]())
    assert len(parameters(translated)) == len(truth["decoder_only"]()) - 1
    assert "target/decoder/layers_1/pre_mlp_layer_norm/scale" in translated
    assert "target/decoder/token_embedder/embedding" in translated
    assert not [name for name in translated if name.startswith("state/param_states")]


def test_each_parameter_gets_all_of_adafactors_statistics(truth):
    translated = t5_translator.apply(truth["small_t5"]())
    for path in parameters(translated):
        found = {slot: translated[f"state/param_states/{path}/{slot}"].shape for slot in SLOTS}
        shape = translated[f"target/{path}"].shape
        assert found == {"v": shape, "v_row": (1,), "v_col": (1,), "m": (1,)}


SLOTS = ("v", "v_row", "v_col", "m")


def test_rows_and_columns_of_square_matrices_change_places(truth):
    checkpoint = truth["factored"]()
    translated = t5_translator.apply(checkpoint)
    square = "encoder/block_000/layer_000/SelfAttention/q"
    path = "state/param_states/encoder/layers_0/attention/query/kernel"
    assert checkpoint[square].shape == (128, 128)
    assert translated[f"{path}/v_row"] is checkpoint[f"{square}_slot_vc"]
    assert translated[f"{path}/v_col"] is checkpoint[f"{square}_slot_vr"]
    assert translated[f"{path}/m"] is checkpoint[f"{square}_slot_m"]
    oblong = "state/param_states/token_embedder/embedding"
    assert translated[f"{oblong}/v_row"] is checkpoint["shared/embedding_slot_vr"]
    assert translated[f"{oblong}/v"].shape == (1,)


def mesh_statistics(gradient):
    """Adafactor's statistics after one step, as mesh-TensorFlow defines them."""
    squared = np.square(gradient) + 1e-30
    first, second = sorted(range(2), key=lambda dim: -gradient.shape[dim])
    return {"_slot_vr": squared.mean(first), "_slot_vc": squared.mean(second)}


@pytest.mark.parametrize("shape", [(128, 128), (192, 128)])
def test_statistics_are_those_that_optax_makes_of_the_same_gradient(shape):
    gradient = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    old = "encoder/block_000/layer_000/SelfAttention/q"
    checkpoint = {old: np.zeros(shape, np.float32)} | {
        old + slot: value for slot, value in mesh_statistics(gradient).items()
    }
    params = {"w": np.zeros(shape, np.float32)}
    optimizer = optax.scale_by_factored_rms()
    _, state = jax.jit(optimizer.update)({"w": gradient}, optimizer.init(params), params)
    path = "state/param_states/encoder/layers_0/attention/query/kernel"
    translated = t5_translator.apply(checkpoint)
    np.testing.assert_allclose(translated[f"{path}/v_row"], state.v_row["w"], rtol=1e-5)
    np.testing.assert_allclose(translated[f"{path}/v_col"], state.v_col["w"], rtol=1e-5)


@pytest.mark.slow
def test_tied_logits_are_those_of_a_matrix_of_scaled_embeddings(T5):
    rng = np.random.default_rng(0)
    tied, own = (T5(**SMALL | {"n_layers": 1, "tied_logits": tied}) for tied in (True, False))
    filled = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), variables(own))
    params = filled["params"]
    # T5 v1.0 was pretrained with this scale, the root of the width.
    kernel = params["token_embedder"]["embedding"].T * SMALL["d_model"] ** -0.5
    untied = params | {"decoder": params["decoder"] | {"logits_dense": {"kernel": kernel}}}
    decoder = {name: x for name, x in params["decoder"].items() if name != "logits_dense"}
    tokens = jnp.array([[3, 5, 1]])
    np.testing.assert_allclose(
        jax.jit(tied.apply)({"params": params | {"decoder": decoder}}, tokens, tokens),
        jax.jit(own.apply)({"params": untied}, tokens, tokens),
        rtol=1e-4,
    )


BIAS = "{}/block_{:03d}/layer_000/SelfAttention/relative_attention_bias"


def test_the_relative_bias_of_each_tower_is_decided_by_itself():
    checkpoint = {
        BIAS.format(tower, block): np.zeros((2, 32))
        for tower, block in [("encoder", 0), ("decoder", 0), ("decoder", 1)]
    }
    assert parameters(t5_translator.apply(checkpoint)) == {
        "encoder/relpos_bias/rel_embedding",
        "decoder/layers_0/relpos_bias/rel_embedding",
        "decoder/layers_1/relpos_bias/rel_embedding",
    }


@pytest.mark.parametrize("option", ["per_layer", {"encoder": "per_layer"}])
def test_a_model_of_one_layer_may_have_a_bias_of_its_own(option):
    checkpoint = {BIAS.format("encoder", 0): np.zeros((2, 32))}
    assert parameters(t5_translator.apply(checkpoint, relative_bias=option)) == {
        "encoder/layers_0/relpos_bias/rel_embedding"
    }


def test_impossible_options_for_the_relative_bias_are_refused():
    checkpoint = {BIAS.format("encoder", block): np.zeros((2, 32)) for block in (0, 1)}
    with pytest.raises(ValueError, match="encoder cannot share"):
        t5_translator.apply(checkpoint, relative_bias="shared")
    with pytest.raises(ValueError, match="'both' is unknown"):
        t5_translator.apply(checkpoint, relative_bias="both")


def test_unknown_statistics_and_layers_are_listed():
    checkpoint = {
        "shared/embedding_slot_bogus": np.zeros(1),
        "encoder/block_000/layer_002/rms_norm/scale": np.zeros(1),
    }
    with pytest.raises(ValueError, match="2 problems") as caught:
        t5_translator.apply(checkpoint)
    assert all(f"{name}: no rule matches" in str(caught.value) for name in checkpoint)


def test_names_lead_back_to_mesh_tensorflows(truth):
    checkpoint = truth["small_t5"]()
    translated = t5_translator.apply(checkpoint)
    back = t5_translator.inverse.apply(
        {n: v for n, v in translated.items() if not n.startswith("state/param_states")}
    )
    expected = {name: value for name, value in checkpoint.items() if "_slot_" not in name}
    assert back.keys() == expected.keys()
    assert all(back[name] is expected[name] for name in expected if name != "global_step")


def test_the_names_of_a_decoder_alone_lead_back(truth):
    checkpoint = truth["decoder_only"]()
    back = t5_translator.inverse.apply(t5_translator.apply(checkpoint))
    assert back.keys() == checkpoint.keys()
    assert all(back[name] is checkpoint[name] for name in back if name != "global_step")


@pytest.fixture(scope="module")
def state(T5):
    optimizer = optax.adafactor(1e-3)
    return create(optimizer, variables(T5(**SMALL)))


def test_a_train_state_takes_weights_statistics_and_step(state, kept, truth):
    restored = restore_from_t5(state, kept / "small_t5")
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


@pytest.mark.parametrize(
    "optimizer",
    [
        ff.optim.OptimizerDef(optax.adafactor, learning_rate=1e-2),
        optax.inject_hyperparams(optax.adafactor, **FACTORED)(learning_rate=1e-2),
        optax.MultiSteps(optax.adafactor(1e-2), 2),
        ff.TrainTask(lambda v, x: x, optax.adafactor(1e-2), "mse", None, ema=0.9).optimizer,
    ],
    ids=["definition", "injected", "several steps", "average"],
)
def test_what_is_no_statistic_stays_as_it_is(state, kept, optimizer):
    target = create(optimizer, {"params": state.params})
    fresh = ff.TrainState.create(optimizer, {"params": state.params})
    target = target.replace(opt_state=fresh.opt_state)
    restored = restore_from_t5(target, kept / "small_t5")
    direct = ff.importers.restore_from_t5(state, kept / "small_t5").opt_state[0]
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


def test_a_moving_average_begins_at_the_imported_weights(state, kept):
    task = ff.TrainTask(lambda v, x: x, optax.adam(1e-2), "mse", None, ema=0.9)
    target = create(task.optimizer, {"params": state.params})
    restored = restore_from_t5(target, kept / "small_t5", optimizer_state=False)
    assert np.any(restored.params["token_embedder"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state.average, restored.params)


def test_statistics_that_the_checkpoint_lacks_are_named_with_a_way_out(
    state, kept, tmp_path, truth
):
    target = create(optax.adafactor(1e-3, momentum=0.9), {"params": state.params})
    with pytest.raises(ValueError, match="optimizer_state=False") as caught:
        restore_from_t5(target, kept / "small_t5")
    assert "ema/decoder/decoder_norm/scale is not in the checkpoint" in str(caught.value)
    assert "(1,)" not in str(caught.value)
    bare = {name: value for name, value in truth["small_t5"]().items() if "_slot" not in name}
    np.savez(tmp_path / "t5.npz", **bare)
    with pytest.raises(ValueError, match="optimizer_state=False"):
        restore_from_t5(state, tmp_path / "t5.npz")


def test_factored_statistics_and_momentum_find_their_places(T5, tmp_path, truth):
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


def test_a_state_dict_in_t5x_layout_is_filled_by_name(kept, truth):
    expected = t5_translator.apply(truth["small_t5"]())
    zeros = {name: np.zeros(value.shape, np.float32) for name, value in expected.items()}
    zeros["state/step"] = np.int32(0)
    nested = {}
    for name, value in zeros.items():
        *parents, last = name.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    restored = flatten_dict(restore_from_t5(nested, kept / "small_t5"), sep="/")
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        assert isinstance(restored[name], np.ndarray | np.generic)
        np.testing.assert_array_equal(restored[name], value.astype(zeros[name].dtype))


def test_the_state_dict_of_a_train_state_is_filled_too(state, kept):
    plain = restore_from_t5(state.state_dict(), kept / "small_t5")
    again = state.restore_state(plain)
    direct = restore_from_t5(state, kept / "small_t5")
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, direct.opt_state)
    jax.tree.map(np.testing.assert_array_equal, again.params, direct.params)


def test_states_without_statistics_take_the_weights_alone(T5, state, kept):
    for target in (
        state.for_inference(),
        create(optax.sgd(0.1), {"params": state.params}),
    ):
        restored = restore_from_t5(target, kept / "small_t5")
        assert restored.step == 1000
        assert isinstance(restored, type(target))


def test_another_optimizer_needs_to_be_left_as_it_is(state, kept):
    adam = create(optax.adam(0.1), {"params": state.params})
    with pytest.raises(ValueError, match="state/param_states/0/mu/.* is not in the checkpoint"):
        restore_from_t5(adam, kept / "small_t5")
    restored = restore_from_t5(adam, kept / "small_t5", optimizer_state=False)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, adam.opt_state)


def test_a_model_of_other_sizes_is_an_error_that_lists_them(T5, kept):
    wrong = {"params": variables(T5(**SMALL | {"d_ff": 9, "n_layers": 3}))["params"]}
    state = create(optax.sgd(0.1), wrong)
    with pytest.raises(ValueError) as caught:
        restore_from_t5(state, kept / "small_t5")
    for part in (
        "target/decoder/layers_2/mlp/wo/kernel is not in the checkpoint",
        "target/encoder/layers_0/mlp/wi_0/kernel (from encoder/block_000/layer_001/DenseReluDense"
        "/wi_0/kernel) is bfloat16 (4, 8) in the checkpoint, float32 (4, 9) here",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="layers_2"):
        restore_from_t5(state, kept / "small_t5", strict=False)


def test_not_strict_takes_what_the_model_has(T5, kept):
    smaller = create(optax.sgd(0.1), variables(T5(**SMALL | {"n_layers": 1})))
    with pytest.raises(ValueError, match="has no place here"):
        restore_from_t5(smaller, kept / "small_t5")
    assert restore_from_t5(smaller, kept / "small_t5", strict=False).step == 1000


def test_the_dtype_can_be_chosen(state, kept):
    target = state.for_inference()
    restored = restore_from_t5(target, kept / "small_t5", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(restored.params)} == {jnp.dtype("bfloat16")}


def test_lazy_leaves_everything_to_be_read_later(state, kept):
    restored = restore_from_t5(state.for_inference(), kept / "small_t5", lazy=True)
    kernel = restored.params["decoder"]["logits_dense"]["kernel"]
    assert isinstance(kernel, LazyArray)
    assert kernel.get().dtype == np.float32


def test_the_bias_of_a_single_layer_follows_the_model(T5, tmp_path, truth):
    shared = {name: value for name, value in truth["factored"]().items() if "_slot" not in name}
    np.savez(tmp_path / "t5.npz", **shared)
    for shared_bias in (True, False):
        own = variables(T5(**LARGE, shared_bias=shared_bias))
        restored = restore_from_t5(ff.InferenceState.create(own), tmp_path / "t5.npz")
        assert jax.tree.structure(restored.params) == jax.tree.structure(own["params"])


def reverse_task(model, optimizer, vocab):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, vocab, (256, 6)).astype(np.int32)
    return ff.TrainTask(
        apply=model.apply,
        optimizer=optimizer,
        loss="crossentropy",
        data=ff.ArrayStream((tokens, tokens[:, ::-1]), tokens[:, ::-1], batch_size=64),
    )


@pytest.mark.slow
def test_an_imported_model_is_trained_on_from_its_step(T5, state, kept):
    model, optimizer = T5(**SMALL), optax.adafactor(0.03)
    restored = restore_from_t5(state, kept / "small_t5")
    task = reverse_task(model, optimizer, SMALL["vocab"])
    loop = ff.TrainLoop(restored, task, n_steps=1040, stdout=False)
    losses = [checkpoint.loss for checkpoint in loop.run(40)]
    assert loop.step == 1040
    assert losses[-1] < losses[0]


@pytest.fixture
def restored_from(T5, written):
    """Model, optimizer, a state of zeros, and that of a checkpoint that TensorFlow wrote."""

    def restore(name):
        options = FIRST | {"shared_bias": False} if name == "per_layer" else {}
        model = T5(**(LARGE if name == "factored" else MIDDLE), **options)
        optimizer = optax.adafactor(0.01, momentum=0.9 if name == "factored" else None)
        state = create(optimizer, variables(model))
        return model, optimizer, state, restore_from_t5(state, written / name)

    return restore


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "per_layer", "factored"])
def test_what_tensorflow_wrote_is_imported(restored_from, written, truth, name):
    *_, state, restored = restored_from(name)
    expected = fill(
        state.params,
        {
            name.removeprefix("target/"): value
            for name, value in t5_translator.apply(truth[name]()).items()
            if name.startswith("target/")
        },
    )
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)
    assert load_tf_ckpt(written / name)["global_step"].get() == restored.step == 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["factored", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("bfloat16", "per_layer"))],
)
def test_what_tensorflow_wrote_is_trained_on(restored_from, name):
    model, optimizer, _, restored = restored_from(name)
    task = reverse_task(model, optimizer, 64)
    last = ff.TrainLoop(restored, task, stdout=False).run_until(1020)
    losses = [checkpoint.loss for checkpoint in last]
    # Over a whole epoch, of four batches: the made-up statistics allow small steps only.
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bfloat16", pytest.param("per_layer", marks=pytest.mark.thorough)]
)
def test_what_tensorflow_wrote_is_tuned_and_exported(T5, written, name, tmp_path):
    options = FIRST | {"shared_bias": False} if name == "per_layer" else {}
    model, optimizer = T5(**MIDDLE, **options), optax.adam(0.01)
    state = create(optimizer, variables(model))
    state = restore_from_t5(state, written / name, optimizer_state=False)
    task = reverse_task(model, optimizer, 64)
    *_, tuned = ff.TrainLoop(state, task, stdout=False).run(4)
    specs = (ff.export.InputSpec(("batch", "length"), "int32"),) * 2
    module = ff.export.from_state(tuned, model.apply, specs, trainable=True)
    tokens = np.random.default_rng(1).integers(1, 64, (3, 7)).astype(np.int32)
    expected = model.apply({"params": tuned.state.params}, tokens, tokens)
    before = model.apply({"params": state.params}, tokens, tokens)
    assert np.abs(before - expected).max() > 1e-3
    ff.export.save(module, tmp_path / "t5.stablehlo")
    loaded = ff.export.load(tmp_path / "t5.stablehlo")
    np.testing.assert_allclose(loaded(tokens, tokens), expected, rtol=1e-4, atol=1e-5)
    ff.export.save_saved_model(module, tmp_path / "t5")
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    served = tf.saved_model.load(str(tmp_path / "t5")).signatures["serving_default"]
    found = served(inputs_0=tf.constant(tokens), inputs_1=tf.constant(tokens))["outputs"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

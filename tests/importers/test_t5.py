"""T5: mesh-TensorFlow's names to T5X's, into states, and on from there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from t5_models import FIRST, LARGE, MIDDLE, SMALL, T5, variables

from flaxfit.importers import t5_translator


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
def test_parameters_get_the_names_and_shapes_of_a_model(truth, name, sizes):
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
def test_tied_logits_are_those_of_a_matrix_of_scaled_embeddings():
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


@pytest.mark.parametrize("name", ["small_t5", "decoder_only"])
def test_names_lead_back_to_mesh_tensorflows(truth, name):
    checkpoint = truth[name]()
    translated = t5_translator.apply(checkpoint)
    back = t5_translator.inverse.apply(
        {n: v for n, v in translated.items() if not n.startswith("state/param_states")}
    )
    expected = {name: value for name, value in checkpoint.items() if "_slot_" not in name}
    assert back.keys() == expected.keys()
    assert all(back[name] is expected[name] for name in expected if name != "global_step")

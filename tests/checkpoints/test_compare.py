import jax
import jax.numpy as jnp
import pytest

from flaxfit.checkpoints import CheckpointFileReader, restore, save
from flaxfit.checkpoints._compare import check_fits, differences

KERNEL = {"shape": [64, 128], "dtype": "float32"}


def test_equal_descriptions_have_no_differences():
    described = {"params/kernel": KERNEL, "key": {"shape": [], "dtype": "key<fry>", "words": [2]}}
    assert differences(described, {**described, "key": {"shape": [], "dtype": "key<fry>"}}) == []
    check_fits(described, described, "run/3")


def test_every_difference_is_listed_with_both_sides_and_the_nearest_name():
    on_disk = {
        "params/Dense_0/kernel": KERNEL,
        "params/Dense_0/bias": {"shape": [128], "dtype": "float32"},
        "params/Dense_1/kernel": KERNEL,
        "params/Dense_2/kernel": KERNEL,
    }
    here = {
        "params/Dense_0/kernel": {"shape": [64, 256], "dtype": "float32"},
        "params/Dense_0/bias": {"shape": [128], "dtype": "bfloat16"},
        "params/Dense_1/kernel": KERNEL,
        "params/Dense_3/kernel": KERNEL,
        "scale": {"shape": [], "dtype": "float32"},
    }
    with pytest.raises(ValueError) as error:
        check_fits(on_disk, here, "run/3")
    message = str(error.value)
    assert "run/3 does not fit this model (5 differences)" in message
    assert "params/Dense_0/kernel is float32 (64, 128) on disk, float32 (64, 256) here" in message
    assert "params/Dense_0/bias is float32 (128,) on disk, bfloat16 (128,) here" in message
    assert "params/Dense_3/kernel is here, not on disk (nearest: params/Dense_2/kernel)" in message
    assert "params/Dense_2/kernel is on disk, not here (nearest: params/Dense_3/kernel)" in message
    assert "scale is here, not on disk\n" in message
    assert "Dense_1" not in message


def test_what_the_optimizer_repeats_of_a_parameter_is_counted():
    places = ("params", "opt_state/0/mu", "opt_state/0/nu")
    on_disk = {f"{place}/Dense_0/kernel": KERNEL for place in places} | {"opt_state/1": KERNEL}
    here = {f"{place}/kernel": KERNEL for place in places}
    with pytest.raises(ValueError, match=r"\(7 differences\)") as error:
        check_fits(on_disk, here, "run/3")
    assert str(error.value).splitlines()[1:-1] == [
        "  params/kernel is here, not on disk",
        "  params/Dense_0/kernel is on disk, not here",
        "  opt_state/1 is on disk, not here",
        "  and 4 of these parameters in opt_state",
    ]


@pytest.fixture
def saved(tmp_path, tools):
    save(tmp_path, tools.make_state(4))
    return tools.make_state(4)


def test_chosen_weights_are_taken_and_all_else_is_the_targets(tmp_path, saved, tools, capfd):
    target = tools.make_state(0)
    found = restore(tmp_path, target, partial=("Dense_0/.*", "BatchNorm_0/.*"))
    for name in ("Dense_0", "BatchNorm_0"):
        tools.assert_same(found.params[name], saved.params[name])
    tools.assert_same(found.params["Dense_1"], target.params["Dense_1"])
    tools.assert_same(found.model_state["batch_stats"], saved.model_state["batch_stats"])
    for name in ("step", "opt_state", "key"):
        tools.assert_same(getattr(found, name), getattr(target, name))
    report = capfd.readouterr().err
    assert "took 6 of 9 weights" in report
    assert "kept Dense_1/bias, Dense_1/kernel, calls" in report


def test_a_new_head_and_another_optimizer_are_no_obstacle(tmp_path, saved, tools):
    target = tools.make_state(0)
    head = {"kernel": jnp.ones((5, 9)), "bias": jnp.zeros(9)}
    params = {**{k: v for k, v in target.params.items() if k != "Dense_1"}, "Head": head}
    found = restore(
        tmp_path, target.replace(params=params, opt_state=()), partial=r"(Dense|BatchNorm)_0/.*"
    )
    tools.assert_same(found.params["Head"], head)
    tools.assert_same(found.params["Dense_0"], saved.params["Dense_0"])
    assert found.opt_state == ()


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path, saved, tools):
    with pytest.raises(ValueError, match="partial='Dens_0/.*' matches no weight of .*Dense_0"):
        restore(tmp_path, saved, partial=("Dense_1/.*", "Dens_0/.*"))
    with pytest.raises(ValueError, match="matches no weight"):
        restore(tmp_path, saved, partial="opt_state/.*")


def test_what_matches_must_be_the_same_on_both_sides(tmp_path, saved, tools):
    params = {**saved.params, "Dense_0": {"kernel": jnp.ones((3, 6), jnp.bfloat16)}}
    with pytest.raises(ValueError) as error:
        restore(tmp_path, saved.replace(params=params), partial=("Dense_.*/.*",))
    message = str(error.value)
    assert "params/Dense_0/kernel is bfloat16 (3, 5) on disk, bfloat16 (3, 6) here" in message
    assert "params/Dense_0/bias is on disk, not here" in message
    assert "Dense_1" not in message


def test_what_is_kept_must_have_values(tmp_path, saved, tools):
    with pytest.raises(ValueError, match="does not cover step, params/BatchNorm_0/bias.*key"):
        restore(tmp_path, tools.abstract(saved), partial=("Dense_.*/.*",))
    every = restore(tmp_path, saved.replace(params=tools.abstract(saved).params), partial=".*")
    tools.assert_same(every.params, saved.params)


@pytest.mark.parametrize("partial", [(), "Dense_0/(", ["Dense_0/.*", "("]])
def test_wrong_patterns_are_refused(tmp_path, saved, partial):
    with pytest.raises(ValueError, match="partial="):
        restore(tmp_path, saved, partial=partial)


def test_without_a_target_nothing_can_be_kept(tmp_path, saved):
    with pytest.raises(ValueError, match="needs a target"):
        restore(tmp_path, partial=".*")


def test_the_target_stays_valid_when_the_result_is_donated(tmp_path, saved, tools):
    target = tools.make_state(0)
    found = CheckpointFileReader(tmp_path).read(target, partial="Dense_0/.*").state
    jax.block_until_ready(
        jax.jit(lambda x: x + 1, donate_argnums=0)(found.params["Dense_0"]["bias"])
    )
    tools.assert_same(target.params["Dense_0"], tools.make_state(0).params["Dense_0"])

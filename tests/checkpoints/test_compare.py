import jax.numpy as jnp
import pytest
from checkpoint_files import abstract, make_state
from loops import assert_identical

from flaxfit.checkpoints import restore, save
from flaxfit.checkpoints._compare import check_fits

KERNEL = {"shape": [64, 128], "dtype": "float32"}


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
def saved(tmp_path):
    save(tmp_path, make_state(4))
    return make_state(4)


def test_chosen_weights_are_taken_and_all_else_is_the_targets(tmp_path, saved, capfd):
    target = make_state(0)
    found = restore(tmp_path, target, partial=("Dense_0/.*", "BatchNorm_0/.*"))
    for name in ("Dense_0", "BatchNorm_0"):
        assert_identical(found.params[name], saved.params[name])
    assert_identical(found.params["Dense_1"], target.params["Dense_1"])
    assert_identical(found.model_state["batch_stats"], saved.model_state["batch_stats"])
    for name in ("step", "opt_state", "key"):
        assert_identical(getattr(found, name), getattr(target, name))
    report = capfd.readouterr().err
    assert "took 6 of 9 weights" in report
    assert "kept Dense_1/bias, Dense_1/kernel, calls" in report


def test_a_new_head_and_another_optimizer_are_no_obstacle(tmp_path, saved):
    target = make_state(0)
    head = {"kernel": jnp.ones((5, 9)), "bias": jnp.zeros(9)}
    params = {**{k: v for k, v in target.params.items() if k != "Dense_1"}, "Head": head}
    found = restore(
        tmp_path, target.replace(params=params, opt_state=()), partial=r"(Dense|BatchNorm)_0/.*"
    )
    assert_identical(found.params["Head"], head)
    assert_identical(found.params["Dense_0"], saved.params["Dense_0"])
    assert found.opt_state == ()


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path, saved):
    with pytest.raises(ValueError, match="partial='Dens_0/.*' matches no weight of .*Dense_0"):
        restore(tmp_path, saved, partial=("Dense_1/.*", "Dens_0/.*"))
    with pytest.raises(ValueError, match="matches no weight"):
        restore(tmp_path, saved, partial="opt_state/.*")


def test_what_matches_must_be_the_same_on_both_sides(tmp_path, saved):
    params = {**saved.params, "Dense_0": {"kernel": jnp.ones((3, 6), jnp.bfloat16)}}
    with pytest.raises(ValueError) as error:
        restore(tmp_path, saved.replace(params=params), partial=("Dense_.*/.*",))
    message = str(error.value)
    assert "params/Dense_0/kernel is bfloat16 (3, 5) on disk, bfloat16 (3, 6) here" in message
    assert "params/Dense_0/bias is on disk, not here" in message
    assert "Dense_1" not in message


def test_what_is_kept_must_have_values(tmp_path, saved):
    with pytest.raises(ValueError, match="does not cover step, params/BatchNorm_0/bias.*key"):
        restore(tmp_path, abstract(saved), partial=("Dense_.*/.*",))
    every = restore(tmp_path, saved.replace(params=abstract(saved).params), partial=".*")
    assert_identical(every.params, saved.params)


@pytest.mark.parametrize("partial", [(), "Dense_0/(", ["Dense_0/.*", "("]])
def test_wrong_patterns_are_refused(tmp_path, saved, partial):
    with pytest.raises(ValueError, match="partial="):
        restore(tmp_path, saved, partial=partial)
    with pytest.raises(ValueError, match="needs a target"):  # Without one nothing can be kept.
        restore(tmp_path, partial=".*")

import pytest

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

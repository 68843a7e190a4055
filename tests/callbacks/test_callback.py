from loops import make_weight_loop

from flaxfit.callbacks._callback import Loop


def test_a_training_loop_has_what_callbacks_use_of_it():
    loop: Loop = make_weight_loop()  # pyright compares their types.
    used = {*Loop.__annotations__, *(name for name in vars(Loop) if not name.startswith("_"))}
    assert "step" in used and all(hasattr(loop, name) for name in used)

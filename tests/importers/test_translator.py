"""CheckpointTranslator: rules, what they may not do, the dry run and the way back."""

import numpy as np
import pytest

from flaxfit.importers import CheckpointTranslator, LazyThreadPoolArray


def torch_rules():
    translator = CheckpointTranslator()

    @translator.add(r"fc(\d+)\.weight")
    def kernel(opts, name, value, number):
        return f"{opts.get('prefix', '')}Dense_{number}/kernel", value.T

    @translator.add(r"fc(\d+)\.bias")
    def bias(opts, name, value, number):
        return f"{opts.get('prefix', '')}Dense_{number}/bias", value

    @translator.add(r".*\.num_batches_tracked")
    def drop(opts, name, value):
        return None, value

    @translator.inverse.add(r"Dense_(\d+)/kernel")
    def weight(opts, name, value, number):
        return f"fc{number}.weight", value.T

    @translator.inverse.add(r"Dense_(\d+)/bias")
    def torch_bias(opts, name, value, number):
        return f"fc{number}.bias", value

    return translator


CHECKPOINT = {
    "fc0.weight": np.arange(6.0).reshape(2, 3),
    "fc0.bias": np.arange(2.0),
    "bn.num_batches_tracked": np.array(3),
}


def test_options_reach_the_rules():
    assert "a/Dense_0/bias" in torch_rules().apply(CHECKPOINT, prefix="a/")


def test_the_first_rule_that_matches_wins():
    translator = CheckpointTranslator()
    translator.add("a.*")(lambda opts, name, value: ("first", value))
    translator.add("ab")(lambda opts, name, value: ("second", value))
    assert translator.apply({"ab": 1}) == {"first": 1}


@pytest.mark.parametrize("name", ["axyz", "xb", "b\n", "", "A"])
def test_a_rule_matches_whole_names_in_all_its_alternatives(name):
    translator = CheckpointTranslator()
    translator.add("a|b")(lambda opts, name, value: ("new", value))
    with pytest.raises(ValueError, match="no rule matches"):
        translator.apply({name: 1})


def test_all_names_without_a_rule_and_all_collisions_are_in_one_error():
    translator = CheckpointTranslator()
    translator.add("[abc]")(lambda opts, name, value: ("same", value))
    with pytest.raises(ValueError) as caught:
        translator.apply({"a": 1, "odd": 2, "b": 3, "c": 4, "odder": 5})
    for part in ("3 problems", "odd: no rule", "odder: no rule", "a and b and c all become same"):
        assert part in str(caught.value)


def test_what_was_lazy_stays_lazy():
    def read():
        raise AssertionError("read too early")

    lazy = LazyThreadPoolArray((2, 3), np.float32, read)
    (kernel,) = torch_rules().apply({"fc0.weight": lazy}).values()
    assert kernel.shape == (3, 2)


def test_a_last_step_sees_everything_and_may_rename_and_add():
    translator = torch_rules()

    @translator.add_last_step
    def nest(opts, values):
        return {f"params/{name}": value for name, value in values.items()} | {"step": opts["step"]}

    assert set(translator.apply(CHECKPOINT, step=3)) == {
        "params/Dense_0/kernel",
        "params/Dense_0/bias",
        "step",
    }


def test_a_dry_run_prints_a_table_and_reads_nothing(capsys):
    def read():
        raise AssertionError("read too early")

    translator = torch_rules()
    translator.add("taken")(lambda opts, name, value: ("Dense_0/bias", value))
    lazy = LazyThreadPoolArray((2, 3), "bfloat16", read)
    checkpoint = CHECKPOINT | {"fc0.weight": lazy, "taken": np.zeros(2), "odd": np.zeros(1)}
    assert translator.dry_run(checkpoint) is None
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["fc0.weight", "->", "Dense_0/kernel", "(3,", "2)", "bfloat16"],
        ["fc0.bias", "->", "Dense_0/bias", "(2,)", "float64"],
        ["bn.num_batches_tracked", "->", "dropped"],
        ["odd", "->", "no", "rule", "matches"],
        ["taken", "->", "Dense_0/bias", "(taken)"],
    ]


def test_a_dry_run_follows_names_through_the_last_steps(capsys):
    translator = torch_rules()

    @translator.add_last_step
    def nest(opts, values):
        return {f"params/{name}": value for name, value in values.items()} | {"step": 0}

    translator.dry_run({"fc0.bias": np.zeros(2)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["fc0.bias", "->", "params/Dense_0/bias", "(2,)", "float64"]] + [
        ["(added)", "->", "step", "()", "int"]
    ]


def test_a_dry_run_of_nothing_prints_nothing(capsys):
    torch_rules().dry_run({})
    assert capsys.readouterr().out == ""


def test_inverse_rules_lead_back():
    translator = torch_rules()
    back = translator.inverse.apply(translator.apply(CHECKPOINT))
    assert set(back) == {"fc0.weight", "fc0.bias"}
    np.testing.assert_array_equal(back["fc0.weight"], CHECKPOINT["fc0.weight"])
    assert translator.inverse.inverse is translator


@pytest.mark.parametrize("found", ["b", ("b", 1, 2), (2, 1)])
def test_a_rule_that_returns_no_pair_is_named(found):
    translator = CheckpointTranslator()
    translator.add("a")(lambda opts, name, value: found)
    with pytest.raises(TypeError, match=r"The rule for 'a' must return a pair .*, got .* for a\."):
        translator.apply({"a": np.ones(1)})

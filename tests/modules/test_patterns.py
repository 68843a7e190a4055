"""NNX filters in the places of patterns of paths."""

import re

import pytest
from flax import linen as nn
from flax import nnx

from flaxfit.modules import from_nnx
from flaxfit.modules._patterns import as_patterns
from flaxfit.tree._selection import label_of


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(3, 2, rngs=rngs)
        self.lora = nnx.LoRA(3, 2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)


APPLY = from_nnx(Adapted, call=lambda module, x: x).apply
PARAMS = {"base/kernel", "base/bias", "lora/lora_a", "lora/lora_b", "norm/scale", "norm/bias"}


def selected(filter, paths=PARAMS, **options):
    patterns = as_patterns("freeze", filter, APPLY, **options)
    return {path for path in paths if any(re.fullmatch(p, path) for p in patterns)}


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (nnx.LoRAParam, {"lora/lora_a", "lora/lora_b"}),
        (nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)), PARAMS - {"lora/lora_a", "lora/lora_b"}),
        (nnx.Not(nnx.LoRAParam), PARAMS - {"lora/lora_a", "lora/lora_b"}),
        (nnx.PathContains("norm"), {"norm/scale", "norm/bias"}),
        (lambda path, variable: path[-1] == "bias", {"base/bias", "norm/bias"}),
        (..., PARAMS),
        ([nnx.LoRAParam, "base/.*"], PARAMS - {"norm/scale", "norm/bias"}),
    ],
    ids=["type", "all", "not", "path", "predicate", "everything", "with a pattern"],
)
def test_a_filter_stands_for_the_parameters_that_it_selects(filter, expected):
    assert selected(filter) == expected


def test_a_filter_may_select_other_variables_where_all_are_meant():
    paths = PARAMS | {"norm/mean", "norm/var"}
    found = selected(nnx.BatchStat, paths, collection=None)
    assert found == {"norm/mean", "norm/var"}


def test_it_is_shown_by_its_name_and_can_be_resolved_again():
    patterns = as_patterns("norms", nnx.LoRAParam, APPLY)
    assert [label_of(each) for each in patterns] == ["LoRAParam"]
    assert as_patterns("norms", patterns, APPLY) == patterns


@pytest.mark.parametrize("apply", [nn.Dense(2).apply, lambda v, x: x, None])
def test_a_filter_needs_an_nnx_module(apply):
    with pytest.raises(TypeError, match="freeze: LoRAParam is a filter .* is not an NNX module"):
        as_patterns("freeze", nnx.LoRAParam, apply)


def test_a_filter_that_selects_nothing_lists_the_variables():
    with pytest.raises(ValueError, match=r"BatchStat selects no parameter.*\n  params/base/bias"):
        as_patterns("freeze", nnx.BatchStat, APPLY)


def test_what_is_neither_a_pattern_nor_a_filter_is_refused():
    for wrong in ("(", 3, [None]):
        with pytest.raises(ValueError, match="freeze takes patterns .* or NNX filters"):
            as_patterns("freeze", wrong, APPLY)

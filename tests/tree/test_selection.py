import copy
import pickle

from flax import nnx

from flaxfit.tree._selection import Selection, is_nnx_filter, label_of


def test_filters_are_known_from_patterns_and_predicates():
    assert all(map(is_nnx_filter, (nnx.Param, nnx.All(nnx.Param), nnx.Not("lora"), ...)))
    others = ("encoder/.*", lambda path, value: True, int, nnx.Linear, None)
    assert not any(map(is_nnx_filter, others))


def test_a_selection_is_copied_with_its_label():
    made = Selection("a|b", "LoRAParam")
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made and label_of(again) == "LoRAParam" and repr(again) == "LoRAParam"

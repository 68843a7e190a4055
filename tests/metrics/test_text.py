import math

import numpy as np
import pytest
from measuring import value_of

from flaxfit.metrics import bleu, cer, rouge_1, rouge_2, rouge_l, wer

EXPECTED = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 6]])
FOUND = np.array([[1, 2, 3, 4, 6], [7, 6, 8, 9, 9]])


def decode(tokens):
    return " ".join("abcdefghij"[token] * 2 for token in tokens)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (wer, (1 + 3) / 10),
        (cer, (1 + 3) / 10),
        (rouge_1, (4 / 5 + 4 / 5) / 2),
        (rouge_2, (3 / 4 + 1 / 4) / 2),
        (rouge_l, (4 / 5 + 3 / 5) / 2),
        (bleu, math.exp((math.log(8 / 10) + math.log(4 / 8) + math.log(2 / 6 * 1 / 4)) / 4)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_sequences_of_tokens_are_compared(metric, expected):
    assert value_of(metric, FOUND, EXPECTED) == pytest.approx(expected)
    logits = np.eye(10, dtype=np.float32)[FOUND]
    assert value_of(metric, logits, EXPECTED) == pytest.approx(expected)
    if metric is not cer:
        assert value_of(metric(decode=decode), FOUND, EXPECTED) == pytest.approx(expected)


def test_letters_of_decoded_texts_are_compared():
    assert value_of(cer(decode=decode), FOUND[:1], EXPECTED[:1]) == pytest.approx(2 / 14)


def test_shorter_texts_have_less_bleu_and_none_without_common_fours():
    value = value_of(bleu(end=0), np.array([[1, 2, 3, 4, 0]]), EXPECTED[:1])
    assert value == pytest.approx(math.exp(1 - 5 / 4))
    assert value_of(bleu, EXPECTED[:1, ::-1], EXPECTED[:1]) == 0


def test_padding_and_what_follows_the_end_does_not_count():
    targets = np.array([[1, 2, 3, 0, -1], [4, 5, 0, -1, -1]])
    logits = np.eye(9, dtype=np.float32)[[[1, 2, 3, 0, 7], [4, 6, 0, 8, 8]]]
    assert value_of(wer(ignore_label=-1, end=0), logits, targets) == pytest.approx(1 / 5)
    assert value_of(wer(ignore_label=-1), logits, targets) == pytest.approx(1 / 7)
    weights = (targets >= 0).astype(np.float32)
    assert value_of(wer, logits, targets, weights=weights) == pytest.approx(1 / 7)
    # Tokens that were generated are of any length: only their end cuts them.
    tokens = np.array([[1, 2, 3, 0, 7, 7], [4, 6, 5, 5, 0, 8]])
    assert value_of(wer(ignore_label=-1, end=0), tokens, targets) == pytest.approx(2 / 5)


def test_no_expected_text_has_no_error_rate():
    assert np.isnan(value_of(wer(end=1), EXPECTED[:1], EXPECTED[:1]))
    assert value_of(rouge_1(end=1), EXPECTED[:1], EXPECTED[:1]) == 0


@pytest.mark.parametrize(
    "metric", [bleu, rouge_1, rouge_2, rouge_l, wer, cer], ids=lambda m: m.name
)
def test_an_example_of_weight_n_counts_as_n_of_weight_1(metric):
    found = np.array([FOUND[0], [7, 6, 8, 0, 0]])
    expected = value_of(metric, found[[0, 0, 0, 1]], EXPECTED[[0, 0, 0, 1]])
    assert expected != pytest.approx(value_of(metric, found, EXPECTED))
    weights = np.array([1.5, 0.5], np.float32)
    assert value_of(metric, found, EXPECTED, weights=weights) == pytest.approx(expected)
    by_token = np.broadcast_to(weights[:, None], found.shape)
    assert value_of(metric, found, EXPECTED, weights=by_token) == pytest.approx(expected)
    uneven = np.where(np.arange(5) < 2, 0.5, by_token)
    with pytest.raises(ValueError, match=f"'{metric.name}' weighs examples, not tokens"):
        value_of(metric, found, EXPECTED, weights=uneven)


@pytest.mark.parametrize("metric", [bleu, rouge_1, wer], ids=lambda m: m.name)
def test_an_example_of_which_no_token_counts_is_left_out(metric):
    expected = value_of(metric, EXPECTED[:1], EXPECTED[:1])
    for weights in np.array([1.0, 0.0]), np.array([[1.0] * 5, [0.0] * 5]):
        assert value_of(metric, EXPECTED[[0, 0]], EXPECTED, weights=weights) == expected
    ignored = np.array([EXPECTED[0], [-1] * 5])
    assert value_of(metric(ignore_label=-1), EXPECTED[[0, 0]], ignored) == expected
    assert np.isnan(value_of(metric, FOUND, EXPECTED, weights=np.zeros(2)))


def test_what_is_no_text_is_refused():
    with pytest.raises(
        ValueError, match=r"'wer' expects logits .* got outputs \(2, 5\) and targets"
    ):
        wer.measure(np.zeros((2, 5)), EXPECTED)
    with pytest.raises(
        ValueError, match=r"'bleu' expects .* got outputs \(2,\) and targets \(2,\)"
    ):
        bleu.measure(np.zeros(2, int), np.zeros(2, int))

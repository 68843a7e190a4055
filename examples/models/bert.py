"""A BERT for sentences, its tokens, and the rules that import it from Hugging Face's names."""

import dataclasses
import unicodedata

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from flaxfit.importers import CheckpointTranslator

bert_translator = CheckpointTranslator()
"""Needs the option `n_heads`."""

LINEAR = {"weight": "kernel", "bias": "bias"}
NORM = {"weight": "scale", "bias": "bias"}
LAYER = r"encoder\.layer\.(\d+)"


@bert_translator.add(r"embeddings\.position_ids|pooler\..*")
def _unused(opts, name, value):
    return None


@bert_translator.add(r"embeddings\.(\w+)_embeddings\.weight")
def _embedding(opts, name, value, kind):
    return f"{kind}/embedding", value


@bert_translator.add(r"embeddings\.LayerNorm\.(weight|bias)")
def _embedding_norm(opts, name, value, part):
    return f"norm/{NORM[part]}", value


@bert_translator.add(rf"{LAYER}\.attention\.self\.(\w+)\.(weight|bias)")
def _attention(opts, name, value, layer, matrix, part):
    heads = value.T.reshape(*value.T.shape[:-1], opts["n_heads"], -1)
    return f"layer_{layer}/attention/{matrix}/{LINEAR[part]}", heads


@bert_translator.add(rf"{LAYER}\.attention\.output\.dense\.(weight|bias)")
def _attention_out(opts, name, value, layer, part):
    joined = value.T.reshape(opts["n_heads"], -1, value.shape[0]) if part == "weight" else value
    return f"layer_{layer}/attention/out/{LINEAR[part]}", joined


@bert_translator.add(rf"{LAYER}\.(attention\.)?output\.LayerNorm\.(weight|bias)")
def _norm(opts, name, value, layer, attention, part):
    return f"layer_{layer}/{'attention' if attention else 'mlp'}_norm/{NORM[part]}", value


@bert_translator.add(rf"{LAYER}\.(intermediate|output)\.dense\.(weight|bias)")
def _mlp(opts, name, value, layer, place, part):
    return f"layer_{layer}/{place}/{LINEAR[part]}", value.T


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the `config.json` of a BERT says."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def of(cls, config):
        """The sizes among all that a configuration says."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})


class SentenceBert(nn.Module):
    """Embeds sentences: the mean of BERT's outputs for their tokens, of length one."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens):
        sizes = self.sizes

        def embed(name, n, indices):
            return nn.Embed(n, sizes.hidden_size, name=name)(indices)

        x = embed("word", sizes.vocab_size, tokens)
        x += embed("position", sizes.max_position_embeddings, jnp.arange(tokens.shape[1]))
        x += embed("token_type", sizes.type_vocab_size, jnp.zeros_like(tokens))
        x = nn.LayerNorm(sizes.layer_norm_eps, name="norm")(x)
        present = tokens > 0
        mask = nn.make_attention_mask(jnp.ones_like(present), present)
        for number in range(sizes.num_hidden_layers):
            x = Layer(sizes, name=f"layer_{number}")(x, mask)
        x = jnp.where(present[..., None], x, 0).sum(1) / present.sum(1, keepdims=True)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Layer(nn.Module):
    """Attention and an MLP, each normalized together with its residual."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, mask):
        sizes = self.sizes
        attend = nn.MultiHeadDotProductAttention(sizes.num_attention_heads, name="attention")
        x = nn.LayerNorm(sizes.layer_norm_eps, name="attention_norm")(x + attend(x, mask=mask))
        y = nn.Dense(sizes.intermediate_size, name="intermediate")(x)
        y = nn.Dense(sizes.hidden_size, name="output")(nn.gelu(y, approximate=False))
        return nn.LayerNorm(sizes.layer_norm_eps, name="mlp_norm")(x + y)


class Tokenizer:
    """Splits text into the pieces of words that BERT's vocabulary (uncased) lists."""

    def __init__(self, vocabulary):
        self.index = {piece: number for number, piece in enumerate(vocabulary)}

    def __call__(self, sentences, longest=256):
        """Tokens of shape (sentences, longest sentence), padded with 0."""
        rows = [self.tokens(sentence)[: longest - 2] for sentence in sentences]
        result = np.zeros((len(rows), max(map(len, rows)) + 2), np.int32)
        for number, row in enumerate(rows):
            row = [self.index["[CLS]"], *row, self.index["[SEP]"]]
            result[number, : len(row)] = row
        return result

    def tokens(self, sentence):
        """The tokens of one sentence."""
        text = unicodedata.normalize("NFD", sentence.lower())
        text = "".join(f" {c} " if stands_alone(c) else c for c in text if is_kept(c))
        return [token for word in text.split() for token in self.pieces(word)]

    def pieces(self, word):
        """The longest pieces that a word begins with, one after the other."""
        found, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.index), None)
            if end is None:
                return [self.index["[UNK]"]]
            found.append(self.index[prefix + word[start:end]])
            start = end
        return found


def is_kept(character):
    """Whether a character is neither an accent nor invisible."""
    category = unicodedata.category(character)
    return category != "Mn" and (character in "\t\n\r" or category[0] != "C")


def stands_alone(character):
    """Whether a character is a word of its own: punctuation, or an ideograph."""
    is_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    return (
        unicodedata.category(character)[0] == "P"
        or (is_symbol and character != " ")
        or "\u4e00" <= character <= "\u9fff"
        or "\u3400" <= character <= "\u4dbf"
    )

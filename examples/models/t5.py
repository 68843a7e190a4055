"""A compact T5 (encoder and decoder) whose parameters have the names that T5X gives them.

Dropout is left out: T5 v1.1 was pretrained without.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a T5 is, and of which kind."""

    vocab: int
    d_model: int
    d_ff: int
    n_heads: int
    d_kv: int
    n_layers: int
    gated: bool = True  # False is T5 v1.0: one matrix and a relu
    tied_logits: bool = False  # True is T5 v1.0: the embedding gives the logits, too
    shared_bias: bool = True


class T5(nn.Module):
    """Logits for each token of the targets; token 0 is padding, and the start of targets."""

    sizes: Sizes

    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(self.sizes.vocab, self.sizes.d_model, name="token_embedder")
        present = (inputs > 0)[:, None, None, :]
        encoded = Encoder(self.sizes, name="encoder")(embed(inputs), present)
        before = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return Decoder(self.sizes, name="decoder")(embed(before), encoded, present, embed)


class Encoder(nn.Module):
    """Layers in which every position sees all that are present."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, present):
        shared = relative_bias(self.sizes, x) if self.sizes.shared_bias else None
        for number in range(self.sizes.n_layers):
            x = EncoderLayer(self.sizes, name=f"layers_{number}")(x, present, shared)
        return nn.RMSNorm(name="encoder_norm")(x)


class EncoderLayer(nn.Module):
    """Attention and an MLP, each around a residual."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, present, bias):
        if bias is None:
            bias = relative_bias(self.sizes, x)
        y = nn.RMSNorm(name="pre_attention_layer_norm")(x)
        x = x + Attention(self.sizes, name="attention")(y, y, present, bias)
        return x + MLP(self.sizes, name="mlp")(nn.RMSNorm(name="pre_mlp_layer_norm")(x))


class Decoder(nn.Module):
    """Layers in which a position sees those before it, and the encoder's outputs."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, encoded, present, embed):
        shared = relative_bias(self.sizes, x, both_ways=False) if self.sizes.shared_bias else None
        for number in range(self.sizes.n_layers):
            x = DecoderLayer(self.sizes, name=f"layers_{number}")(x, encoded, present, shared)
        x = nn.RMSNorm(name="decoder_norm")(x)
        if self.sizes.tied_logits:
            return embed.attend(x / jnp.sqrt(self.sizes.d_model))
        return nn.Dense(self.sizes.vocab, use_bias=False, name="logits_dense")(x)


class DecoderLayer(nn.Module):
    """Attention to what is before, attention to the encoder's outputs, and an MLP."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, encoded, present, bias):
        if bias is None:
            bias = relative_bias(self.sizes, x, both_ways=False)
        before = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        y = nn.RMSNorm(name="pre_self_attention_layer_norm")(x)
        x = x + Attention(self.sizes, name="self_attention")(y, y, before, bias)
        y = nn.RMSNorm(name="pre_cross_attention_layer_norm")(x)
        x = x + Attention(self.sizes, name="encoder_decoder_attention")(y, encoded, present, 0)
        return x + MLP(self.sizes, name="mlp")(nn.RMSNorm(name="pre_mlp_layer_norm")(x))


class Attention(nn.Module):
    """Attention of several heads; T5 scales no scores."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x, y, mask, bias):
        def project(name, array):
            joined = self.sizes.n_heads * self.sizes.d_kv
            array = nn.Dense(joined, use_bias=False, name=name)(array)
            return array.reshape(*array.shape[:2], self.sizes.n_heads, self.sizes.d_kv)

        query, key, value = project("query", x), project("key", y), project("value", y)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        flat = mixed.reshape(*mixed.shape[:2], -1)
        return nn.Dense(self.sizes.d_model, use_bias=False, name="out")(flat)


class MLP(nn.Module):
    """Two layers; in T5 v1.1 a linear one gates the first."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        def wide(name):
            return nn.Dense(self.sizes.d_ff, use_bias=False, name=name)(x)

        hidden = nn.gelu(wide("wi_0")) * wide("wi_1") if self.sizes.gated else nn.relu(wide("wi"))
        return nn.Dense(self.sizes.d_model, use_bias=False, name="wo")(hidden)


def relative_bias(sizes, x, both_ways=True):
    """What each head adds to the scores of the positions of x."""
    return RelativeBias(sizes.n_heads, both_ways, name="relpos_bias")(x.shape[1])


class RelativeBias(nn.Module):
    """What the distance of two positions adds to their score; far ones share buckets."""

    n_heads: int
    both_ways: bool
    n_buckets: int = 32
    farthest: int = 128

    @nn.compact
    def __call__(self, length):
        embedding = self.param(
            "rel_embedding", nn.initializers.normal(0.1), (self.n_heads, self.n_buckets)
        )
        positions = jnp.arange(length)
        distance = positions[:, None] - positions[None, :]  # positive: the key is before
        n_buckets, first = self.n_buckets, 0
        if self.both_ways:
            n_buckets //= 2
            first = jnp.where(distance < 0, n_buckets, 0)
        distance = jnp.abs(distance) if self.both_ways else jnp.maximum(distance, 0)
        exact = n_buckets // 2
        ratio = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(self.farthest / exact)
        far = exact + (ratio * (n_buckets - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(far, n_buckets - 1))
        return embedding[:, first + bucket]

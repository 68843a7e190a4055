"""Split a model over devices: a character transformer, data-parallel and then in parts.

    python examples/06_sharded.py

On a machine without accelerators the four devices are simulated. What changes from one run to
the other is a single argument, `strategy`.
"""

import pydoc_data.topics

import flax.linen as nn
import jax
import numpy as np
import optax

import flaxfit as ff

LENGTH, VOCAB, WIDTH, N_HEADS = 32, 128, 64, 4
split = nn.with_logical_partitioning
normal, glorot = nn.initializers.normal(0.25), nn.initializers.glorot_normal()


class Block(nn.Module):
    """Attention and a feed-forward layer; the dimensions of their kernels have names."""

    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(
            N_HEADS,
            kernel_init=split(glorot, ("embed", "heads", "kv")),
            out_kernel_init=split(glorot, ("heads", "kv", "embed")),
        )
        x += attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        up = nn.Dense(4 * WIDTH, kernel_init=split(glorot, ("embed", "mlp")))
        down = nn.Dense(WIDTH, kernel_init=split(glorot, ("mlp", "embed")))
        inner = nn.with_logical_constraint(nn.gelu(up(nn.LayerNorm()(x))), ("batch", None, "mlp"))
        return x + down(inner)


class Transformer(nn.Module):
    """Predicts each next character."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=split(normal, ("vocab", "embed")))
        places = nn.Embed(LENGTH, WIDTH, name="places")(np.arange(LENGTH))
        x = Block()(table(tokens) + places)
        return table.attend(nn.LayerNorm()(x))


def read_text():
    """Python's own help, as windows of characters and the characters that follow."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    codes = np.frombuffer(text, np.uint8).astype(np.int32)
    windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return windows[:, :-1], windows[:, 1:]


def train(strategy, x, y):
    model = ff.Model(
        Transformer(), optax.adamw(5e-3), "crossentropy", ["accuracy"], strategy=strategy
    )
    history = model.fit(x[512:3072], y[512:3072], batch_size=16, verbose=2)
    return model, history["loss"][-1]


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    x, y = read_text()

    # A copy of the model on each of four devices, and a quarter of each batch.
    _, expected = train(ff.DataParallel(), x, y)

    # Each pair of devices splits the heads and the feed-forward layers of the block; the two pairs
    # split each batch, and every array once more. No device ever holds the whole model.
    strategy = ff.Sharded.tensor_parallel(2, fsdp=True)
    model, loss = train(strategy, x, y)
    layout = strategy.describe(model.state)
    print(f"state {layout.n_bytes:,} bytes, {layout.bytes_per_device:,} on each device")
    print(f"loss {expected:.4f} data-parallel, {loss:.4f} in parts")
    print(f"test accuracy {model.evaluate(x[:512], y[:512])['accuracy']:.4f}")


if __name__ == "__main__":
    main()

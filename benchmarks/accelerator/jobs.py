"""Jobs: models, and synthetic data that needs no download."""

import dataclasses

import numpy as np

from benchmarks.workloads import Workload


@dataclasses.dataclass(frozen=True)
class Job(Workload):
    """A workload, and the precision that its network computes in."""

    precision: str | None = None
    """Of the network; parameters, loss and metrics are in float32."""


def mlp(quick: bool) -> Job:
    """64-width-10: a step with almost no work."""
    batch_size, n_steps, width = (64, 32, 16) if quick else (64, 320, 128)
    random = np.random.default_rng(0)
    x = random.normal(size=(batch_size * n_steps, 64)).astype(np.float32)
    y = (x @ random.normal(size=(64, 10))).argmax(-1).astype(np.int32)
    return Job("mlp", x, y, batch_size, 10, 1, (width,))


def cnn(quick: bool) -> Job:
    """Two convolutions on images of 28x28, one noisy pattern for each class."""
    batch_size, n_steps, sizes = (8, 8, (4, 8, 16)) if quick else (256, 64, (32, 64, 256))
    random = np.random.default_rng(0)
    y = random.integers(0, 10, size=batch_size * n_steps).astype(np.int32)
    x = random.normal(size=(len(y), 28, 28, 1)).astype(np.float32)
    x += random.normal(size=(10, 28, 28, 1)).astype(np.float32)[y]
    return Job("cnn", x, y, batch_size, 10, 1, sizes)


def transformer(quick: bool) -> Job:
    """A language model in bfloat16, of 98 million parameters, on 8,192 tokens a step."""
    if quick:
        batch_size, n_steps, n_tokens, sizes = 4, 4, 64, (16, 1, 2, 8)
    else:
        batch_size, n_steps, n_tokens, sizes = 16, 16, 8192, (768, 12, 12, 512)
    random, length = np.random.default_rng(0), sizes[-1]
    # Each token follows from the one before it in three cases of four.
    tokens = random.integers(0, n_tokens, size=(batch_size * n_steps, length + 1))
    for i in range(length):
        follows = random.random(len(tokens)) < 0.75
        tokens[follows, i + 1] = (5 * tokens[follows, i] + 1) % n_tokens
    tokens = tokens.astype(np.int32)
    x, y = (np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:]))
    return Job("transformer", x, y, batch_size, n_tokens, 1, sizes, 3e-4, precision="bfloat16")


JOBS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}

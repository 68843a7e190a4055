"""Real, weighted, uneven data, and measuring it the hard way."""

from typing import Any

import jax
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

PADDED_SIZE = 128


def columns(load: Any) -> tuple[np.ndarray, np.ndarray]:
    return load(return_X_y=True)


def weights_for(n_rows):
    return np.random.default_rng(7).uniform(0.1, 3.0, n_rows).astype(np.float32)


def extra(name, module):
    return pytest.importorskip(module, reason=f"{name} is an extra: pip install 'flaxfit[metrics]'")


@pytest.fixture(scope="session")
def clu():
    return extra("clu", "clu.metrics")


@pytest.fixture(scope="session")
def metrax():
    return extra("google-metrax", "metrax")


@pytest.fixture(scope="session")
def digits():
    """Logits of a nearest-centroid classifier (not a perfect one), labels, weights."""
    x, labels = columns(load_digits)
    x, labels = x[:401].astype(np.float32), labels[:401].astype(np.int32)
    centroids = np.stack([x[labels == label][:3].mean(0) for label in range(10)])
    logits = -np.square(x[:, None] - centroids).mean(-1) / 10
    return logits, labels, weights_for(len(x))


@pytest.fixture(scope="session")
def tumours():
    """A single score, binary labels, weights."""
    x, labels = columns(load_breast_cancer)
    x = (x - x.mean(0)) / x.std(0)
    return (-2 * x[:, 4] - x[:, 11]).astype(np.float32), labels.astype(np.int32), weights_for(569)


@pytest.fixture(scope="session")
def diabetes():
    """Predictions of a least-squares fit on three columns, targets, weights."""
    x, y = columns(load_diabetes)
    x = np.column_stack([x[:, [2, 3, 8]], np.ones(len(x))])
    outputs = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    return outputs.astype(np.float32), y.astype(np.float32), weights_for(len(y))


@pytest.fixture(scope="session")
def measured():
    """Measures uneven batches under jit, padded with rows of NaN and weight 0; adds; computes."""

    def pad(array, n_rows, filling):
        filling = filling if np.issubdtype(array.dtype, np.floating) else 0
        rest = np.full((PADDED_SIZE - n_rows, *array.shape[1:]), filling, array.dtype)
        return np.concatenate([array, rest])

    def measured(metric, *arrays, weights=None):
        weights = np.ones(len(arrays[0]), np.float32) if weights is None else weights
        measure = jax.jit(metric.measure)
        batches, start = [], 0
        for size in [1, 37, 128, 2, *([100] * 10)]:
            cut = slice(start, start := start + size)
            n_rows = len(weights[cut])
            if n_rows:
                batch = [pad(array[cut], n_rows, np.nan) for array in arrays]
                batches.append(measure(*batch, weights=pad(weights[cut], n_rows, 0.0)))
        sums = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(batches))
        return metric.compute(sums)

    return measured

"""Likeness of images: the peak signal-to-noise ratio and the structural similarity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.metrics._metric import Metric, mean
from flaxfit.metrics._regression import check_numbers
from flaxfit.tree import Array, ArrayLike


def _psnr(*, max_val: float = 1.0) -> Metric:
    def values(outputs: ArrayLike, targets: ArrayLike) -> Array:
        outputs, targets = check_numbers(outputs, targets)
        errors = jnp.square(outputs - targets).reshape(len(outputs), -1).mean(1)
        return 10 * jnp.log10(max_val**2 / errors)

    return dataclasses.replace(mean(values, name="psnr"), configure=_psnr)


psnr: Metric = _psnr()
"""The peak signal-to-noise ratio in dB, the mean over the images; `max_val` is the peak, 1.0."""


def _ssim(*, max_val: float = 1.0, size: int = 11, sigma: float = 1.5) -> Metric:
    places = np.arange(size) - (size - 1) / 2
    kernel = np.exp(-((places / sigma) ** 2) / 2)
    kernel /= kernel.sum()

    def blurred(images: Array) -> Array:
        """Returns a Gaussian mean around each pixel, where the window lies inside."""
        for axis in 1, 2:
            n = images.shape[axis] - size + 1
            parts = [
                w * jax.lax.slice_in_dim(images, i, i + n, axis=axis) for i, w in enumerate(kernel)
            ]
            images = jnp.stack(parts).sum(0)
        return images

    def values(outputs: ArrayLike, targets: ArrayLike) -> Array:
        a, b = check_numbers(outputs, targets)
        if a.ndim != 4 or min(a.shape[1:3]) < size:
            raise ValueError(
                "The metric 'ssim' expects images (batch, height, width, channels) of at least "
                f"{size} x {size} pixels, got {a.shape}: reshape them, or pass ssim(size=...)."
            )
        first, second = (0.01 * max_val) ** 2, (0.03 * max_val) ** 2
        mean_a, mean_b = blurred(a), blurred(b)
        shared = blurred(a * b) - mean_a * mean_b
        spreads = blurred(a * a) - mean_a**2 + blurred(b * b) - mean_b**2
        found = (2 * mean_a * mean_b + first) * (2 * shared + second)
        found /= (mean_a**2 + mean_b**2 + first) * (spreads + second)
        return found.reshape(len(a), -1).mean(1)

    return dataclasses.replace(mean(values, name="ssim"), configure=_ssim)


ssim: Metric = _ssim()
"""The structural similarity (Wang et al. 2004) of images `(batch, height, width, channels)`.

The mean over the images. `max_val` is the range of the values, 1.0 unless given; the window is
Gaussian, of `size` 11 and `sigma` 1.5.
"""

import numpy as np
import pytest
from measuring import value_of

from flaxfit.metrics import psnr, ssim

IMAGES = np.random.default_rng(0).uniform(size=(3, 4, 5, 2)).astype(np.float32)
OTHERS = np.clip(IMAGES + np.float32([0.1, 0.2, -0.3]).reshape(3, 1, 1, 1), 0, 1)
WEIGHTS = np.float32([1, 3, 0.5])


def test_the_ratio_of_peak_and_noise_is_the_mean_over_images():
    errors = np.square(IMAGES - OTHERS).mean((1, 2, 3))
    expected = np.average(-10 * np.log10(errors), weights=WEIGHTS)
    assert value_of(psnr, OTHERS, IMAGES, weights=WEIGHTS) == pytest.approx(expected, rel=1e-5)
    value = value_of(psnr(max_val=255), 255 * OTHERS, 255 * IMAGES, weights=WEIGHTS)
    assert value == pytest.approx(expected, rel=1e-5)


def by_hand(a, b, kernel):
    """Of one window that is as large as the image, by channel."""

    def average(image):
        return np.einsum("hwc,h,w->c", image, kernel, kernel)

    shared = average(a * b) - average(a) * average(b)
    spreads = average(a * a) - average(a) ** 2 + average(b * b) - average(b) ** 2
    found = (2 * average(a) * average(b) + 1e-4) * (2 * shared + 9e-4)
    return (found / (average(a) ** 2 + average(b) ** 2 + 1e-4) / (spreads + 9e-4)).mean()


def test_structural_similarity_is_that_of_means_and_spreads_in_windows():
    a, b = IMAGES[:, :, :4].astype(float), OTHERS[:, :, :4].astype(float)
    kernel = np.exp(-np.square([-1.5, -0.5, 0.5, 1.5]) / 2)
    expected = [by_hand(*pair, kernel / kernel.sum()) for pair in zip(a, b, strict=True)]
    metric = ssim(size=4, sigma=1.0)
    value = value_of(metric, OTHERS[:, :, :4], IMAGES[:, :, :4], weights=WEIGHTS)
    assert value == pytest.approx(np.average(expected, weights=WEIGHTS), rel=1e-4)
    assert value_of(metric, IMAGES, IMAGES) == pytest.approx(1)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"at least 11 x 11 pixels, got \(3, 4, 5, 2\).*size="):
        ssim.measure(OTHERS, IMAGES)
    with pytest.raises(ValueError, match=r"'ssim' expects images .* got \(3, 40\)"):
        ssim.measure(OTHERS.reshape(3, -1), IMAGES.reshape(3, -1))
    with pytest.raises(ValueError, match="targets of the shape of the outputs"):
        psnr.measure(OTHERS[..., 0], IMAGES)

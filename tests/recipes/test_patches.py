"""Features of images that are learnt from the images themselves."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from bilevel_recipes.data import load
from bilevel_recipes.patches import Patches, filter_count, measure, patch_size, reduce


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(40, 8, 8), (40, 12, 15, 3), (3, 4, 4), (40, 28, 28)])
def test_features_are_finite_and_standardised(shape):
    images = noise(*shape)
    x = Patches.learn(images, count=10).encode(images)
    assert x.shape == (shape[0], 180)
    assert x.dtype == np.float32
    assert np.isfinite(x).all()
    varying = x.std(0) > 0
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(x.std(0)[varying], 1, rtol=1e-3)


def test_the_seed_decides():
    images = noise(30, 10, 10)
    first, again, other = (Patches.learn(images, count=5, seed=seed).encode(images) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    Patches.learn(noise(30, 10, 10), count=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_is_encoded_by_itself():
    images = noise(300, 16, 16, 3)
    learnt = Patches.learn(images, count=20)
    np.testing.assert_allclose(learnt.encode(images)[7:9], learnt.encode(images[7:9]), atol=1e-4)


def test_the_convolution_is_the_formula():
    """Against each patch by itself: normalise, multiply, threshold, average in parts."""
    images = noise(2, 11, 9, 3)
    learnt = Patches.learn(images, size=3, count=4)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double()
    patches = F.unfold(x, 3).transpose(1, 2)  # 2 × (9·7) × 27
    centred = patches - patches.mean(2, keepdim=True)
    z = centred / (centred.square().mean(2, keepdim=True) + learnt.flat).sqrt()
    response = (z @ learnt.filters.double().flatten(1).T - learnt.bias.double()).transpose(1, 2).reshape(2, 4, 9, 7)
    both = [F.adaptive_avg_pool2d((sign * response - learnt.threshold).relu(), 3) for sign in (-1, 1)]
    expected = (torch.cat(both, 1).flatten(1).sqrt() - learnt.mean) / learnt.deviation
    np.testing.assert_allclose(learnt.encode(images), expected.nan_to_num(0, 0, 0), atol=1e-3)


def test_filters_do_not_see_brightness():
    images = noise(30, 10, 10) // 2
    learnt = Patches.learn(images, count=8)
    np.testing.assert_allclose(learnt.encode(images + np.uint8(100)), learnt.encode(images), atol=1e-2)


def test_images_without_any_contrast_give_zeros():
    images = np.full((5, 8, 8), 7, np.uint8)
    np.testing.assert_array_equal(Patches.learn(images, count=4).encode(images), np.zeros((5, 72)))


def test_a_linear_model_does_better_on_patches_than_on_pixels(digits):
    """Digits of new writers: 0.97 against 0.93."""
    learnt = Patches.learn(digits.x)

    def accuracy(train, test):
        return LogisticRegression(max_iter=300).fit(train, digits.y).score(test, digits.y_test)

    pixels = accuracy(digits.x.reshape(-1, 64) / 255, digits.x_test.reshape(-1, 64) / 255)
    patches = accuracy(learnt.encode(digits.x), learnt.encode(digits.x_test))
    assert patches > 0.96
    assert patches > pixels + 0.02


def test_effort_is_chosen_by_size():
    assert [patch_size(side, side) for side in (4, 8, 28, 64)] == [2, 3, 8, 8]
    assert filter_count(5000 * 32 * 32) == 200
    assert filter_count(60_000 * 28 * 28) == 106
    assert filter_count(10**12) == 50


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (noise(3, 8, 8).astype(np.float32), "one uint8 array.*float32"),
        ([noise(8, 8)], "one uint8 array.*list"),
        (noise(3, 8, 8, 4), "1 or 3 colours"),
        (noise(3, 8, 3), "4 × 4 pixels or more"),
        (noise(0, 8, 8), "at least one image"),
    ],
)
def test_what_is_no_images_is_refused(images, words):
    with pytest.raises(ValueError, match=words):
        Patches.learn(images)


def test_other_colours_or_patches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 colours; these have 3"):
        Patches.learn(noise(3, 8, 8), count=2).encode(noise(3, 8, 8, 3))
    with pytest.raises(ValueError, match="patch of 9"):
        Patches.learn(noise(3, 8, 8), size=9)
    with pytest.raises(ValueError, match="8 × 5 pixels"):
        Patches.learn(noise(3, 28, 28), count=2).encode(noise(3, 8, 5))


@pytest.mark.parametrize("shape", [(300, 40), (30, 40)])
def test_reduce_whitens_as_far_as_it_is_told(shape):
    x = (np.random.default_rng(0).normal(size=shape) * np.linspace(1, 9, 40)).astype(np.float32)
    full, half, none = (reduce(x, 6, whitening) for whitening in (1, 0.5, 0))
    for result in (full, half, none):
        assert result.shape == (shape[0], 6)
        assert result.dtype == np.float32
        np.testing.assert_allclose(np.square(result).mean(), 1, rtol=1e-3)
    np.testing.assert_allclose(full.std(0), 1, rtol=1e-3)
    # partial whitening takes the square root of the ratios of the deviations
    np.testing.assert_allclose(half.std(0) / half.std(0)[0], np.sqrt(none.std(0) / none.std(0)[0]), rtol=1e-3)
    np.testing.assert_array_equal(half, reduce(x, 6, 0.5))


def test_reduce_gives_no_more_than_there_is():
    x = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    result = reduce(x, 512, 1)
    assert result.shape[1] <= 5
    assert np.isfinite(result).all()


def test_the_command_prints_a_table(tmp_path, capsys):
    measure(tmp_path, ("digits",), (32,), (0.5,))
    _, pixels, patches = (line.split() for line in capsys.readouterr().out.splitlines())
    assert pixels[:3] == ["digits", "pixels", "64"]
    assert patches[-4] == "32"
    assert float(patches[-3]) > 0.9

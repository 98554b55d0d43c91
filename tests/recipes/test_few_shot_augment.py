"""Random changes of training images."""

from __future__ import annotations

import pytest
import torch

from bilevel_recipes.few_shot.augment import Augment


def ramp(n: int = 400, size: int = 21) -> torch.Tensor:
    """Images whose pixels rise from left to right."""
    return torch.arange(size, dtype=torch.float32).expand(n, 2, size, size).contiguous()


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_nothing_to_change_changes_nothing() -> None:
    assert torch.equal(Augment()(ramp(), draw()), ramp())


def test_a_mirrored_image_is_the_image_backwards_in_every_channel() -> None:
    found = Augment(mirror=True)(ramp(), draw())
    mirrored = found[:, 0, 0, 0] > 0
    assert 0.4 < float(mirrored.float().mean()) < 0.6
    assert torch.equal(found[mirrored], ramp()[mirrored].flip(-1))
    assert torch.equal(found[~mirrored], ramp()[~mirrored])


def test_a_shift_moves_by_at_most_its_share_of_the_side_and_uses_it() -> None:
    moved = Augment(shift=0.1)(ramp(), draw())[:, 0, 10, 10] - 10  # how far the middle has moved, in pixels
    assert 1.9 < float(moved.abs().max()) <= 2.1
    assert float(moved.min()) < -1.9
    assert abs(float(moved.mean())) < 0.2


def test_a_zoom_multiplies_distances_by_a_factor_between_its_bounds() -> None:
    found = Augment(zoom=0.25)(ramp(), draw())
    slope = (found[:, 0, 10, 14] - found[:, 0, 10, 6]) / 8
    assert 0.8 - 1e-4 <= float(slope.min()) < 0.82
    assert 1.22 < float(slope.max()) <= 1.25 + 1e-4


def test_a_turn_is_at_most_its_angle() -> None:
    found = Augment(turn=30.0)(ramp(), draw())
    rise = (found[:, 0, 14, 10] - found[:, 0, 6, 10]) / 8  # sine of the angle
    assert 0.48 < float(rise.abs().max()) <= 0.5 + 1e-4
    across = (found[:, 0, 10, 14] - found[:, 0, 10, 6]) / 8  # its cosine
    assert torch.allclose(rise**2 + across**2, torch.ones(400), atol=1e-4)


def test_light_keeps_the_order_of_pixels_and_changes_contrast_and_brightness() -> None:
    found = Augment(light=0.5)(ramp(), draw())
    contrast = found[:, 0, 0].diff(dim=-1)
    assert bool((contrast > 0).all())
    assert torch.allclose(contrast, contrast[:, :1].expand_as(contrast), atol=1e-5)
    assert 0.5 <= float(contrast.min()) < 0.55
    assert 1.45 < float(contrast.max()) <= 1.5
    assert 0.45 < float(found[:, 0, 0, 0].abs().max()) <= 0.5


def test_what_is_drawn_depends_on_the_generator_alone() -> None:
    every = Augment(mirror=True, shift=0.1, turn=10.0, zoom=0.2, light=0.3)
    first, again = every(ramp(), draw()), every(ramp(), draw())
    assert torch.equal(first, again)
    assert not torch.equal(first, every(ramp(), torch.Generator().manual_seed(1)))


def test_no_image_is_no_image() -> None:
    assert Augment(mirror=True, shift=0.1)(ramp(0), draw()).shape == (0, 2, 21, 21)


@pytest.mark.parametrize("name", ["shift", "turn", "zoom", "light"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_an_impossible_amount_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} of the augmentation must be at least 0"):
        Augment(**{name: value})

"""The meters against values known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from flowrl.training import meters


def uniform(red: float, green: float, blue: float, size: int = 8) -> torch.Tensor:
    return torch.tensor([red, green, blue]).view(1, 3, 1, 1).expand(1, 3, size, size).clone()


def halves(left: float, right: float, size: int = 8) -> torch.Tensor:
    images = uniform(left, left, left, size)
    images[..., size // 2 :] = right
    return images


def test_brightness_is_the_mean_luma() -> None:
    assert meters.brightness(uniform(1, 0, 0)) == pytest.approx(0.299)
    assert meters.brightness(torch.cat([uniform(1, 1, 1), uniform(0, 0, 0)])) == pytest.approx(0.5)


def test_contrast_is_the_deviation_within_an_image() -> None:
    assert meters.contrast(halves(0.2, 0.6)) == pytest.approx(0.2)
    # Flat images that differ from each other have none.
    assert meters.contrast(torch.cat([uniform(1, 1, 1), uniform(0, 0, 0)])) == pytest.approx(0)


def test_saturation_is_that_of_hsv() -> None:
    assert meters.saturation(uniform(0.8, 0.2, 0.4)) == pytest.approx(0.75)
    assert meters.saturation(uniform(0.5, 0.5, 0.5)) == 0
    assert meters.saturation(uniform(0, 0, 0)) == 0


def test_edge_density_counts_one_column_of_a_step() -> None:
    assert meters.edge_density(halves(0, 1, size=9)) == pytest.approx(1 / 8)
    assert meters.edge_density(halves(0, 0.09, size=9)) == 0
    checkerboard = (torch.arange(8)[:, None] + torch.arange(8)) % 2
    assert meters.edge_density(checkerboard.expand(1, 3, 8, 8).float()) == 1


def test_color_entropy_is_the_log_of_equally_common_colors() -> None:
    assert meters.color_entropy(uniform(0.3, 0.9, 0.1)) == 0
    assert meters.color_entropy(halves(0, 1)) == pytest.approx(1)
    ramp = torch.linspace(0, 1, 8).view(1, 1, 1, 8).expand(1, 3, 8, 8)
    assert meters.color_entropy(ramp) == pytest.approx(3)
    every_color = torch.cartesian_prod(*[(torch.arange(8) + 0.5) / 8] * 3).T.reshape(1, 3, 16, 32)
    assert meters.color_entropy(every_color) == pytest.approx(9)


def test_image_meters_holds_every_meter_as_a_plain_float() -> None:
    found = meters.image_meters(torch.rand(3, 3, 16, 16))
    assert list(found) == ["brightness", "contrast", "saturation", "edge_density", "color_entropy"]
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


def test_diversity_is_the_mean_rms_distance_within_groups() -> None:
    images = torch.cat([uniform(v, v, v) for v in (0.0, 0.3, 0.9, 0.5, 0.5)])
    groups = torch.tensor([4, 4, 4, 7, 7])
    # Pairs of group 4 are 0.3, 0.9 and 0.6 apart; those of group 7 not at all.
    assert meters.pairwise_diversity(images, groups) == pytest.approx((0.6 + 0.0) / 2)
    everything = [
        abs(a - b) for k, a in enumerate((0, 0.3, 0.9, 0.5, 0.5)) for b in (0, 0.3, 0.9, 0.5, 0.5)[:k]
    ]
    assert meters.pairwise_diversity(images) == pytest.approx(sum(everything) / 10)


def test_diversity_does_not_depend_on_order_and_ignores_groups_of_one() -> None:
    images, groups = torch.rand(6, 3, 16, 16), torch.tensor([0, 0, 1, 1, 1, 2])
    order = torch.randperm(6)
    whole = meters.pairwise_diversity(images, groups)
    assert meters.pairwise_diversity(images[order], groups[order]) == pytest.approx(whole, rel=1e-6)
    assert meters.pairwise_diversity(images[:5], groups[:5]) == pytest.approx(whole, rel=1e-6)


def test_diversity_of_large_images_is_that_of_their_averages() -> None:
    small = torch.rand(4, 3, 64, 64)
    large = small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    assert meters.pairwise_diversity(large) == pytest.approx(meters.pairwise_diversity(small), rel=1e-5)
    checkerboard = ((torch.arange(128)[:, None] + torch.arange(128)) % 2).float().expand(1, 3, 128, 128)
    assert meters.pairwise_diversity(torch.cat([checkerboard, 1 - checkerboard])) == pytest.approx(
        0, abs=1e-6
    )


def test_diversity_without_a_pair_is_not_a_number() -> None:
    assert math.isnan(meters.pairwise_diversity(torch.rand(3, 3, 8, 8), torch.arange(3)))
    assert math.isnan(meters.pairwise_diversity(torch.rand(1, 3, 8, 8)))


@pytest.mark.parametrize("meter", [*vars(meters).values()], ids=[*vars(meters)])
def test_wrong_shapes_are_refused(meter: Callable[..., object]) -> None:
    if getattr(meter, "__module__", "") != meters.__name__ or meter.__name__.startswith("_"):
        return
    if meter is meters.text_diversity:
        return  # takes no images
    for shape in ((3, 8, 8), (2, 1, 8, 8), (0, 3, 8, 8)):
        with pytest.raises(ValueError, match="need images"):
            meter(torch.zeros(shape))


def test_one_group_for_each_image_is_needed() -> None:
    with pytest.raises(ValueError, match="one group for each"):
        meters.pairwise_diversity(torch.rand(3, 3, 8, 8), torch.zeros(2))

"""Warnings of trainings that cannot learn, or have not: the words, the limits, and that every task says them."""

from __future__ import annotations

import pytest
from scipy.stats import binom

from dpn_cli.sanity import crop_warning, result_warning


@pytest.mark.parametrize(
    ("crop", "pictures", "share"),
    [
        ((28, 28), [(512, 512)], "0.3"),
        ((64, 64), [(418, 418), (418, 600), (418, 500)], "2.0"),
        ((10, 10), [(10, 500)], "2.0"),
        ((50, 50), [(10, 500), (300, 300), (5000, 20)], "2.8"),
    ],
)
def test_a_crop_below_a_twentieth_of_the_pictures_is_said(
    crop: tuple[int, int], pictures: list[tuple[int, int]], share: str
) -> None:
    warning = crop_warning(crop, pictures)
    assert warning is not None
    assert f"crops of {crop[0]}x{crop[1]} cover {share} % of the pictures" in warning


@pytest.mark.parametrize("pictures", [[], [(28, 28)], [(14, 14)], [(125, 125)], [(125, 125), (9000, 9000), (20, 20)]])
def test_other_crops_are_not(pictures: list[tuple[int, int]]) -> None:
    assert crop_warning((28, 28), pictures) is None


def test_a_score_has_to_beat_the_highest_floor_by_more_than_luck() -> None:
    floors = {"chance": 10.0, "always naming the most frequent class": 20.0}
    warning = result_warning("validation top-1", 15.0, floors, 100)
    assert warning is not None
    assert "NOTHING LEARNT: validation top-1 15.00 % of 100 is not above always naming the most frequent" in warning
    # The one-sided binomial test of 100 answers at 20 %: 27 may be luck, 28 is not.
    assert binom.sf(26, 100, 0.2) > 0.05 > binom.sf(27, 100, 0.2)
    assert result_warning("", 27.0, floors, 100) is not None
    assert result_warning("", 28.0, floors, 100) is None
    assert result_warning("mIoU", 20.1, floors) is None
    assert result_warning("mIoU", 20.0, floors) is not None
    assert result_warning("", 0.0, floors, 100) is not None


def test_one_class_alone_is_no_reason_to_warn() -> None:
    assert result_warning("", 100.0, {"chance": 100.0}, 50) is None
    assert result_warning("", 90.0, {"chance": 100.0}, 50) is not None

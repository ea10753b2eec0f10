"""Means, intervals and paired differences against SciPy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import stats

from dpn_cli.statistics import PERCENT, as_text, format_accuracy, paired_difference, summarize, wilson_interval


def test_summary_equals_scipy() -> None:
    values = [71.2, 73.4, 72.9, 70.1]
    summary = summarize(values)
    low, high = stats.t.interval(0.95, 3, loc=summary.mean, scale=stats.sem(values))
    assert summary.mean == pytest.approx(71.9)
    assert summary.stderr == pytest.approx(stats.sem(values))
    assert summary.ci95 == pytest.approx((low, high))


def test_one_value_has_no_spread() -> None:
    assert (summarize([5.0]).stderr, summarize([5.0]).ci95) == (None, None)


def test_equal_values_have_no_interval_and_are_marked() -> None:
    with warnings.catch_warnings(action="ignore"):
        assert np.isnan(stats.ttest_1samp([5.0, 5.0], 5.0).pvalue)  # SciPy knows no test of them either
    equal = summarize([5.0, 5.0])
    assert (equal.mean, equal.stderr, equal.ci95) == (5.0, 0.0, None)
    assert paired_difference([70.3, 60.2], [70.2, 60.1]).ci95 is None  # up to rounding
    assert as_text(equal.to_dict()) == ("5.00", "all equal")
    assert as_text({**equal.to_dict(), "ci95": [5.0, 5.0]}) == ("5.00", "all equal")  # of an older result
    assert as_text(summarize([5.0]).to_dict()) == ("5.00", "-")
    assert as_text(summarize([4.0, 6.0]).to_dict(), digits=1) == ("5.00 ± 1.00", "-7.7 … 17.7")


def test_pairing_removes_the_variance_that_pairs_share() -> None:
    shared = [60.0, 70.0, 80.0]
    difference = paired_difference([x + 1 for x in shared], shared)
    assert (difference.mean, difference.stderr) == (1.0, 0.0)
    result = stats.ttest_rel([61, 70.5, 82], shared)
    actual = paired_difference([61, 70.5, 82], shared)
    assert actual.ci95 == pytest.approx(tuple(result.confidence_interval(0.95)))
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], shared)


def test_an_interval_of_accuracies_stays_between_0_and_100() -> None:
    # Two seeds at 99.5 and 100: the t-interval of one degree of freedom alone would reach 102.9.
    assert summarize([99.5, 100.0], PERCENT).ci95 == pytest.approx((96.573, 100.0), abs=1e-3)
    assert summarize([0.5, 0.0], PERCENT).ci95 == pytest.approx((0.0, 3.427), abs=1e-3)
    assert paired_difference([100.0, 0.0], [0.0, 50.0]).ci95 == (-100.0, 100.0)


@pytest.mark.parametrize(("right", "images"), [(0, 7), (7, 7), (30, 50), (104, 341), (1, 100_000)])
def test_the_interval_of_an_accuracy_is_wilsons(right: int, images: int) -> None:
    """Its ends are the shares from which the observed one is 1.96 of their own standard deviations away."""
    z = stats.norm.ppf(0.975)
    low, high = (end / 100 for end in wilson_interval(100 * right / images, images))
    for end in (low, high):
        assert (right / images - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / images, abs=1e-12)
    assert low <= right / images <= high
    assert low < high


def test_an_accuracy_is_printed_with_its_images_and_interval() -> None:
    assert format_accuracy(60.0, 50, "test images") == "60.00 % of 50 test images (95 % interval 46.2 to 72.4)"

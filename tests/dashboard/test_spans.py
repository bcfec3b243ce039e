"""Durations in words."""

import pytest
from django.utils import translation

from djqueue.core.metrics import BOUNDS, Percentile
from djqueue.dashboard.rendering import duration
from djqueue.templatetags.djq import percentile_span


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0 ms"),
        (12.4, "12 ms"),
        (1_000, "1 s"),
        (1_230, "1.2 s"),
        (90_000, "90 s"),
        (150_000, "2.5 min"),
        (3_600_000, "60 min"),
        (9_000_000, "2.5 h"),
        (86_400_000 * 3, "3 d"),
    ],
)
def test_each_duration_has_its_unit(milliseconds, words):
    with translation.override("en"):
        assert duration(milliseconds) == words


def test_percentile_beyond_the_bounds_of_histograms_is_a_lower_limit():
    with translation.override("en"):
        found = [Percentile(4_200_000, is_floor=False), Percentile(BOUNDS[-1], is_floor=True)]
        assert [percentile_span(value) for value in (None, *found)] == ["-", "70 min", "≥ 24 h"]

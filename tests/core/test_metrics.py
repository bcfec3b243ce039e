"""Histograms with fixed bins, and buckets merged from shorter ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.engine.metricstore import MAX_BUCKETS, MetricStore
from djqueue.core.errors import OptionError
from djqueue.core.metrics import (
    BOUNDS,
    HOUR,
    MINUTE,
    NO_TIMES,
    OTHERS,
    PARTS,
    Histogram,
    RunStats,
    Tiers,
    assemble,
    new_values,
    part_of,
    span_of,
)
from djqueue.core.options import DAY

TIMES = st.lists(st.integers(0, 2 * DAY), max_size=50)


def of(times: list[int]) -> Histogram:
    counts = [0] * PARTS
    for time in times:
        counts[part_of(time)] += 1
    return Histogram(tuple(counts))


def test_histogram_has_40_bins_from_20_ms_to_a_day_and_slower() -> None:
    assert (PARTS, BOUNDS[0], BOUNDS[-1]) == (40, 20, DAY)
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert [part_of(time) for time in (0, 19, 20, 335_000, DAY - 1, DAY, 10**9)] == [0, 0, 1, 25, 38, 39, 39]


@given(TIMES, TIMES)
def test_merged_histogram_equals_counting_both(one: list[int], other: list[int]) -> None:
    assert of(one).merge(of(other)) == of(one + other)
    assert of(one).total == len(one)


@given(TIMES, st.floats(0, 1))
def test_percentile_lies_in_the_bin_of_its_duration(times: list[int], share: float) -> None:
    found = of(times).percentile(share)

    if not times:
        assert found is None
        return
    wanted = sorted(times)[max(0, -(-int(share * len(times) * 1_000_000) // 1_000_000) - 1)]
    assert found is not None
    part = part_of(wanted)
    low, high = (0, *BOUNDS)[part], (*BOUNDS, BOUNDS[-1])[part]
    assert low <= found.milliseconds <= high
    assert found.is_floor is (part == len(BOUNDS))


@given(TIMES)
def test_percentiles_rise(times: list[int]) -> None:
    if times:
        found = [of(times).percentile(share / 20) or (0.0, False) for share in range(21)]
        assert found == sorted(found)


def test_percentile_is_interpolated_within_its_bin() -> None:
    four = of([25, 25, 25, 25])

    found = [four.percentile(share) for share in (0, 0.25, 0.5, 1)]
    assert found == [(20, False), (22.5, False), (25, False), (30, False)]
    assert of([45 * MINUTE]).percentile(0.95) == (2_500_000 + 1_300_000 * 0.95, False)
    assert of([10**9]).percentile(0.5) == (DAY, True)


def test_time_span_uses_the_longest_buckets_that_fit() -> None:
    assert span_of(MINUTE + 1, 3 * MINUTE - 1, MINUTE)[:3] == (MINUTE, 3 * MINUTE, MINUTE)
    steps = (MINUTE, 90 * MINUTE, HOUR, 6 * HOUR, DAY, 7 * DAY)
    assert [span_of(0, 1, step).tier for step in steps] == [MINUTE, MINUTE, HOUR, HOUR, DAY, DAY]
    with pytest.raises(OptionError, match="step: must be a multiple of 60,000 ms"):
        span_of(0, 1, 1_000)


def test_longer_steps_merge_shorter_buckets() -> None:
    one = new_values()
    one[0], one[-3], one[-1] = 2, 1, 9
    rows = [("q", "", start, one) for start in (0, MINUTE, 4 * MINUTE)]

    found = assemble(rows, ["q"], span_of(0, 6 * MINUTE, 3 * MINUTE), by_name=False)

    assert [(bucket.start, bucket.enqueued, bucket.run.total, bucket.run.sum) for bucket in found] == [
        (0, 4, 2, 18),
        (3 * MINUTE, 2, 1, 9),
    ]


def test_store_drops_each_bucket_length_after_its_retention() -> None:
    store = MetricStore(Tiers(minute=5 * MINUTE, hour=3 * HOUR, day=2 * DAY))
    for at in (0, 10 * MINUTE, 5 * HOUR, 4 * DAY):
        store.count("q", [1], at)

    def starts(step: int) -> list[int]:
        return [row[2] for row in store.rows(None, span_of(0, 10 * DAY, step), by_name=False)]

    assert starts(HOUR) == starts(DAY) == [4 * DAY]
    store.count("q", [1], 4 * DAY + 2 * HOUR)
    assert starts(HOUR) == [4 * DAY, 4 * DAY + 2 * HOUR]
    assert [row[3][0] for row in store.rows(None, span_of(0, 10 * DAY, DAY), by_name=False)] == [2]


def test_store_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djqueue.core.engine.metricstore.MAX_BUCKETS", 10)
    store = MetricStore()
    for number in range(30):
        store.count(f"q{number}", [1], 0)

    kept = [row[0] for row in store.rows(None, span_of(0, 1, MINUTE), by_name=False)]
    assert kept == [f"q{number}" for number in range(20, 30)]
    assert MAX_BUCKETS == 50_000


def test_names_above_the_limit_share_a_bucket() -> None:
    store = MetricStore()
    store.record([RunStats("q", f"{n}", 1, 0, 0, 0, NO_TIMES, NO_TIMES) for n in range(300)], 0)

    rows = {row[1]: row[3] for row in store.rows(["q"], span_of(0, 1, DAY), by_name=True)}

    assert len(rows) == 201
    assert rows[OTHERS][2] == 100

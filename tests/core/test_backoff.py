"""Delays between attempts of a failed job."""

from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.backoff import DEFAULT_BACKOFF, KINDS, Backoff, parse_backoff
from djqueue.core.errors import OptionError


def delays(backoff, count=6):
    return [backoff.delay(failures, Random(0)) for failures in range(1, count + 1)]


def test_each_backoff_kind_grows_as_documented():
    base = {"base": 100, "jitter": 0.0, "cap": 10_000}

    assert delays(Backoff(kind="fixed", **base)) == [100] * 6
    assert delays(Backoff(kind="linear", **base)) == [100, 200, 300, 400, 500, 600]
    assert delays(Backoff(kind="exponential", **base)) == [100, 200, 400, 800, 1_600, 3_200]
    assert delays(Backoff(factor=3.0, **base)) == [100, 300, 900, 2_700, 8_100, 10_000]


@given(
    st.builds(
        Backoff,
        kind=st.sampled_from(KINDS),
        base=st.integers(0, 10**9),
        factor=st.floats(1, 1e6),
        cap=st.integers(0, 10**12),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 10**9),
    st.integers(),
)
def test_delays_are_never_negative_or_above_the_cap(backoff, failures, seed):
    wait = backoff.delay(failures, Random(seed))

    assert isinstance(wait, int)
    assert 0 <= wait <= backoff.cap


@given(st.integers(1, 20), st.floats(0, 1), st.integers())
def test_jitter_changes_a_delay_by_at_most_its_share(failures, jitter, seed):
    whole = Backoff(kind="linear", base=1_000, jitter=0.0).delay(failures, Random(0))
    wait = Backoff(kind="linear", base=1_000, jitter=jitter).delay(failures, Random(seed))

    assert abs(wait - whole) <= whole * jitter + 1


def test_jitter_spreads_retries_of_jobs_that_failed_together():
    random = Random(0)

    assert len({DEFAULT_BACKOFF.delay(5, random) for _ in range(100)}) > 50


def test_same_randomness_gives_the_same_delay():
    assert DEFAULT_BACKOFF.delay(3, Random(7)) == DEFAULT_BACKOFF.delay(3, Random(7))


@pytest.mark.parametrize(
    ("given", "backoff"),
    [
        (5, Backoff(kind="fixed", base=5_000, jitter=0.0)),
        (0.25, Backoff(kind="fixed", base=250, jitter=0.0)),
        (timedelta(minutes=1), Backoff(kind="fixed", base=60_000, jitter=0.0)),
        ("exponential", DEFAULT_BACKOFF),
        ({"kind": "linear", "base": 2, "cap": 30}, Backoff(kind="linear", base=2_000, cap=30_000)),
        ({"factor": 3, "jitter": 0}, Backoff(factor=3, jitter=0)),
        (Backoff(base=5), Backoff(base=5)),
    ],
)
def test_backoff_accepts_every_documented_notation(given, backoff):
    assert parse_backoff(given) == backoff


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "often"},
        {"kind": []},
        {"base": -1},
        {"base": float("nan")},
        {"cap": float("inf")},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": True},
        {"jitter": 1.5},
        {"jitter": -0.1},
        {"jitter": "a little"},
        {"waits": 5},
        {5: 5, "waits": 5},
        Backoff(kind="often"),
        Backoff(base=-1),
        Backoff(base=float("nan")),
        Backoff(cap=1.5),
        Backoff(cap=True),
        Backoff(base=10**18),
        Backoff(jitter=2),
        (1, 2),
        None,
        False,
    ],
    ids=repr,
)
def test_invalid_backoff_is_rejected_with_the_option_name(given):
    with pytest.raises(OptionError, match=r"^backoff"):
        parse_backoff(given)

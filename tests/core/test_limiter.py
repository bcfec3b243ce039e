"""Rate limits compared with exact fractions, and concurrency limits."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.engine.limiters import QueueLimiter, TokenBucket
from djqueue.core.policies import Rate

rates = st.builds(Rate, st.integers(1, 10**9), st.integers(1, 86_400_000))


@given(rates, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), max_size=50))
@settings(max_examples=150, deadline=None)
def test_bucket_holds_exactly_the_accrued_tokens(rate, steps):
    tick, tokens = 77, Fraction(rate.capacity)
    bucket = TokenBucket(rate, tick)
    for elapsed, wanted in steps:
        tick += elapsed
        flow = Fraction(elapsed * rate.capacity, rate.per)
        tokens = min(Fraction(rate.capacity), tokens + flow)
        assert bucket.available(tick) == int(tokens)
        taken = min(wanted, int(tokens))
        bucket.consume(taken)
        tokens -= taken
        missing = max(Fraction(0), (1 - tokens) * rate.per / rate.capacity)
        assert bucket.wait(tick) == -(-missing.numerator // missing.denominator)


@given(rates, st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_token_is_available_exactly_after_the_wait(rate, tick):
    bucket = TokenBucket(rate, tick)
    bucket.consume(rate.capacity)
    wait = bucket.wait(tick)

    assert wait >= 1
    assert bucket.available(tick + wait - 1) == 0
    assert bucket.available(tick + wait) >= 1


def test_a_bucket_holds_no_more_than_its_capacity():
    bucket = TokenBucket(Rate(5, 1_000), 0)

    assert bucket.available(10**9) == 5


def test_a_clock_that_goes_back_neither_gives_nor_takes_tokens():
    bucket = TokenBucket(Rate(2, 1_000), 10_000)
    bucket.consume(2)

    assert bucket.available(5_000) == 0
    assert bucket.available(10_499) == 0
    assert bucket.available(10_500) == 1


def test_unlimited_jobs_all_start():
    assert QueueLimiter().allowance(10, 1_000_000, 0) == 10


def test_tighter_of_rate_and_concurrency_applies():
    limiter = QueueLimiter()
    limiter.set(Rate(3, 1_000), 5, 0)

    assert limiter.allowance(10, 0, 0) == 3
    assert limiter.allowance(10, 4, 0) == 1
    assert limiter.allowance(10, 5, 0) == 0
    assert limiter.allowance(10, 9, 0) == 0


def test_rejected_start_takes_no_token():
    limiter = QueueLimiter()
    limiter.set(Rate(3, 1_000), 1, 0)
    for _ in range(10):
        assert limiter.allowance(5, 1, 0) == 0

    assert limiter.allowance(5, 0, 0) == 1
    limiter.started(1)
    limiter.set(Rate(3, 1_000), None, 0)
    assert limiter.allowance(5, 0, 0) == 2


def test_unchanged_rate_keeps_its_tokens_and_new_rate_starts_full():
    limiter = QueueLimiter()
    limiter.set(Rate(3, 1_000), None, 0)
    limiter.started(3)
    limiter.set(Rate(3, 1_000), 7, 0)
    assert limiter.allowance(5, 0, 0) == 0

    limiter.set(Rate(4, 1_000), None, 0)
    assert limiter.allowance(5, 0, 0) == 4

    limiter.set(None, None, 0)
    assert limiter.allowance(5, 0, 0) == 5

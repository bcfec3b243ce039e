"""`Limiter`: limits shared by several queues."""

import pytest

from djqueue import Limiter, Queue
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.overview import LimiterState
from djqueue.core.policies import Rate
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.factories import request

GIVEN = {
    "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
    "LIMITERS": {"stripe": {"RATE": "100/d", "CONCURRENCY": 2}},
    "QUEUES": {"charges": {"LIMITER": "stripe"}, "refunds": {"LIMITER": "stripe"}},
}


@pytest.fixture
def project(settings):
    settings.DJQUEUE = GIVEN


def test_limiter_uses_limits_of_the_settings(project):
    for name in ("charges", "refunds"):
        Queue(name).enqueue_many(range(5), name="handler")
    storage = Queue("charges").storage

    assert len(storage.claim(request(10)).jobs) == 2
    state = Limiter("stripe").state()
    assert (state.rate, state.concurrency, state.used, state.free) == (Rate(100, 86_400_000), 2, 2, 0)
    assert state.tokens == 98


def test_limiter_can_be_changed_at_runtime(project):
    stripe = Limiter("stripe")
    stripe.set(rate=(5, 60), concurrency=1)

    assert stripe.state() == LimiterState(Rate(5, 60_000), 1, 0, 5, ())
    assert repr(stripe) == "<Limiter stripe>"


async def test_limiter_has_async_methods(project):
    stripe = Limiter("stripe")
    await stripe.aset(concurrency=7)

    assert (await stripe.astate()).concurrency == 7


def test_unknown_limiter_is_rejected_with_a_suggestion(project):
    with pytest.raises(OptionError, match=r"'strip' is not in DJQUEUE\['LIMITERS'\].*'stripe'"):
        Limiter("strip")


def test_explicit_storage_accepts_any_limiter_name():
    assert Limiter("any", storage=MemoryStorage()).state().used == 0


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"concurrency": True}, {"concurrency": "1"}])
def test_wrong_limiter_concurrency_is_rejected(project, given):
    with pytest.raises(OptionError, match="concurrency"):
        Limiter("stripe").set(**given)


def test_wrong_limiter_rate_is_rejected(project):
    with pytest.raises(ConfigurationError, match="rate"):
        Limiter("stripe").set(rate="often")

"""`Limiter`: what several queues share, seen by a project."""

import pytest

from djqueue import Limiter, LimiterState, Queue
from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.limiter import Rate
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.factories import request

GIVEN = {
    "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
    "LIMITERS": {"stripe": {"RATE": "100/s", "CONCURRENCY": 2}},
    "QUEUES": {"charges": {"LIMITER": "stripe"}, "refunds": {"LIMITER": "stripe"}},
}


@pytest.fixture
def project(settings):
    settings.DJQUEUE = GIVEN


def test_the_settings_limits_count(project):
    for name in ("charges", "refunds"):
        Queue(name).enqueue_many(range(5), name="handler")
    storage = Queue("charges").storage

    assert len(storage.claim(request(10)).jobs) == 2
    state = Limiter("stripe").state()
    assert (state.rate, state.concurrency, state.used, state.free, state.tokens) == (Rate(100), 2, 2, 0, 98)


def test_it_is_changed_while_its_queues_run(project):
    stripe = Limiter("stripe")
    stripe.set(rate=(5, 60), concurrency=1)

    assert stripe.state() == LimiterState(Rate(5, 60_000), 1, 0, 5, ())
    assert repr(stripe) == "<Limiter stripe>"


async def test_coroutines_have_twins(project):
    stripe = Limiter("stripe")
    await stripe.aset(concurrency=7)

    assert (await stripe.astate()).concurrency == 7


def test_one_that_is_not_in_the_settings_is_refused_with_the_nearest(project):
    with pytest.raises(OptionError, match=r"'strip' is not in DJQUEUE\['LIMITERS'\].*'stripe'"):
        Limiter("strip")


def test_a_storage_of_ones_own_has_limiters_of_its_own():
    assert Limiter("any", storage=MemoryStorage()).state().used == 0


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"concurrency": True}, {"concurrency": "1"}])
def test_a_wrong_concurrency_is_refused(project, given):
    with pytest.raises(OptionError, match="concurrency"):
        Limiter("stripe").set(**given)


def test_a_wrong_rate_is_refused(project):
    with pytest.raises(ConfigurationError, match="rate"):
        Limiter("stripe").set(rate="often")

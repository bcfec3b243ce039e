"""Groups on Redis: what is recorded with a queue, and what a claim beside many blocked jobs does."""

from contextlib import closing

import pytest
import redis

from djqueue.core.errors import ConfigurationError
from djqueue.core.queue import QueuePolicy
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import QUEUE, claim, claim_one, enqueue, enqueue_many


@pytest.fixture
def make(redis_url):
    opened = []

    def make(mode="optional"):
        opened.append(RedisStorage(url=redis_url, policies={QUEUE: QueuePolicy(group_mode=mode)}))
        return opened[-1]

    yield make
    for storage in opened:
        storage.close()


@pytest.mark.parametrize(
    ("first", "second"), [("keyed", "optional"), ("keyed", "global"), ("global", "keyed")]
)
def test_a_process_configured_for_another_mode_is_refused(make, first, second):
    enqueue(make(first), group="g")
    message = f"'{QUEUE}'.*'{first}'.*'{second}'"

    with pytest.raises(ConfigurationError, match=message):
        make(second).connect()
    with pytest.raises(ConfigurationError, match=message):
        enqueue(make(second), group="g")
    with pytest.raises(ConfigurationError, match=message):
        claim(make(second))
    assert len(claim(make(first), 10)) == 1


def test_an_obliterated_queue_may_have_another_mode(make):
    first, second = make("keyed"), make("global")
    enqueue(first, group="g")
    first.obliterate(QUEUE)

    enqueue(second)
    with pytest.raises(ConfigurationError):
        enqueue(make("keyed"), group="g")


def test_a_claim_does_the_same_however_many_jobs_of_another_key_are_blocked(make, redis_url):
    storage = make()
    with closing(redis.Redis.from_url(redis_url)) as server:

        def commands_of_a_claim():
            enqueue(storage, group=f"small:{len(done)}")
            server.config_resetstat()
            done.append(claim_one(storage))
            found = server.info("commandstats")
            return {name: entry["calls"] for name, entry in found.items() if "config" not in name}

        done = []
        enqueue_many(storage, 2, group="big")
        claim(storage)
        commands_of_a_claim()
        before = commands_of_a_claim()
        enqueue_many(storage, 3_000, group="big")
        after = commands_of_a_claim()

    assert before == after

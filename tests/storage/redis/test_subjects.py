"""Jobs about a subject on Redis: their cost, and their removal."""

from collections import Counter
from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    a_delayed_job,
    an_active_job,
    claim,
    completing,
    enqueue,
    enqueue_many,
    failing,
    finish,
)

HOUR = 3_600_000


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def storage(redis_options, clock):
    with closing(RedisStorage(clock=clock, **redis_options)) as made:
        yield made


@pytest.fixture
def commands(redis_server):
    """Commands that run meanwhile, those of scripts included."""

    def counted(call):
        before = Counter(calls(redis_server))
        call()
        after = Counter(calls(redis_server))
        after.subtract(before)
        return {name: number for name, number in after.items() if number and name != "info"}

    return counted


def calls(server):
    return {name[len("cmdstat_") :]: row["calls"] for name, row in server.run("INFO", "commandstats").items()}


def entries(storage, server):
    return server.run("ZCARD", storage.keys(QUEUE).key("about"))


def live(storage, **options):
    """Have a hundred jobs come, and run."""
    enqueue_many(storage, 100, **options)
    finish(storage, *map(completing, claim(storage, 100)))


def test_subject_costs_one_command_per_batch(storage, commands):
    live(storage)
    plain = commands(lambda: live(storage))
    about = commands(lambda: live(storage, subject="shop.order:7"))

    assert plain == commands(lambda: live(storage))
    extra = {name: about.get(name, 0) - plain.get(name, 0) for name in plain.keys() | about.keys()}
    assert {name: number for name, number in extra.items() if number} == {"zadd": 1}


def test_sweep_deletes_subjects_with_their_jobs(storage, clock, redis_server, commands):
    def sweep(**options):
        live(storage, **options)
        clock.advance(HOUR + 1)
        return commands(storage.sweep)

    plain = sweep()
    about = sweep(subject="shop.order:7")

    assert redis_server.run("EXISTS", storage.keys(QUEUE).key("about")) == 0
    assert about["zrem"] == plain["zrem"] + 1


@pytest.mark.parametrize("end", [completing, failing])
def test_deleted_jobs_leave_no_subjects(storage, redis_server, end):
    live(storage, subject="shop.order:7")
    ended = [finish(storage, end(an_active_job(storage, subject=f"shop.order:{n}"))) for n in range(5)]
    ids = [enqueue(storage, subject="x", id=f"x{n}") for n in range(5)]
    later = a_delayed_job(storage, subject="x")
    assert entries(storage, redis_server) == 100 + len(ended) + len(ids) + 1

    storage.jobs.remove(QUEUE, [*ids, later])
    for one in storage.reads.jobs_about("shop.order:7", 200).jobs[:50]:
        storage.jobs.remove(QUEUE, [one.id])
    for number in range(5):
        storage.jobs.remove(
            QUEUE, [one.id for one in storage.reads.jobs_about(f"shop.order:{number}", 200).jobs]
        )
    storage.jobs.remove(QUEUE, [one.id for one in storage.reads.jobs_about("shop.order:7", 200).jobs])

    assert entries(storage, redis_server) == 0


def test_jobs_about_a_subject_are_read_without_payloads(storage, redis_server):
    enqueue_many(storage, 100, subject="x", payloads=[b"\xc5\xff\xff" + b"p" * 65_535] * 100)
    before = redis_server.run("INFO", "stats")["total_net_output_bytes"]

    assert len(storage.reads.jobs_about("x", 100).jobs) == 100

    assert redis_server.run("INFO", "stats")["total_net_output_bytes"] - before < 100_000

"""A page is there within two seconds, whatever hangs, and says which data is stale and since when."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from djqueue import Queue
from djqueue.client.storages import close_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.dashboard.snapshot import snapshots
from djqueue.models import SchedulerLease
from tests import servers
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, logged_in, one_with, visit
from tests.proxies import SlowProxy
from tests.storage.database.children import Child
from tests.support import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

LIMIT = 2.0
SLACK = 1.0
"""Seconds that a loaded machine may add; without a deadline pages took from 5 s to 60 s."""
BY_NAME = {page.name: page for page in PAGES}
SHOWN = (
    "changelist",
    "queues",
    "queue",
    "jobs",
    "job",
    "dead_letters",
    "workers",
    "metrics",
    "flows",
    "storage",
)


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture(scope="module")
def redis_server() -> Iterator[servers.RedisServer]:
    with servers.RedisServer() as server:
        yield server


def use_redis(settings, url: str) -> None:
    settings.DJQUEUE = {
        "STORAGE": {
            "BACKEND": "djqueue.storage.redis.RedisStorage",
            "OPTIONS": {"URL": url, "MIRROR": False},
        }
    }


def pages(client) -> dict[str, str]:
    """Every page that shows something of the storage: its banner. Each is there in time."""
    found = {}
    for name in SHOWN:
        began = time.monotonic()
        response = visit(client, BY_NAME[name])
        took = time.monotonic() - began
        assert took < LIMIT + SLACK, f"{name} took {took:.1f} s"
        assert response.status_code in (200, 404), name
        banner = re.search(r'id="djq-banner"[^>]*>([^<]*)', response.content.decode())
        found[name] = banner[1] if banner is not None else ""
    return found


@contextmanager
def refusing(server: servers.RedisServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.parametrize("how", ["frozen", "refusing"])
def test_pages_of_a_redis_that_is_away(client, settings, redis_server, how):
    redis_server.clean()
    use_redis(settings, redis_server.url)
    Queue("emails").enqueue(1)
    assert set(pages(client).values()) == {""}
    snapshots.forget()
    with redis_server.frozen() if how == "frozen" else refusing(redis_server):
        found = pages(client)
    assert "The storage is unreachable" in found["changelist"]
    assert re.search(r"Showing data from .*\d\d:\d\d:\d\d", found["changelist"])
    assert "The storage is unreachable" in found["queues"]
    close_storage()


def test_pages_of_a_redis_behind_a_black_hole(client, settings, redis_server):
    redis_server.clean()
    with SlowProxy(redis_server.port) as proxy:
        use_redis(settings, proxy.url)
        Queue("emails").enqueue(1)
        proxy.swallow()
        found = pages(client)
        close_storage()
    assert "The storage is unreachable" in found["changelist"]


def test_pages_of_a_redis_that_takes_a_second_for_each_answer(client, settings, redis_server):
    redis_server.clean()
    with SlowProxy(redis_server.port) as proxy:
        use_redis(settings, proxy.url)
        Queue("emails").enqueue(1)
        proxy.slow_down(1.0)
        pages(client)
        # What took too long for a page is read behind it, for the next ones.
        eventually(lambda: snapshots.last("board"), timeout=60)
        assert b"emails" in visit(client, BY_NAME["queues"]).content
        close_storage()


def test_pages_while_the_scheduler_hangs(client, settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    Queue("emails").enqueue(1, id="job-1")
    with Child("scheduler") as scheduler:
        assert scheduler.hears() == "ready"
        assert set(pages(client).values()) == {""}
        scheduler.freeze()
        # However slow this machine is: a scheduler without a lease is known to be none.
        SchedulerLease.objects.update(expires_at=SYSTEM_CLOCK.now() + 60_000)
        snapshots.forget()
        found = pages(client)
        response = visit(client, BY_NAME["changelist"])
        partial = visit(client, BY_NAME["queues"], **{"HX-Request": "true"})
        scheduler.thaw()
        assert re.search(r"No response since .*\d\d:\d\d:\d\d.*may be stale", found["changelist"])
        health = {fact.label: (fact.shown, fact.level) for fact in response.context["health"]}
        assert health["Scheduler"] == ("unreachable", "bad")
        assert "No%20response%20since" in partial["Djq-Notice"]

        def is_well() -> bool:
            snapshots.forget()
            return not pages(client)["changelist"]

        eventually(is_well, timeout=20)
        close_storage()
        assert scheduler.ends() == 0

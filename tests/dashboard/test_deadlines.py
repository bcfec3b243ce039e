"""Pages respond within two seconds while a storage hangs, and say which data is stale since when."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from djqueue import Queue
from djqueue.client.storages import close_storage
from djqueue.dashboard.reading import read_cache
from tests import servers
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, logged_in, one_with, visit
from tests.proxies import SlowProxy
from tests.storage.scheduler.programs import Child
from tests.support import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

LIMIT = 3.0
"""Seconds; without a deadline pages took from 5 s to 60 s."""
BY_NAME = {page.name: page for page in PAGES}
SHOWN = (
    "status",
    "queues",
    "queue",
    "jobs",
    "job",
    "errors",
    "workers",
    "job_types",
    "workflows",
    "system",
)
FEW_OR_ALL = pytest.mark.parametrize(
    "names",
    [("status", "queues", "jobs"), pytest.param(SHOWN, marks=pytest.mark.thorough)],
    ids=["few", "all"],
)


@pytest.fixture
def _long_page_deadline() -> None:
    """Keep the deadline of pages, which these tests are about."""


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


def visit_in_time(client, name: str, **headers: str):
    """Return the first response that comes in time: a busy machine may delay some."""

    def in_time():
        began = time.monotonic()
        response = visit(client, BY_NAME[name], **headers)
        return time.monotonic() - began < LIMIT and response

    return eventually(in_time, message=f"{name} responds within {LIMIT} s")


def banners(client, names=SHOWN) -> dict[str, str]:
    """Visit pages that show data of the storage, and return the text of each banner."""
    found = {}
    for name in names:
        response = visit_in_time(client, name)
        assert response.status_code in (200, 404), name
        banner = re.search(r'id="djq-banner"[^>]*>([^<]*)', response.content.decode())
        found[name] = banner[1] if banner is not None else ""
    return found


def visit_without_banner(client, names=SHOWN) -> None:
    """Wait until pages show no banner. Each then has data to show during an outage."""

    def shows_no_banner() -> bool:
        read_cache.forget()
        return set(banners(client, names).values()) == {""}

    eventually(shows_no_banner, message="no page has a banner")


@contextmanager
def refusing(server: servers.RedisServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.parametrize("how", ["frozen", "refusing"])
def test_pages_show_cached_data_while_redis_is_unreachable(client, settings, redis_server, how):
    redis_server.clean()
    use_redis(settings, redis_server.url)
    Queue("emails").enqueue(1)
    visit_without_banner(client)
    read_cache.forget()
    with redis_server.frozen() if how == "frozen" else refusing(redis_server):
        found = banners(client)
    assert "The storage is unreachable" in found["status"]
    assert re.search(r"Showing data from .*\d\d:\d\d:\d\d", found["status"])
    assert "The storage is unreachable" in found["queues"]
    close_storage()


@FEW_OR_ALL
def test_pages_respond_while_network_to_redis_drops_packets(client, settings, redis_server, names):
    redis_server.clean()
    with SlowProxy(redis_server.port) as proxy:
        use_redis(settings, proxy.url)
        Queue("emails").enqueue(1)
        proxy.swallow()
        found = banners(client, names)
        close_storage()
    assert "The storage is unreachable" in found["status"]


@FEW_OR_ALL
def test_pages_respond_while_redis_takes_a_second_per_reply(client, settings, redis_server, names):
    redis_server.clean()
    with SlowProxy(redis_server.port) as proxy:
        use_redis(settings, proxy.url)
        Queue("emails").enqueue(1)
        proxy.slow_down(1.0)
        banners(client, names)
        # A read that takes too long for a page continues in the background, for the next pages. It has made
        # few of its round trips; with the others at this speed, it still takes longer than a page may.
        proxy.slow_down(0.2)
        eventually(lambda: read_cache.last("board"))
        proxy.slow_down(1.0)
        assert b"emails" in visit(client, BY_NAME["queues"]).content
        close_storage()


def test_pages_show_cached_data_while_the_scheduler_hangs(client, settings, tmp_path):
    settings.DJQUEUE = {
        "STORAGE": {
            "BACKEND": "djqueue.storage.scheduler.SchedulerStorage",
            "OPTIONS": {"FOLDER": str(tmp_path / "s")},
        }
    }
    with Child("scheduler", tmp_path / "s") as scheduler:
        assert scheduler.line() == "ready"
        Queue("emails").enqueue(1, id="job-1")
        visit_without_banner(client)
        os.kill(scheduler.process.pid, signal.SIGSTOP)

        def banners_of_outage() -> dict[str, str] | None:
            # A read that has begun before may still answer.
            read_cache.forget()
            found = banners(client)
            return found if found["status"] else None

        found = eventually(banners_of_outage, message="pages show a banner")
        partial = visit(client, BY_NAME["queues"], **{"HX-Request": "true"})
        os.kill(scheduler.process.pid, signal.SIGCONT)
        assert "The storage is unreachable: the scheduler" in found["status"]
        assert re.search(r"Showing data from .*\d\d:\d\d:\d\d", found["status"])
        assert "storage%20is%20unreachable" in partial["Djq-Notice"]
        visit_without_banner(client, ("status",))
        close_storage()
        assert scheduler.finish() == 0

"""Pages that are enabled of changes: where the server can, at no cost, and with nothing but the word."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from asgiref.sync import SyncToAsync
from django.conf import settings as django_settings
from django.db import connection, connections
from django.test import AsyncClient
from django.urls import reverse

from djqueue import Queue
from djqueue.conf import DashboardSettings, get_settings
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.dashboard import boards, rights
from djqueue.dashboard.views import streams
from tests.admin.factories import logged_in, make_superuser
from tests.dashboard.visiting import PAGES, address, one_with, one_without
from tests.servers import free_port
from tests.support import PATIENCE, aeventually, eventually

ALL = "admin:djqueue_dashboard_stream"
ONE = "admin:djqueue_dashboard_queue_stream"
BY_NAME = {page.name: page for page in PAGES}
OPENED, CHANGED = b"retry: 3000\n\n", b"event: changed\ndata: overview\n\n"


@pytest.fixture
def enabled(settings, memory):
    """Enable streams; at the end, wait until none is open."""
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"SSE": True}}
    yield
    eventually(lambda: not streams.watcher.is_watching, message="the watcher has ended")
    # The thread on which views and queries of coroutines run.
    SyncToAsync.single_thread_executor.submit(connections.close_all).result(PATIENCE)


@pytest.fixture
def root():
    return make_superuser()


@pytest.fixture
def viewers():
    """Make a user without permission to view the dashboard, and one with it."""
    return one_without(rights.VIEW), one_with(rights.VIEW)


async def following(lines: Any) -> bytes:
    """Wait for the next line of a stream."""
    async with asyncio.timeout(PATIENCE):
        return await anext(lines)


async def begun(lines: Any) -> None:
    """Read the start of a stream: what the page shows may be outdated."""
    assert await following(lines) == OPENED
    assert (await following(lines)).startswith(b"event: changed\n")


def hides_emails(request, queue):
    return queue != "emails"


# With WSGI, or disabled.


@pytest.mark.django_db
def test_stream_is_not_found_if_disabled(memory):
    response = logged_in(make_superuser()).get(reverse(ALL))
    assert (response.status_code, b"SSE" in response.content) == (404, True)


@pytest.mark.django_db
def test_stream_is_not_available_with_wsgi(enabled):
    client = logged_in(make_superuser())
    for url in (reverse(ALL), reverse(ONE, args=["emails"])):
        response = client.get(url)
        assert (response.status_code, b"WSGI" in response.content) == (501, True)
    assert "data-djq-stream" not in client.get(address(BY_NAME["queues"])).content.decode()


# With ASGI.


async def get(user: Any, url: str) -> Any:
    client = AsyncClient()
    await client.aforce_login(user)
    return await client.get(url)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("status", reverse(ALL)),
        ("queues", reverse(ALL)),
        ("jobs", reverse(ALL)),
        ("queue", reverse(ONE, args=["emails"])),
        ("schedules", None),
        ("system", None),
    ],
)
async def test_page_names_its_stream_if_it_shows_watched_data(name, stream, root, enabled):
    html = (await get(root, address(BY_NAME[name]))).content.decode()
    assert ("data-djq-stream" in html) is (stream is not None)
    if stream is not None:
        assert f'data-djq-stream="{stream}"' in html


@pytest.mark.django_db(transaction=True)
async def test_stream_sends_change_events_without_data(root, enabled):
    response = await get(root, reverse(ALL))
    assert response.status_code == 200
    assert response["Content-Type"] == "text/event-stream"
    assert (response["X-Accel-Buffering"], response["Content-Encoding"]) == ("no", "identity")
    lines = aiter(response)
    await begun(lines)
    assert streams.watcher.is_watching
    Queue("emails").enqueue(1)
    assert await following(lines) == CHANGED
    response.close()
    await aeventually(lambda: not streams.watcher.is_watching, message="the watcher has ended")


@pytest.mark.django_db(transaction=True)
async def test_stream_of_queue_reports_changes_of_that_queue_only(enabled, monkeypatch):
    once = streams.queue_states

    def look():
        # Without the charts, which a minute that begins moves.
        return {name: (said[0], *said[2:]) if name else said for name, said in once().items()}

    monkeypatch.setattr(streams, "queue_states", look)
    Queue("emails").enqueue(1)
    async with (
        aclosing(aiter(streams.EventStream("emails"))) as of_emails,
        aclosing(aiter(streams.EventStream(""))) as of_all,
    ):
        await asyncio.gather(begun(of_emails), begun(of_all))
        Queue("reports").enqueue(1)
        assert await following(of_all) == CHANGED
        waiting = asyncio.ensure_future(following(of_emails))
        Queue("reports").enqueue(1)
        assert await following(of_all) == CHANGED
        assert not waiting.done()
        Queue("emails").enqueue(1)
        assert await waiting == b"event: changed\ndata: queue\n\n"


@pytest.mark.django_db(transaction=True)
async def test_stream_reports_outage_and_recovery_of_storage(enabled, monkeypatch):
    async with aclosing(aiter(streams.EventStream())) as lines:
        await begun(lines)

        def away():
            raise StorageUnavailableError("no server")

        monkeypatch.setattr(boards, "read_board", away)
        assert await following(lines) == CHANGED
        monkeypatch.undo()
        assert await following(lines) == CHANGED


@pytest.mark.django_db(transaction=True)
async def test_idle_stream_sends_heartbeats_and_ends_after_its_lifetime(enabled, monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT", 0.02)
    async with aclosing(aiter(streams.EventStream())) as lines:
        assert await following(lines) == OPENED
        while (line := await following(lines)) != b": heartbeat\n\n":
            assert line == CHANGED
    monkeypatch.setattr(streams, "LIFETIME", 0.1)
    opened, *rest = [line async for line in streams.EventStream()]
    assert opened == OPENED
    assert set(rest) <= {b": heartbeat\n\n", CHANGED}
    assert streams.watcher.subscribers == 0


@pytest.mark.django_db(transaction=True)
async def test_stream_over_the_limit_gets_retry_after(root, enabled, monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)
    async with aclosing(aiter(streams.EventStream())) as lines:
        await following(lines)
        response = await get(root, reverse(ALL))
        assert (response.status_code, response["Retry-After"]) == (503, "60")
        assert [line async for line in streams.EventStream()] == []
    assert (await get(root, reverse(ALL))).status_code == 200


@pytest.mark.django_db(transaction=True)
async def test_stream_requires_view_permission_also_on_read_only_dashboard(settings, enabled, viewers):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"SSE": True, "READ_ONLY": True, "QUEUE_FILTER": hides_emails},
    }
    without, viewer = viewers
    assert (await get(without, reverse(ALL))).status_code == 403
    assert (await get(viewer, reverse(ALL))).status_code == 200
    assert (await get(viewer, reverse(ONE, args=["emails"]))).status_code == 403
    assert (await get(viewer, reverse(ONE, args=["reports"]))).status_code == 200


@pytest.mark.django_db(transaction=True)
async def test_one_read_per_second_feeds_all_streams(enabled, monkeypatch):
    looks = []
    once = streams.queue_states

    def look():
        looks.append(1)
        return once()

    monkeypatch.setattr(streams, "queue_states", look)
    opened = [aiter(streams.EventStream()) for _ in range(50)]
    await asyncio.gather(*map(begun, opened))
    before, began = len(looks), time.monotonic()
    Queue("emails").enqueue(1)
    assert await asyncio.gather(*map(following, opened)) == [CHANGED] * 50
    assert len(looks) - before <= time.monotonic() - began + 1
    for lines in opened:
        await lines.aclose()
    assert streams.watcher.subscribers == 0


@pytest.mark.django_db(transaction=True)
async def test_stream_without_a_thread_ends_and_the_next_one_reports_changes(enabled, monkeypatch, caplog):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(streams.EventStream()))
    assert (streams.watcher.subscribers, streams.watcher.is_watching) == (0, False)
    assert "could not start: can't start new thread" in caplog.text

    lines = aiter(streams.EventStream())
    await begun(lines)
    await lines.aclose()


# A real server.


class Served:
    """The tests' project in a uvicorn of its own."""

    def __init__(self, most: int) -> None:
        self.port = free_port()
        environment = {
            **os.environ,
            "DJQUEUE_TEST_STREAMS": str(most),
            "DJQUEUE_TEST_NAME": str(connection.settings_dict["NAME"]),
        }
        command = [sys.executable, "-m", "uvicorn", "tests.dashboard.served:application"]
        command += ["--port", str(self.port), "--log-level", "warning", "--lifespan", "off"]
        self.process = subprocess.Popen(command, env=environment)
        session = logged_in(make_superuser()).cookies[django_settings.SESSION_COOKIE_NAME].value
        self.headers = {
            "Cookie": f"{django_settings.SESSION_COOKIE_NAME}={session}",
            "Accept-Encoding": "gzip",
        }
        eventually(self.is_up, message="uvicorn answers")

    def is_up(self) -> bool:
        try:
            return self.followers()["streams"] == 0
        except OSError:
            assert self.process.poll() is None, "uvicorn has ended"
            return False

    def get(self, url: str) -> http.client.HTTPResponse:
        """An answer, its connection still open."""
        connected = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connected.request("GET", url, headers=self.headers)
        response = connected.getresponse()
        response.connected = connected  # type: ignore[attr-defined]
        return response

    def followers(self) -> dict[str, Any]:
        response = self.get("/followers/")
        found: dict[str, Any] = json.loads(response.read())
        response.connected.close()  # type: ignore[attr-defined]
        return found


@contextmanager
def served(most: int) -> Iterator[Served]:
    server = Served(most)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(timeout=PATIENCE)


def hang_up(response: Any) -> None:
    response.close()
    response.connected.close()


def sessions() -> int:
    """Return how many other sessions the tests' PostgreSQL database has."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.slow
@pytest.mark.dialect
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.thorough)])
def test_server_closes_streams_of_disconnected_clients_and_stops_despite_open_ones(count):
    is_postgresql = connection.vendor == "postgresql"
    before = sessions() if is_postgresql else 0
    with served(most=count) as server:
        opened = [server.get(reverse(ALL)) for _ in range(count)]
        assert {response.status for response in opened} == {200}
        assert {response.readline() for response in opened} == {b"retry: 3000\n"}
        assert server.followers() == {"streams": count, "watching": True}
        if is_postgresql:
            assert sessions() - before <= 3

        refused = server.get(reverse(ALL))
        assert (refused.status, refused.getheader("Retry-After")) == (503, "60")
        hang_up(refused)
        page = server.get(address(BY_NAME["queues"]))
        assert page.status == 200
        assert page.getheader("Content-Encoding") == "gzip"
        hang_up(page)

        for _ in ("the first event", "a change"):
            for response in opened:
                while response.readline() != b"event: changed\n":
                    pass
            Queue("emails").enqueue(1)
        for response in opened[5:]:
            hang_up(response)
        eventually(lambda: server.followers()["streams"] == 5, message="closed connections end their streams")

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE) in (0, -signal.SIGTERM)
        for response in opened[:5]:
            hang_up(response)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_watcher_ends_with_the_last_stream():
    with served(most=5) as server:
        response = server.get(reverse(ALL))
        assert response.readline() == b"retry: 3000\n"
        assert server.followers()["watching"]
        hang_up(response)
        eventually(
            lambda: server.followers() == {"streams": 0, "watching": False}, message="the watcher has ended"
        )


def test_sse_setting_must_be_boolean(settings):
    settings.DJQUEUE = {"DASHBOARD": {"SSE": "yes"}}
    with pytest.raises(ConfigurationError, match="SSE must be True or False"):
        get_settings()
    assert not DashboardSettings().sse

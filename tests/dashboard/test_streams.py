"""Pages that are told of changes: where the server can, at no cost, and with nothing but the word."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
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
from djqueue.dashboard import queries, rights, streams
from tests.admin.factories import logged_in, make_superuser
from tests.dashboard.visiting import PAGES, address, one_with, one_without
from tests.servers import free_port
from tests.support import aeventually, eventually

ALL = "admin:djqueue_dashboard_stream"
ONE = "admin:djqueue_dashboard_queue_stream"
BY_NAME = {page.name: page for page in PAGES}
OPENED, CHANGED = b"retry: 3000\n\n", b"event: changed\ndata: overview\n\n"


@pytest.fixture
def told(settings, memory):
    """Streams are wished for; at the end there is none."""
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"SSE": True}}
    yield
    eventually(lambda: not streams.watcher.is_watching, message="nobody watches any more")
    # The thread on which views and queries of coroutines run.
    SyncToAsync.single_thread_executor.submit(connections.close_all).result(10)


@pytest.fixture
def root():
    return make_superuser()


@pytest.fixture
def viewers():
    """One without the right to see, and one with it."""
    return one_without(rights.VIEW), one_with(rights.VIEW)


async def begun(lines: Any) -> None:
    """The first word: what the page shows may be old."""
    assert await anext(lines) == OPENED
    assert (await anext(lines)).startswith(b"event: changed\n")


def hides_emails(request, queue):
    return queue != "emails"


# By WSGI, or where it is off.


@pytest.mark.django_db
def test_where_streams_are_not_wished_for_there_is_none(memory):
    response = logged_in(make_superuser()).get(reverse(ALL))
    assert (response.status_code, b"SSE" in response.content) == (404, True)


@pytest.mark.django_db
def test_by_wsgi_there_is_none_and_pages_do_not_ask_for_one(told):
    client = logged_in(make_superuser())
    for url in (reverse(ALL), reverse(ONE, args=["emails"])):
        response = client.get(url)
        assert (response.status_code, b"WSGI" in response.content) == (501, True)
    assert "data-djq-stream" not in client.get(address(BY_NAME["queues"])).content.decode()


# By ASGI.


async def asked(user: Any, url: str) -> Any:
    client = AsyncClient()
    await client.aforce_login(user)
    return await client.get(url)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("changelist", reverse(ALL)),
        ("queues", reverse(ALL)),
        ("jobs", reverse(ALL)),
        ("queue", reverse(ONE, args=["emails"])),
        ("cron", None),
        ("storage", None),
    ],
)
async def test_a_page_says_where_its_stream_is_if_it_shows_what_is_watched(name, stream, root, told):
    html = (await asked(root, address(BY_NAME[name]))).content.decode()
    assert ("data-djq-stream" in html) is (stream is not None)
    if stream is not None:
        assert f'data-djq-stream="{stream}"' in html


@pytest.mark.django_db(transaction=True)
async def test_a_stream_says_that_something_has_changed_and_no_more(root, told):
    response = await asked(root, reverse(ALL))
    assert response.status_code == 200
    assert response["Content-Type"] == "text/event-stream"
    assert (response["X-Accel-Buffering"], response["Content-Encoding"]) == ("no", "identity")
    lines = aiter(response)
    await begun(lines)
    assert streams.watcher.is_watching
    Queue("emails").enqueue(1)
    assert await anext(lines) == CHANGED
    response.close()
    await aeventually(lambda: not streams.watcher.is_watching, message="nobody watches any more")


@pytest.mark.django_db(transaction=True)
async def test_a_stream_of_a_queue_tells_of_that_queue_alone(told, monkeypatch):
    once = streams.read_board

    def look():
        # Without the charts, which a minute that begins moves.
        return {name: (said[0], *said[2:]) if name else said for name, said in once().items()}

    monkeypatch.setattr(streams, "read_board", look)
    Queue("emails").enqueue(1)
    async with (
        aclosing(aiter(streams.EventStream("emails"))) as of_emails,
        aclosing(aiter(streams.EventStream(""))) as of_all,
    ):
        await asyncio.gather(begun(of_emails), begun(of_all))
        Queue("reports").enqueue(1)
        assert await anext(of_all) == CHANGED
        waiting = asyncio.ensure_future(anext(of_emails))
        Queue("reports").enqueue(1)
        assert await anext(of_all) == CHANGED
        assert not waiting.done()
        Queue("emails").enqueue(1)
        assert await waiting == b"event: changed\ndata: queue\n\n"


@pytest.mark.django_db(transaction=True)
async def test_a_storage_that_goes_away_is_a_change(told, monkeypatch):
    async with aclosing(aiter(streams.EventStream())) as lines:
        await begun(lines)

        def away():
            raise StorageUnavailableError("no server")

        monkeypatch.setattr(queries, "_board", away)
        assert await anext(lines) == CHANGED
        monkeypatch.undo()
        assert await anext(lines) == CHANGED


@pytest.mark.django_db(transaction=True)
async def test_a_stream_that_has_nothing_to_say_shows_that_it_is_there_and_ends(told, monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT", 0.02)
    monkeypatch.setattr(streams, "LIFETIME", 1.0)
    said = [line async for line in streams.EventStream()]
    assert said[0] == OPENED
    assert len(said) > 2
    assert set(said[1:]) <= {b": heartbeat\n\n", CHANGED}
    assert b": heartbeat\n\n" in said
    assert streams.watcher.subscribers == 0


@pytest.mark.django_db(transaction=True)
async def test_one_too_many_is_told_when_to_come_again(root, told, monkeypatch):
    monkeypatch.setattr(streams, "LIMIT", 1)
    async with aclosing(aiter(streams.EventStream())) as lines:
        await anext(lines)
        response = await asked(root, reverse(ALL))
        assert (response.status_code, response["Retry-After"]) == (503, "60")
        assert [line async for line in streams.EventStream()] == []
    assert (await asked(root, reverse(ALL))).status_code == 200


@pytest.mark.django_db(transaction=True)
async def test_a_stream_takes_the_right_to_see_and_a_read_only_dashboard_has_it_too(settings, told, viewers):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"SSE": True, "READ_ONLY": True, "QUEUE_FILTER": hides_emails},
    }
    without, viewer = viewers
    assert (await asked(without, reverse(ALL))).status_code == 403
    assert (await asked(viewer, reverse(ALL))).status_code == 200
    assert (await asked(viewer, reverse(ONE, args=["emails"]))).status_code == 403
    assert (await asked(viewer, reverse(ONE, args=["reports"]))).status_code == 200


@pytest.mark.django_db(transaction=True)
async def test_one_read_a_second_feeds_all_streams(told, monkeypatch):
    looks = []
    once = streams.read_board

    def look():
        looks.append(1)
        return once()

    monkeypatch.setattr(streams, "read_board", look)
    opened = [aiter(streams.EventStream()) for _ in range(50)]
    await asyncio.gather(*map(begun, opened))
    before = len(looks)
    Queue("emails").enqueue(1)
    assert await asyncio.gather(*map(anext, opened)) == [CHANGED] * 50
    assert len(looks) - before < len(opened) / 2
    for lines in opened:
        await lines.aclose()
    assert streams.watcher.subscribers == 0


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
        eventually(self.is_up, timeout=60, message="uvicorn answers")

    def is_up(self) -> bool:
        try:
            return self.followers()["streams"] == 0
        except OSError:
            assert self.process.poll() is None, "uvicorn has ended"
            return False

    def get(self, url: str) -> http.client.HTTPResponse:
        """An answer, its connection still open."""
        connected = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
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
        server.process.wait()


def hang_up(response: Any) -> None:
    response.close()
    response.connected.close()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_fifty_streams_are_open_hung_up_and_do_not_keep_the_server_from_ending():
    with served(most=50) as server:
        opened = [server.get(reverse(ALL)) for _ in range(50)]
        assert {response.status for response in opened} == {200}
        assert {response.readline() for response in opened} == {b"retry: 3000\n"}
        assert server.followers() == {"streams": 50, "watching": True}
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND pid <> pg_backend_pid()"
                )
                assert cursor.fetchone()[0] <= 3

        refused = server.get(reverse(ALL))
        assert (refused.status, refused.getheader("Retry-After")) == (503, "60")
        hang_up(refused)
        page = server.get(address(BY_NAME["queues"]))
        assert page.status == 200
        assert page.getheader("Content-Encoding") == "gzip"
        hang_up(page)

        for _ in ("the first word", "a change"):
            for response in opened:
                while response.readline() != b"event: changed\n":
                    pass
            Queue("emails").enqueue(1)
        for response in opened[:45]:
            hang_up(response)
        eventually(lambda: server.followers()["streams"] == 5, message="who hangs up is gone")

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) in (0, -signal.SIGTERM)
        for response in opened[45:]:
            hang_up(response)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_when_the_last_stream_ends_nobody_watches():
    with served(most=5) as server:
        response = server.get(reverse(ALL))
        assert response.readline() == b"retry: 3000\n"
        assert server.followers()["watching"]
        hang_up(response)
        eventually(
            lambda: server.followers() == {"streams": 0, "watching": False}, message="the watcher has ended"
        )


def test_whether_there_are_streams_is_yes_or_no(settings):
    settings.DJQUEUE = {"DASHBOARD": {"SSE": "yes"}}
    with pytest.raises(ConfigurationError, match="SSE must be True or False"):
        get_settings()
    assert not DashboardSettings().sse

"""A page responds in time while the PostgreSQL database with the sessions and users does not."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import psycopg
import pytest
from django.contrib.admin import site
from django.test import RequestFactory

from djqueue.dashboard import outages
from tests import servers
from tests.proxies import SlowProxy
from tests.support import eventually

pytestmark = pytest.mark.slow

LIMIT = 20.0
"""Seconds; without a deadline pages never responded."""
AT_ONCE = 1.0
"""Seconds; a page that waits for the database takes nearly two."""
OVERVIEW = "/admin/djqueue/dashboard/"
PAGES = (OVERVIEW, "/admin/djqueue/dashboard/queues/", "/admin/djqueue/job/")


class Visitor:
    """A process of the project."""

    def __init__(self, process: "subprocess.Popen[str]", database: str) -> None:
        self.database = database
        self._process = process

    def hears(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def get(self, path: str, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": path, **asked}) + "\n")
        self._process.stdin.flush()
        return self.hears()


@pytest.fixture(scope="module")
def postgres() -> Iterator[servers.PostgresServer]:
    """A server that no other test uses, as it is frozen here."""
    with servers.PostgresServer() as server:
        yield server


@contextmanager
def visitor_of(server: servers.PostgresServer, port: int) -> Iterator[Visitor]:
    url = server.create_database().replace(f":{server.port}/", f":{port}/")
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DJQUEUE_TEST_DB": "postgresql",
        "DJQUEUE_TEST_PG": url,
        "PYTEST_XDIST_WORKER": url.rpartition("/")[2],
    }
    name = f"djqueue_{env['PYTEST_XDIST_WORKER']}"
    server.rename_database(url.rpartition("/")[2], name)
    command = [sys.executable, "-m", "tests.dashboard.unavailable_project"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            visitor = Visitor(process, name)
            assert visitor.hears() == {"ready": True}
            yield visitor
        finally:
            process.kill()


@pytest.fixture(scope="module")
def visitor(postgres: servers.PostgresServer) -> Iterator[Visitor]:
    """A process connected to the server without a proxy."""
    with visitor_of(postgres, postgres.port) as visitor:
        yield visitor


def shown(visitor: Visitor, path: str, **asked: Any) -> None:
    """Wait until a page is shown: on a busy machine, its deadline may pass."""
    eventually(lambda: visitor.get(path, **asked)["status"] == 200, message=f"{path} is shown")


def assert_unavailable(answer: dict[str, Any]) -> None:
    assert answer["status"] == 503, answer["text"][:500]
    assert answer["took"] < LIMIT
    assert re.search(
        r"The database &#x27;default&#x27; has not responded since \d\d:\d\d:\d\d UTC", answer["text"]
    )
    assert answer["headers"]["Retry-After"] == "5"
    assert "Set-Cookie" not in answer["headers"]


def test_list_in_the_admin_names_the_session_that_has_locked_its_table(postgres, visitor):
    shown(visitor, "/admin/djqueue/job/")
    with psycopg.connect(postgres.database_url(visitor.database)) as other:
        other.execute("LOCK TABLE djqueue_job IN ACCESS EXCLUSIVE MODE")
        session = other.info.backend_pid
        answer = visitor.get("/admin/djqueue/job/")

    assert answer["status"] == 503
    assert "responds, but the table djqueue_job has been locked for" in answer["text"]
    assert f"SELECT pg_terminate_backend({session})" in answer["text"]
    shown(visitor, "/admin/djqueue/job/")


@pytest.mark.parametrize("is_async", [False, True], ids=["wsgi", "asgi"])
def test_pages_respond_503_while_database_of_open_connections_is_frozen(postgres, visitor, is_async):
    for path in PAGES:
        shown(visitor, path, is_async=is_async)
    with postgres.frozen():
        for path in PAGES:
            assert_unavailable(visitor.get(path, is_async=is_async))
        partial = visitor.get(OVERVIEW, is_async=is_async, headers={"HX-Request": "true"})
        assert partial["status"] == 204
        assert "The database 'default' has not responded since" in unquote(partial["headers"]["Djq-Notice"])
    shown(visitor, OVERVIEW, is_async=is_async)


def test_pages_respond_503_while_database_accepts_no_connections(postgres, visitor):
    shown(visitor, OVERVIEW)
    with postgres.frozen():
        for path in PAGES:
            assert_unavailable(visitor.get(path, fresh=True))


@pytest.mark.parametrize(
    ("how", "fresh"),
    [
        pytest.param("swallow", False, id="swallow-open"),
        pytest.param("refuse", True, id="refuse-new"),
        pytest.param("slow", False, id="slow-open"),
        pytest.param("swallow", True, id="swallow-new", marks=pytest.mark.thorough),
        pytest.param("refuse", False, id="refuse-open", marks=pytest.mark.thorough),
        pytest.param("slow", True, id="slow-new", marks=pytest.mark.thorough),
    ],
)
def test_pages_respond_503_while_network_to_database_fails(postgres, how, fresh):
    with SlowProxy(postgres.port) as proxy, visitor_of(postgres, proxy.port) as visitor:
        shown(visitor, OVERVIEW)
        if how == "slow":
            proxy.slow_down(1.0)
        else:
            getattr(proxy, how)()
        for path in PAGES:
            assert_unavailable(visitor.get(path, fresh=fresh))


def test_later_requests_of_an_outage_are_answered_at_once(postgres, visitor):
    shown(visitor, OVERVIEW)
    with postgres.frozen():
        visitor.get(OVERVIEW)
        eventually(lambda: visitor.get(OVERVIEW)["took"] < AT_ONCE)
        assert_unavailable(visitor.get(OVERVIEW))


def test_first_page_that_waits_in_vain_opens_no_breaker():
    breakers = outages.DatabaseBreakers()

    assert [breakers.missed("default"), breakers.missed("default")] == [False, True]
    breakers.answered("default")
    assert breakers.missed("default") is False


def test_page_of_an_outage_needs_no_template_of_the_theme(settings, tmp_path):
    (tmp_path / "admin").mkdir()
    for name in ("base_site.html", "base.html"):
        (tmp_path / "admin" / name).write_text("{% load no_such_library %}")
    [templates] = settings.TEMPLATES
    settings.TEMPLATES = [{**templates, "DIRS": [tmp_path]}]

    response = outages._unavailable(
        site, RequestFactory().get(OVERVIEW), outages.DatabaseUnavailableError("default")
    )

    assert response.status_code == 503
    assert "The database &#x27;default&#x27; has not responded since" in response.content.decode()

"""Threads that the system cannot start at the moment: the next call starts them."""

import re
import threading
from pathlib import Path

import pytest

import djqueue
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.threads import start_daemon
from djqueue.dashboard.outages import Watchdog
from djqueue.runtime.loops import Periodic
from tests.support import PATIENCE

PACKAGE = Path(djqueue.__file__).parent


class NoThreads:
    """Lets no thread start within a block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch.context()

    def __enter__(self) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        self._patch.__enter__().setattr(threading.Thread, "start", refuse)

    def __exit__(self, *_: object) -> None:
        self._patch.__exit__(None, None, None)


def test_daemon_that_cannot_start_raises_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()

    with (
        NoThreads(monkeypatch),
        pytest.raises(StorageUnavailableError, match=r"'test' could not start: can't .*Raise the limits"),
    ):
        start_daemon("test", called.set)

    assert start_daemon("test", called.set).daemon
    assert called.wait(PATIENCE)


def test_periodic_calls_begin_with_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()
    periodic = Periodic("test", lambda: 0.01, called.set)
    with NoThreads(monkeypatch), pytest.raises(StorageUnavailableError):
        periodic.start()
    periodic.join(PATIENCE)

    periodic.start()

    assert called.wait(PATIENCE)
    periodic.stop()
    periodic.join(PATIENCE)


def test_watchdog_watches_the_next_query_after_one_that_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, ended = Watchdog(), threading.Event()
    monkeypatch.setattr("djqueue.dashboard.outages.postgresql_connections", lambda: ["a connection"])
    monkeypatch.setattr("djqueue.dashboard.outages.QueryWatch.end_queries", lambda _: ended.set())
    monkeypatch.setattr("djqueue.dashboard.outages.IDLE_TIMEOUT", 0.01)
    with NoThreads(monkeypatch), pytest.raises(StorageUnavailableError), watchdog.within(0.01):
        pass

    assert not watchdog._watches
    with watchdog.within(0.01):
        assert ended.wait(PATIENCE)


def test_threads_are_started_in_one_place() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bThread\(", path.read_text(encoding="utf-8"))
    }

    assert {path for path in found if not path.startswith("testing/")} == {"core/threads.py"}

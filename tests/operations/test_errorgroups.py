"""Groups of errors: counted by workers, stored by maintenance, resolved and ignored by users."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import DataError, OperationalError

from djqueue import Queue, Worker
from djqueue.client.deadletters import read_filter
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errorgroups import (
    MAX_FINGERPRINTS,
    MAX_PENDING,
    PACKAGE,
    ErrorKey,
    ErrorTally,
    Sighting,
    fingerprint_of,
    masked,
    place_of,
    tally,
)
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.core.job import JobFailure
from djqueue.core.metrics import HOUR
from djqueue.core.units import to_datetime
from djqueue.models import ErrorGroup
from djqueue.operations import errorgroups
from djqueue.operations.errorgroups import HOURS, MAX_GROUPS, MAX_VERSIONS, record
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.storage.scheduler import SchedulerStorage
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("tables")
NOW = SYSTEM_CLOCK.now() // HOUR * HOUR


@pytest.fixture(autouse=True)
def _no_errors_of_other_tests() -> None:
    while tally.take(MAX_PENDING):
        pass


def seen(message: str = "no address 1", **about: Any) -> Sighting:
    """An error that was seen once."""
    given = {"queue": "emails", "name": "send", "type": "shop.NoAddressError", "place": "", "version": ""}
    given |= {"at": NOW, "final": False} | about
    mark = fingerprint_of(given["type"], given["name"], message)
    key = ErrorKey(given["queue"], given["name"], given["type"], given["place"], mark, given["version"])
    return Sighting(key, 1, int(given["final"]), given["at"], given["at"], message)


def group() -> ErrorGroup:
    return ErrorGroup.objects.get()


def state(at: int = NOW) -> str:
    return errorgroups.state_of(group(), at)


@pytest.mark.parametrize("kind", ["memory", "database", "redis", "scheduler"])
def test_worker_stores_the_errors_of_its_attempts(
    kind: str, settings: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings.DJQUEUE = {"VERSION": "v7"}
    makers: dict[str, Callable[[], Storage]] = {
        "memory": MemoryStorage,
        "database": DatabaseStorage,
        "redis": lambda: RedisStorage(url=request.getfixturevalue("redis_url"), timeout=PATIENCE),
        "scheduler": lambda: SchedulerStorage(folder=tmp_path / "s"),
    }
    storage = makers[kind]()
    if isinstance(storage, SchedulerStorage):
        storage.role.starts_here = True
    storage.connect()

    def fail(job: Any) -> None:
        raise ValueError(f"no address {job.payload}")

    try:
        queue = Queue("emails", storage=storage)
        queue.enqueue(1, name="send", max_attempts=2, backoff=0)
        queue.enqueue(2, name="send", max_attempts=1)
        with Worker(storage, handlers={"send": fail}):
            eventually(lambda: queue.counts()["failed"] == 2)
        found = group()
        assert (found.queue, found.name, found.error_type) == ("emails", "send", "builtins.ValueError")
        assert (found.title, found.attempts, found.jobs) == ("no address #", 3, 2)
        assert found.place == "operations/test_errorgroups.py:fail"
        [(version, (count, first, last))] = found.versions.items()
        assert (version, count) == ("v7", 3)
        assert first <= last
        assert sum(found.hours.values()) == 3
        [letter, other] = storage.reads.dead_letters("emails")
        marks = {fingerprint_of(one.error_type, one.name, one.error_message) for one in (letter, other)}
        assert marks == set(found.fingerprints)
    finally:
        storage.close()


def test_first_time_and_versions_stay_when_jobs_are_retried() -> None:
    record("default", [seen(version="v1", final=True)])
    record("default", [seen("no address 2", at=NOW + 2 * HOUR, version="v2")])
    found = group()
    assert (found.first_seen, found.last_seen) == (to_datetime(NOW), to_datetime(NOW + 2 * HOUR))
    assert (found.attempts, found.jobs, found.message) == (2, 1, "no address 2")
    assert found.versions == {"v1": [1, NOW, NOW], "v2": [1, NOW + 2 * HOUR, NOW + 2 * HOUR]}
    assert errorgroups.hours_until(found, NOW + 3 * HOUR, 4) == [1, 0, 1, 0]


def test_errors_of_one_place_are_one_group_whatever_their_messages() -> None:
    record(
        "default",
        [seen("left is red", place="shop/jobs.py:pay"), seen("right is blue", place="shop/jobs.py:pay")],
    )
    assert len(group().fingerprints) == 2
    # The message belongs to the group by now, wherever it is raised.
    record("default", [seen("right is blue", place="shop/jobs.py:refund")])
    assert group().attempts == 3
    record("default", [seen("right is blue", queue="other"), seen("right is blue", type="ValueError")])
    assert ErrorGroup.objects.count() == 3


def test_resolved_error_comes_back_with_a_version_that_has_not_failed_before() -> None:
    record("default", [seen(version="v1"), seen(version="v2")])
    key = group().key
    assert errorgroups.resolve("default", "emails", key, now=NOW + 1) is not None
    assert state() == "resolved"
    record("default", [seen(version="v2", at=NOW + 2)])
    assert state() == "resolved"
    record("default", [seen(version="v3", at=NOW + 3)])
    assert state() == "back"
    assert errorgroups.new_since(group()) == NOW + 3
    errorgroups.resolve("default", "emails", key, "v3", now=NOW + 4)
    record("default", [seen(version="v2", at=NOW + 5)])
    assert state() == "resolved"
    record("default", [seen(version="v3", at=NOW + 6)])
    assert state() == "back"


def test_resolved_error_of_unknown_versions_comes_back_at_once() -> None:
    record("default", [seen()])
    errorgroups.resolve("default", "emails", group().key, now=NOW + 1)
    record("default", [seen(at=NOW)])  # It had failed before it was resolved.
    assert state() == "resolved"
    record("default", [seen(at=NOW + 2)])
    assert state() == "back"


def test_ignored_error_is_open_again_after_its_time() -> None:
    record("default", [seen()])
    key = group().key
    errorgroups.ignore("default", "emails", key, NOW + HOUR)
    assert (state(NOW), state(NOW + HOUR)) == ("ignored", "open")
    errorgroups.reopen("default", "emails", key)
    assert state(NOW) == "open"
    assert errorgroups.reopen("default", "emails", "unknown") is None


def test_changes_of_two_processes_are_both_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    record("default", [seen()])
    stale = errorgroups._groups("default").get()
    record("default", [seen()])
    monkeypatch.setattr(errorgroups.GroupIndex, "find", lambda *_: stale)
    record("default", [seen(), seen("no address 2")])
    assert group().attempts == 4


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errorgroups, "MAX_GROUPS", 3)
    for number in range(MAX_VERSIONS + 5):
        record("default", [seen(version=f"v{number}", at=NOW + number * 30 * HOUR)])
    found = group()
    assert set(found.versions) == {f"v{number}" for number in range(5, MAX_VERSIONS + 5)}
    assert len(found.hours) <= HOURS / 30 + 1
    assert found.attempts == MAX_VERSIONS + 5
    errorgroups._changed(
        "default", found.queue, found.key, lambda row: setattr(row, "last_seen", to_datetime(NOW))
    )
    for letter in "abcd":
        record("default", [seen(f"no {letter}", at=NOW * 2)])
    assert ErrorGroup.objects.filter(last_seen__lt=NOW * 2).count() == 0
    assert MAX_GROUPS > 3


def test_group_takes_in_a_limited_number_of_messages() -> None:
    words = [f"{first}{second}" for first in "abcdefghij" for second in "klmnopqrst"]
    record("default", [seen(f"no {word}", place="shop/jobs.py:pay") for word in words])
    sizes = [len(row.fingerprints) for row in ErrorGroup.objects.all()]
    assert sizes == [MAX_FINGERPRINTS] * (100 // MAX_FINGERPRINTS)
    for row in ErrorGroup.objects.all():
        assert read_filter(fingerprint=",".join(row.fingerprints)).fingerprint
    with pytest.raises(OptionError, match="at most"):
        read_filter(fingerprint=",".join(["a"] * (MAX_FINGERPRINTS + 1)))


def test_error_that_the_database_refuses_keeps_no_other_from_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = errorgroups._create

    def refuse(alias: str, new: ErrorGroup) -> Any:
        if new.name == "wrong":
            raise DataError("value too long")
        return create(alias, new)

    monkeypatch.setattr(errorgroups, "_create", refuse)
    found = [seen(name="wrong"), seen()]
    record("default", found)
    assert found == []
    assert group().name == "send"


def test_text_that_databases_refuse_is_stored_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = ErrorTally()
    monkeypatch.setattr(errorgroups, "tally", tally)
    look = errorgroups.recording(MemoryStorage())
    tally.add("emails", "send", JobFailure("Value\0Error", "no \ud800 and \0"), is_final=False)
    look()
    assert (group().message, group().error_type) == (r"no \ud800 and \x00", r"Value\x00Error")


def test_errors_of_a_row_that_others_change_all_the_time_are_stored_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record("default", [seen()])
    found = [seen(), seen("other", name="other")]
    change = errorgroups._change
    with monkeypatch.context() as patch:
        patch.setattr(
            errorgroups, "_change", lambda alias, row, how: row.name != "send" and change(alias, row, how)
        )
        record("default", found)
    assert found == [seen()]
    record("default", found)
    assert ErrorGroup.objects.get(name="send").attempts == 2


def test_only_a_missing_table_has_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: str) -> None:
        def raise_it(*_: Any) -> None:
            raise OperationalError(message)

        monkeypatch.setattr(errorgroups, "_groups", raise_it)

    fail("no such table: djqueue_error")
    assert errorgroups.newest("default", 5) == []
    fail("disk I/O error")
    with pytest.raises(StorageUnavailableError):
        errorgroups.newest("default", 5)


def test_errors_that_cannot_be_stored_are_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = ErrorTally()
    monkeypatch.setattr(errorgroups, "tally", tally)
    look = errorgroups.recording(MemoryStorage())
    tally.add("emails", "send", JobFailure("ValueError", "first"), is_final=False)
    look()
    tally.add("emails", "send", JobFailure("ValueError", "first"), is_final=True)
    with monkeypatch.context() as patch:
        patch.setattr(errorgroups, "record", lambda *_: {}["away"])
        with pytest.raises(KeyError):
            look()
    look()
    assert (group().attempts, group().jobs) == (2, 1)


def test_tally_is_bounded_and_counts_nothing_where_no_process_stores_it() -> None:
    tally = ErrorTally()
    tally.add("emails", "send", None, is_final=True, reason="ttl_expired")
    assert tally.take(10) == []
    tally.is_stored = True
    tally.add("emails", "send", None, is_final=True, reason="ttl_expired")
    [one] = tally.take(10)
    assert (one.attempts, one.jobs, one.message) == (1, 1, "ttl_expired")
    for number in range(MAX_PENDING + 5):
        tally.add("emails", f"job {number}", None, is_final=False)
    assert len(tally.take(MAX_PENDING * 2)) == MAX_PENDING


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no address 1 of order-7", "no address # of #"),
        ("see (-https://shop/a?b=1) or a+b://c", "see (# or #"),
        ("to <ann@shop>, 'bob smith'<bob@shop>", "to # ##"),
        ("id deadbeefcafe is not 'x y', it's \"z\"", "id # is not #, it's #"),
        ("a-" * 250, "a-" * 250),
        ("+" * 500, "+" * 500),
    ],
)
def test_parts_that_differ_from_job_to_job_are_masked(message: str, expected: str) -> None:
    assert masked(message) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("/srv/shop/jobs.py", "pay"), "shop/jobs.py:pay"),
        (
            ("/srv/shop/jobs.py", "pay", "/srv/venv/lib/python3.12/site-packages/requests/api.py", "get"),
            "shop/jobs.py:pay",
        ),
        (("/usr/lib/python3.12/json/decoder.py", "decode"), ""),
        ((r"C:\srv\shop\jobs.py", "<lambda>"), "shop/jobs.py:<lambda>"),
        ((errorgroups.__file__, "record"), ""),
        ((f"{PACKAGE[:-1]}shop/jobs.py", "pay"), "djqueueshop/jobs.py:pay"),
        ((), ""),
    ],
)
def test_place_is_the_last_frame_of_own_code(lines: tuple[str, ...], expected: str) -> None:
    frames = [
        f'  File "{file}", line 7, in {function}\n    call()\n'
        for file, function in zip(lines[::2], lines[1::2], strict=True)
    ]
    assert place_of("Traceback (most recent call last):\n" + "".join(frames) + "ValueError: no\n") == expected

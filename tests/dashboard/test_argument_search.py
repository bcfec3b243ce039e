"""The search by argument: it reveals no hidden values, has a budget, and runs once per user."""

import re
from collections.abc import Iterator
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.units import to_datetime
from djqueue.dashboard import jobsearch
from djqueue.dashboard.jobsearch import ArgumentFilter
from djqueue.models import Job, LeaderLeaseRow
from tests.admin.factories import make_job
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with
from tests.support import PATIENCE

pytestmark = [pytest.mark.django_db, pytest.mark.dialect]

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture(autouse=True)
def database(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}


@pytest.fixture
def client() -> Any:
    return logged_in(one_with(*ALL_RIGHTS))


def search(client: Any, argument: str, **query: str) -> Any:
    return client.get(address(BY_NAME["jobs"], state="waiting", argument=argument, **query))


def listed(response: Any) -> list[str]:
    return [record.id for record in response.context["jobs"]]


def older(response: Any) -> str:
    return str(response.context["older"])


def make_jobs(count: int, **kwargs: Any) -> list[str]:
    return [make_job(payload={"args": [], "kwargs": kwargs}).job_id for _ in range(count)]


def shape(response: Any) -> tuple[Any, ...]:
    """What a page tells of where it lies among others."""
    context = response.context
    return listed(response), context["older"], context["newer"], context["window"]


def test_search_does_not_reveal_whether_hidden_value_matches(client: Any) -> None:
    make_jobs(jobsearch.PART_ROWS + 20, password="hunter2", order=7)

    right, wrong = search(client, "password:hunter2"), search(client, "password:nothunter")

    assert shape(right)[1:] == shape(wrong)[1:]
    assert shape(right)[0] == shape(wrong)[0] == []
    html = [
        re.sub("hunter2|nothunter|csrfmiddlewaretoken.*?>", "", one.content.decode())
        for one in (right, wrong)
    ]
    assert "Older" not in html[0]
    # Beside what was typed the pages are the same.
    assert re.sub(r"data-djq-\S+|\d+", "", html[0]) == re.sub(r"data-djq-\S+|\d+", "", html[1])


def test_search_decodes_every_payload_whether_or_not_it_matches(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_jobs(30, password="hunter2")
    opened: list[int] = []
    is_in = ArgumentFilter.is_in

    def counting(self: ArgumentFilter, record: Any) -> bool:
        opened[-1] += 1
        return is_in(self, record)

    monkeypatch.setattr(ArgumentFilter, "is_in", counting)
    for text in ("password:hunter2", "password:nothing", "order:7"):
        opened.append(0)
        search(client, text)

    assert opened == [30, 30, 30]


def test_result_pages_contain_only_visible_matches(client: Any) -> None:
    seen = []
    for _ in range(60):
        seen += make_jobs(1, order=7)
        make_jobs(1, password=7)  # has the bytes of 7, but shows them to nobody

    first = search(client, "order:7")
    assert listed(first) == seen[:9:-1]
    second = client.get(older(first))
    assert listed(second) == seen[9::-1]
    assert not older(second)


def test_full_last_page_has_no_link_to_older_jobs(client: Any) -> None:
    make_jobs(3, order=8)
    make_jobs(50, order=7)
    response = search(client, "order:7")
    assert len(listed(response)) == 50
    assert not older(response)


def test_search_stops_at_its_byte_budget_and_continues_from_there(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobsearch, "SCAN_BYTES", 1_000)
    [last] = make_jobs(1, order=7)
    make_jobs(8, text="x" * 400)

    response, pages = search(client, "order:7"), 1
    assert listed(response) == []
    assert "Search older jobs" in response.content.decode()
    while older(response):
        response, pages = client.get(older(response)), pages + 1
    assert listed(response) == [last]
    assert pages == 3


def test_search_stops_when_its_time_budget_is_used(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobsearch, "SCAN_MILLISECONDS", 0)
    monkeypatch.setattr(jobsearch, "PART_ROWS", 2)
    ids = make_jobs(5, order=7)

    response = search(client, "order:7")

    assert listed(response) == ids[:2:-1]
    assert response.context["window"] == "cut"
    assert listed(client.get(older(response))) == ids[2:0:-1]


def test_payload_larger_than_byte_budget_is_still_searched(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobsearch, "SCAN_BYTES", 10)
    [one] = make_jobs(1, order=7, text="x" * 400)
    assert listed(search(client, "order:7")) == [one]


def test_search_skips_hidden_queues(client: Any, settings: Any) -> None:
    make_job(queue="payroll", payload={"args": [], "kwargs": {"order": 7}})
    [mine] = make_jobs(1, order=7)
    hides = {"QUEUE_FILTER": lambda _request, name: name != "payroll"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": hides}
    response = search(client, "order:7")
    assert listed(response) == [mine]
    assert not older(response)


class Held:
    """A search of a user that another process makes."""

    def __init__(self, user: Any) -> None:
        self._turn = jobsearch.UserScans().take(SimpleNamespace(user=user))  # type: ignore[arg-type]

    def __enter__(self) -> bool:
        return self._turn.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._turn.__exit__(*error)


@pytest.mark.django_db(transaction=True)
def test_user_runs_one_search_at_a_time_across_processes() -> None:
    [job] = make_jobs(1, order=7)
    user, other = one_with(*ALL_RIGHTS), one_with(*ALL_RIGHTS)

    with Held(user) as is_free:
        assert is_free
        assert search(logged_in(user), "order:7").status_code == 429
        assert listed(search(logged_in(other), "order:7")) == [job]

    assert listed(search(logged_in(user), "order:7")) == [job]
    assert not LeaderLeaseRow.objects.filter(name__startswith="search:").exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ends_in", [-1, 3_600_000])
def test_search_of_killed_process_does_not_block_later_searches(ends_in: int) -> None:
    [job] = make_jobs(1, order=7)
    user = one_with(*ALL_RIGHTS)
    with Held(user):
        at = to_datetime(SYSTEM_CLOCK.now() + ends_in)  # in an hour: the clock was set back since
        assert LeaderLeaseRow.objects.filter(name__startswith="search:").update(expires_at=at) == 1
        assert listed(search(logged_in(user), "order:7")) == [job]


@pytest.mark.django_db(transaction=True)
def test_search_is_limited_per_process_if_its_row_cannot_be_written(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def locked(*_args: Any) -> bool:
        raise OperationalError("database is locked")

    [job] = make_jobs(1, order=7)
    monkeypatch.setattr(jobsearch, "_claim", locked)
    assert listed(search(client, "order:7")) == [job]
    assert "to this process only" in caplog.text


@pytest.fixture
def searching_in_a_transaction() -> Iterator[Any]:
    """A user whose search another process makes in a transaction, which has not ended."""
    user = one_with(*ALL_RIGHTS)
    entered, leave = Barrier(2, timeout=PATIENCE), Barrier(2, timeout=PATIENCE)

    def run() -> None:
        try:
            with transaction.atomic(), Held(user):
                entered.wait()
                leave.wait()
        finally:
            connection.close()

    thread = Thread(target=run)
    thread.start()
    entered.wait()
    yield user
    leave.wait()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    connection.close()  # with what the test has set


@pytest.mark.skipif(
    "connection.vendor != 'postgresql'", reason="others do not tell of rows that are not committed"
)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic_requests", [False, True])
def test_search_in_open_transaction_is_detected_without_waiting(
    atomic_requests: bool,
    searching_in_a_transaction: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic_requests)
    client = logged_in(searching_in_a_transaction)
    # To wait for the row would be an error, which lets the search run.
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = 500")
    assert search(client, "order:7").status_code == 429


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="one writer at a time is SQLite's")
@pytest.mark.django_db(transaction=True)
def test_search_in_transaction_does_not_lock_sqlite(searching_in_a_transaction: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 0")
    assert make_jobs(1, order=7)


@pytest.mark.django_db(transaction=True)
def test_user_runs_one_search_at_a_time_and_other_users_are_not_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_jobs(1, order=7)
    users = [one_with(*ALL_RIGHTS) for _ in range(2)]
    first, again, other = logged_in(users[0]), logged_in(users[0]), logged_in(users[1])
    entered, leave = Barrier(2, timeout=PATIENCE), Barrier(2, timeout=PATIENCE)
    scan, held = jobsearch.scan, [True]

    def slow(*args: Any) -> Any:
        if held.pop() if held else False:
            entered.wait()
            leave.wait()
        return scan(*args)

    monkeypatch.setattr(jobsearch, "scan", slow)
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(search(first, "order:7"))
        finally:
            connection.close()

    thread = Thread(target=run)
    thread.start()
    entered.wait()

    refused = search(again, "order:7")
    assert refused.status_code == 429
    assert "Another of your searches is still running" in refused.content.decode()
    partial = again.get(
        refused.request["PATH_INFO"],
        {"state": "waiting", "argument": "order:7"},
        headers={"HX-Request": "true"},
    )
    assert partial.status_code == 204
    assert len(listed(search(other, "order:7"))) == 1

    leave.wait()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [answer.status_code for answer in answers] == [200]
    assert len(listed(search(again, "order:7"))) == 1
    assert Job.objects.count() == 1

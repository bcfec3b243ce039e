"""The list of jobs: filters, queries, and actions on selected jobs."""

from datetime import UTC, datetime, timedelta

import msgpack
import pytest

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.client.deadletters import fingerprint
from djqueue.codecs import MSGPACK, encode
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.dashboard import audit, boards, jobsearch, rights
from djqueue.dashboard.reading import read_cache
from djqueue.models import AuditEvent, BulkKind, BulkOperation, Job
from djqueue.operations.bulk import Bulk
from tests.admin.factories import make_job
from tests.dashboard.acting import fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with
from tests.statements import recorded

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}
NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture
def database(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}


def page(client, status=200, **query):
    response = client.get(address(BY_NAME["jobs"], **query))
    assert response.status_code == status, response
    return response.content.decode()


def listed(client, **query):
    """Ids on the page, in their order."""
    html = page(client, **query)
    return [part.partition('"')[0] for part in html.split('<span title="')[1:]]


def do(client, name, *keys, **more):
    return client.post(
        address(BY_NAME[name]), {"job": [f"emails/{key}" for key in keys], **more}, follow=True
    )


# On every storage.


@pytest.mark.dialect
def test_newest_jobs_of_all_queues_come_first(client, anywhere):
    Queue("emails").enqueue(1, id="one")
    Queue("images").enqueue(1, id="two")
    assert sorted(listed(client, state="waiting")) == ["one", "two"]
    assert listed(client, state="waiting", queue="images") == ["two"]
    assert listed(client, state="completed") == []


@job(name="tests.jobs.pay")
def pay(order, token, note=""):
    """Never called."""


@job(name="tests.jobs.refund", redact=lambda value, part: {"args": ["masked"], "kwargs": {}})
def refund(order):
    """Never called."""


def cells(html):
    """What the column of arguments says, row by row."""
    parts = html.split('data-label="Arguments">')[1:]
    return [part.partition("</td>")[0].replace("&#x27;", "'").replace("&quot;", '"') for part in parts]


def enqueued(name, value):
    get_storage().enqueue([Batch("emails", name, JobOptions(), [encode(value, MSGPACK)])])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "tests.jobs.pay",
            {"args": [7, "hunter2"], "kwargs": {"note": "gift"}},
            "order=7, token=•••, note='gift'",
        ),
        ("tests.jobs.refund", {"args": [7], "kwargs": {}}, "order='masked'"),
        ("tests.jobs.gone", {"args": [7], "kwargs": {"password": "hunter2"}}, "•••, password=•••"),
        ("emails", {"to": "ann", "password": "hunter2"}, "{'to': 'ann', 'password': •••}"),
        ("emails", "x" * 100, f"'{'x' * 78}…"),
        ("emails", "x" * 9_000, "too large to list"),
        ("emails", "line\n<b>", "'line\\n&lt;b&gt;'"),
    ],
)
def test_rows_show_arguments_without_secrets(anywhere, name, value, said):
    enqueued(name, value)
    for client in (logged_in(one_with(rights.VIEW)), logged_in(one_with(*ALL_RIGHTS))):
        html = page(client, state="waiting")
        assert cells(html) == [said]
        assert "hunter2" not in html
        assert cells(page(client, state="waiting", queue="emails")) == [said]


def test_arguments_take_no_additional_query_per_row(client, database):
    def statements():
        read_cache.clear()
        with recorded() as captured:
            page(client, state="waiting")
        return len(captured)

    enqueued("tests.jobs.pay", {"args": [1, "t"], "kwargs": {}})
    page(client, state="waiting")
    one = statements()
    for number in range(20):
        enqueued("tests.jobs.pay", {"args": [number, "t"], "kwargs": {}})
    assert statements() == one


def test_bulk_buttons_are_above_the_rows(client, memory):
    Queue("emails").enqueue_many([1, 2])
    html = page(client, state="waiting", queue="emails")
    assert html.index("Cancel selected") < html.index('<table class="djq-table')
    assert html.index("Cancel all matching…") < html.index('<table class="djq-table')


def test_tabs_show_counts(client, anywhere):
    Queue("emails").enqueue_many(range(3))
    Queue("images").enqueue_many(range(2))
    assert "waiting <strong>5</strong>" in page(client)
    assert "waiting <strong>3</strong>" in page(client, queue="emails")


def test_full_id_redirects_to_its_job_and_missing_one_is_reported(client, anywhere):
    Queue("emails").enqueue(1, id="job-1")
    response = client.get(address(BY_NAME["jobs"], id="job-1"))
    assert response["Location"] == address(BY_NAME["job"])
    assert "No job with ID job-2 was found." in page(client, id="job-2")


def test_id_used_in_two_queues_lists_both_jobs(client, anywhere):
    for name in ("emails", "images"):
        Queue(name).enqueue(1, id="job-1")
    assert "Jobs with ID job-1" in page(client, id="job-1")
    assert client.get(address(BY_NAME["jobs"], id="job-1", queue="images")).status_code == 302


def test_failed_jobs_are_found_by_error(client, memory):
    queue = Queue("emails")
    for number, message in enumerate(("no address 1", "no address 2", "no paper")):
        queue.enqueue(1, id=f"job-{number}")
        fail(f"job-{number}", message)
    mark = fingerprint(get_storage().reads.dead_letters("emails")[0])
    assert sorted(listed(client, error=mark)) == ["job-0", "job-1"]


def test_actions_on_all_jobs_of_an_error_leave_other_errors_alone(client, memory):
    queue = Queue("emails")
    for number, message in enumerate(("no address 1", "no address 2", "no paper")):
        queue.enqueue(1, id=f"job-{number}")
        fail(f"job-{number}", message)
    mark = fingerprint(get_storage().reads.dead_letters("emails")[0])
    actions = client.get(address(BY_NAME["jobs"], error=mark)).context["matching_actions"]
    assert [label for label, _ in actions] == ["Retry all matching…", "Delete all matching…"]
    for _, url in actions:
        assert client.get(url).context["found"].matching == 2


def test_actions_on_all_jobs_apply_every_filter(client, database):
    queue = Queue("emails")
    queue.enqueue(1, id="mine", tags=["red"], priority=3)
    queue.enqueue(1, id="plain", priority=3)
    queue.enqueue(1, id="other", tags=["red"])
    for query in ({"tag": "red", "priority": "3"}, {"id": "min"}, {"tag": "red", "id": "m"}):
        context = client.get(address(BY_NAME["jobs"], state="waiting", **query)).context
        urls = dict(context["matching_actions"])
        preview = client.get(urls["Cancel all matching…"])
        assert preview.context["found"].matching == 1, query
        assert preview.context["hidden"].items() >= query.items()
    html = client.get(urls["Cancel all matching…"] + "&priority=3").content.decode()
    assert "<dt>Priority</dt><dd>3</dd>" in html
    nothing = client.get(address(BY_NAME["jobs"], state="waiting", tag="red", until="2020-01-01T00:00:00"))
    assert nothing.context["matching_actions"] == []
    posted = {"state": "waiting", "tag": "red", "priority": "3", "expected": "1"}
    client.post(address(BY_NAME["all_cancel_begin"]), posted)
    stored = BulkOperation.objects.get().filter
    assert (stored["tag"], stored["priority"]) == ("red", 3)
    operation = address(BY_NAME["operation"]).replace("/1/", f"/{BulkOperation.objects.get().pk}/")
    assert '<dt>Priority</dt><dd class="djq-mono">3</dd>' in client.get(operation).content.decode()


def test_previews_name_the_error_and_not_its_fingerprint(client, memory):
    Queue("emails").enqueue(1, id="job-1")
    fail("job-1", "no address 1")
    mark = fingerprint(get_storage().reads.dead_letters("emails")[0])

    preview = address(BY_NAME["errors_preview"], fingerprint=mark, kind="retry")
    html = client.get(preview).content.decode()

    assert "NoAddressError: no address 1" in html
    assert f"<dd>{mark}" not in html
    assert "Failed jobs with error NoAddressError: no address 1." in page(client, error=mark)


def test_selected_jobs_are_cancelled_or_run_now(client, memory):
    Queue("emails").enqueue(1, id="a")
    Queue("emails").enqueue(1, id="later", delay=3600)

    html = do(client, "selected_cancel", "a", "gone").content.decode()
    assert "1 job was cancelled." in html
    assert "Skipped: not found (1)." in html
    do(client, "selected_promote", "later")

    assert get_storage().reads.states("emails", ["a", "later"]) == [State.CANCELLED, State.WAITING]
    kept = AuditEvent.objects.order_by("pk").values_list("action", "queue", "count", "detail")
    assert list(kept) == [
        ("selected_cancel", "emails", 1, {"jobs": [["emails", "a"]]}),
        ("selected_promote", "emails", 1, {"jobs": [["emails", "later"]]}),
    ]
    assert "Cancelled by" in audit.last_action("emails", "a")


def test_selected_jobs_are_deleted_after_the_undo_period(client, memory):
    for job_id in ("a", "b"):
        Queue("emails").enqueue(1, id=job_id)
    html = do(client, "selected_remove", "a").content.decode()
    assert "1 job of emails will be deleted in 30 seconds." in html
    row = BulkOperation.objects.get()
    assert (row.kind, row.filter["ids"]) == (BulkKind.DELETE, ["a"])
    assert get_storage().reads.states("emails", ["a"]) == [State.WAITING]

    BulkOperation.objects.update(start_at=row.created_at)
    Bulk(get_storage(), "default").work()
    assert get_storage().reads.states("emails", ["a", "b"]) == [None, State.WAITING]
    event = AuditEvent.objects.get()
    assert event.detail == {"operation": row.pk, "jobs": [["emails", "a"]]}


def test_selected_jobs_are_retried_and_redirect_to_the_list(client, memory):
    Queue("emails").enqueue(1, id="a")
    fail("a")
    back = address(BY_NAME["jobs"], state="failed")
    response = do(client, "selected_retry", "a", djq_back=back)
    assert response.redirect_chain == [(back, 302)]
    assert "1 job will be retried." in response.content.decode()


def test_action_without_selection_is_reported(client, memory):
    assert "No jobs were selected." in do(client, "selected_cancel").content.decode()


def test_selected_jobs_of_hidden_queue_are_not_changed(client, memory, settings):
    Queue("emails").enqueue(1, id="a")
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"QUEUE_FILTER": lambda _request, name: name != "emails"},
    }
    Queue("emails").enqueue(1, id="a")
    do(client, "selected_cancel", "a")
    assert get_storage().reads.states("emails", ["a"]) == [State.WAITING]
    assert not AuditEvent.objects.exists()


def test_menu_offers_only_permitted_actions_of_the_state(memory):
    Queue("emails").enqueue(1, id="job-1")
    html = page(logged_in(one_with(rights.VIEW, rights.CANCEL, rights.RETRY)), state="waiting")
    assert f'formaction="{address(BY_NAME["cancel"])}"' in html
    for name in ("retry", "promote", "remove"):
        assert f'formaction="{address(BY_NAME[name])}"' not in html, name
    assert "Cancel selected" in html
    assert "Retry selected" not in html
    assert "<details" not in page(logged_in(one_with(rights.VIEW)), state="waiting").partition("djq-table")[2]


def test_storage_without_tables_disables_other_filters_with_a_reason(client, memory):
    Queue("emails").enqueue(1, id="job-1")
    html = page(client, state="waiting", name="no.such.job")
    assert "can be searched by queue and full ID only" in html
    assert html.count(" disabled") == 7
    assert "job-1" in html


# Where there are tables.


@pytest.mark.dialect
def test_each_filter_finds_its_jobs(client, database):
    make_job(job_id="old", created_at=NOW - timedelta(days=30))
    make_job(job_id="plain")
    make_job(job_id="tagged", options=msgpack.packb({"tags": ["red", "order:42"], "max_attempts": 5}))
    make_job(job_id="near", options=msgpack.packb({"tags": ["redder"]}))
    make_job(job_id="named", name="shop.jobs.other")
    make_job(job_id="urgent", priority=9)
    make_job("active", job_id="theirs", worker="w7")
    wanted = {
        "plain": {"id": "pla"},
        "tagged": {"tag": "red"},
        "named": {"name": "shop.jobs.other"},
        "urgent": {"priority": "9"},
        "theirs": {"worker": "w7", "state": "active"},
        "old": {"until": "2026-05-15T00:00:00"},
    }
    for job_id, query in wanted.items():
        assert listed(client, **{"state": "waiting", **query}) == [job_id], query
        assert listed(client, **{**query, "state": "any"}) == [job_id], query
        assert listed(client, **{"state": "waiting", "queue": "emails", **query}) == [job_id], query
    assert "old" not in listed(client, state="waiting", since="2026-05-15T00:00:00")
    assert listed(client, state="waiting", name="shop.jobs.other", priority="9") == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("order_id:7", ["number"]),
        ("kwargs.order_id:7", ["number"]),
        ("order_id: 7 ", ["number"]),
        ('order_id:"7"', ["text"]),
        ("order_id:70", []),
        ("city:New York", ["city"]),
        ("order.id:7", ["deep"]),
        ("order.lines.0:7", ["deep"]),
        ("id:7", []),
        ("flag:true", ["flag"]),
        ("flag:1", []),
        ("password:7", []),
        ("args.0:7", []),
        ("order_id:18446744073709551616", []),
    ],
)
def test_jobs_are_found_by_arguments(client, database, text, ids):
    for name, kwargs in {
        "number": {"order_id": 7},
        "other": {"order_id": 8},
        "text": {"order_id": "7"},
        "city": {"city": "New York"},
        "deep": {"order": {"lines": [7], "id": 7}},
        "flag": {"flag": True},
        "secret": {"password": 7},
        "unknown": {},
    }.items():
        make_job(job_id=name, payload={"args": [7] if name == "unknown" else [], "kwargs": kwargs})

    assert sorted(listed(client, state="waiting", argument=text)) == (
        ["number", "text"] if ids == ["number"] else ids
    )
    assert "newest 10,000 jobs" in page(client, state="waiting", argument=text)


@job(name="tests.dashboard.add")
def add(left, right):
    return left + right


def test_jobs_are_found_by_position_of_a_named_parameter(client, database):
    name = "tests.dashboard.add"
    make_job(job_id="mine", name=name, payload={"args": [7, 8], "kwargs": {}})
    make_job(job_id="theirs", name=name, payload={"args": [8, 7], "kwargs": {}})

    assert listed(client, state="waiting", argument="args.0:7") == ["mine"]
    assert listed(client, state="waiting", argument="args.1:7") == ["theirs"]
    assert listed(client, state="waiting", argument="args.2:7") == []


def test_name_of_a_parameter_finds_arguments_however_they_were_passed(client, database):
    name = "tests.dashboard.add"
    make_job(job_id="first", name=name, payload={"args": [7, 8], "kwargs": {}})
    make_job(job_id="second", name=name, payload={"args": [8], "kwargs": {"right": 7}})
    make_job(job_id="inner", name=name, payload={"args": [{"id": 7}], "kwargs": {}})
    make_job(job_id="unregistered", name="other.add", payload={"args": [7, 8], "kwargs": {}})

    assert listed(client, state="waiting", argument="left:7") == ["first"]
    assert listed(client, state="waiting", argument="right:7") == ["second"]
    assert listed(client, state="waiting", argument="left.id:7") == ["inner"]
    shown = page(client, state="waiting")
    assert "left=7, right=8" in shown
    assert "left=8, right=7" in shown


def test_search_covers_all_states_unless_one_was_chosen(client, database):
    for state in ("waiting", "failed", "completed"):
        make_job(state, job_id=state, payload={"args": [], "kwargs": {"order_id": 7}})

    assert sorted(listed(client, argument="order_id:7")) == ["completed", "failed", "waiting"]
    assert listed(client, argument="order_id:7", state="failed") == ["failed"]
    assert 'name="state"' not in page(client)
    assert '<input type="hidden" name="state" value="failed">' in page(client, state="failed")


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"argument": "7"}, "Use the form order_id:7"),
        ({"argument": ":7"}, "Use the form order_id:7"),
        ({"argument": "order..id:7"}, "Use the form order_id:7"),
        ({"priority": "high"}, "Enter a whole number."),
    ],
)
def test_invalid_filter_lists_no_jobs_and_offers_no_action_on_all(client, database, query, problem):
    make_job(job_id="job-4711")
    assert "Delete all matching" in page(client, state="waiting")
    html = page(client, 400, state="waiting", **query)
    assert problem in html
    assert "job-4711" not in html
    assert "all matching" not in html


@pytest.mark.dialect
def test_pages_link_to_older_and_newer_jobs_of_all_queues(client, database):
    for number in range(120):
        make_job(job_id=f"job-{number:03}", queue=("emails", "images")[number % 2])
    for query in (
        {"state": "waiting"},
        {"state": "any"},
        {"state": "waiting", "name": "shop.jobs.send_receipt"},
    ):
        first = client.get(address(BY_NAME["jobs"], **query))
        assert listed(client, **query) == [f"job-{number:03}" for number in range(119, 69, -1)]
        second = client.get(first.context["older"])
        third = client.get(second.context["older"])
        assert [job.id for job in third.context["jobs"]] == [
            f"job-{number:03}" for number in range(19, -1, -1)
        ]
        assert third.context["older"] == ""
        assert [job.id for job in client.get(third.context["newer"]).context["jobs"]] == [
            job.id for job in second.context["jobs"]
        ]


@pytest.mark.dialect
def test_search_covers_a_window_of_newest_jobs_and_the_page_says_so(client, database, monkeypatch):
    monkeypatch.setattr(jobsearch, "MAX_SEARCHED", 3)
    for number in range(5):
        make_job(job_id=f"job-{number}", priority=number)
    assert listed(client, state="waiting", priority="1") == []
    assert listed(client, state="waiting", priority="2") == ["job-2"]
    assert listed(client, state="waiting", queue="emails", priority="2") == ["job-2"]
    assert "Searched the newest 100,000 jobs." in page(client, state="waiting", priority="2")
    assert "of this queue and state" in page(client, state="waiting", queue="emails", priority="2")
    assert "newest 100,000" not in page(client, state="waiting")


@pytest.mark.dialect
def test_jobs_before_a_time_are_found_despite_many_newer_ones(client, database, monkeypatch):
    monkeypatch.setattr(jobsearch, "MAX_SEARCHED", 30)
    for number in range(100):
        make_job(job_id=f"job-{number}", created_at=NOW + timedelta(hours=number))
    # One that was enqueued anew keeps its old place.
    Job.objects.filter(job_id="job-50").update(created_at=NOW + timedelta(hours=200))
    found = listed(client, state="waiting", until=(NOW + timedelta(hours=52)).strftime("%Y-%m-%dT%H:%M"))
    assert found[:8] == ["job-51", *(f"job-{number}" for number in range(49, 42, -1))]
    assert len(found) < 30


@pytest.mark.parametrize(
    "query",
    [
        {"state": "waiting"},
        {"state": "any"},
        {"state": "waiting", "queue": "emails"},
        {"state": "failed", "name": "a.b", "tag": "red", "worker": "w", "priority": "1"},
        {"state": "waiting", "queue": "emails", "tag": "red"},
        {"state": "waiting", "argument": "order_id:7"},
        {"state": "any", "id": "abc", "since": "2026-01-01T00:00", "until": "2026-12-01T00:00"},
    ],
    ids=str,
)
def test_queries_use_no_count_distinct_or_offset(client, database, query, monkeypatch):
    for number in range(60):
        make_job(job_id=f"job-{number}", queue=f"queue-{number % 7}")
    seen = boards.read_board()  # which has tests of its own
    monkeypatch.setattr(boards, "read_board", lambda: seen)
    with recorded() as captured:
        page(client, **query)
    asked = [sql.upper() for sql in captured if "djqueue_job" in sql]
    assert asked
    for sql in asked:
        assert "COUNT(" not in sql
        assert "DISTINCT" not in sql
        assert "OFFSET" not in sql


@pytest.mark.dialect
def test_list_takes_as_many_queries_for_any_number_of_queues(client, database):
    def queries(queues):
        for number in range(queues):
            make_job(queue=f"queue-{number}")
        jobsearch.newest([f"queue-{number}" for number in range(queues)], State.WAITING, "")
        with recorded() as captured:
            found = jobsearch.newest([f"queue-{number}" for number in range(queues)], State.WAITING, "")
        return len(captured), len(found.jobs)

    assert queries(2) == (2, 2)
    assert queries(40)[0] == 2


def test_jobs_of_hidden_queue_are_never_listed(client, database, settings):
    make_job(job_id="hidden")
    make_job(job_id="shown", queue="images")
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"QUEUE_FILTER": lambda _request, name: name == "images"},
    }
    for query in ({"state": "waiting"}, {"state": "any"}, {"state": "any", "name": "shop.jobs.send_receipt"}):
        assert listed(client, **query) == ["shown"], query
    for query in ({"state": "waiting"}, {"state": "any"}):
        assert listed(client, queue="emails", **query) == []
    assert "hidden" not in page(client, id="hid", state="any").partition("djq-live")[2].partition("<table")[2]

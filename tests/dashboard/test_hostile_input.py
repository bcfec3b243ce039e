"""Requests that no form sends: pages reject or answer them, and none raises an exception."""

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from djqueue import Queue
from djqueue.dashboard.reading import read_cache
from djqueue.models import BulkOperation, CronJob, Job
from tests.admin.factories import make_job
from tests.dashboard.schedules import GOOD
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, make_superuser, one_with

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}
GETS = [page for page in PAGES if page.method == "GET"]
POSTS = [page for page in PAGES if page.method == "POST"]
DEEP = "[" * 5_000 + "]" * 5_000
LONG = "9" * 5_000
HALF = '{"a": "\\ud800"}'


@pytest.fixture(autouse=True)
def database(settings: Any) -> None:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    Queue("emails").enqueue({"args": [], "kwargs": {"order": 7}}, id="job-1", name="emails")


@pytest.fixture
def client() -> Any:
    client = logged_in(one_with(*ALL_RIGHTS))
    client.raise_request_exception = False
    return client


@pytest.fixture
def superuser() -> Any:
    client = logged_in(make_superuser())
    client.raise_request_exception = False
    return client


def get(client: Any, page: str, **query: str) -> Any:
    return client.get(address(BY_NAME[page], **query))


def post(client: Any, page: str, **data: Any) -> Any:
    return client.post(address(BY_NAME[page]), data)


@pytest.mark.parametrize("name", ["since", "until"])
@pytest.mark.parametrize(
    "at", ["9999-12-31T23:59", "9998-12-31T23:59", "0001-01-01T00:00", "1969-12-31T00:00"]
)
def test_time_out_of_range_is_rejected(client: Any, name: str, at: str) -> None:
    response = get(client, "jobs", state="waiting", **{name: at})
    assert response.status_code == 400
    assert response.context["form"].errors.keys() == {name}
    assert "Enter a time from 1970 to 9997." in response.content.decode()


@pytest.mark.parametrize("expected", ["abc", "-1", LONG, "1e9", "2147483648"])
def test_invalid_expected_count_is_rejected(client: Any, expected: str) -> None:
    for page, data in (
        ("errors_begin", {"kind": "retry"}),
        ("all_cancel_begin", {"state": "waiting"}),
    ):
        response = post(client, page, **data, expected=expected)
        assert response.status_code == 400
        assert response.content.startswith(b"expected: ")
    assert not BulkOperation.objects.exists()


@pytest.mark.parametrize("text", [DEEP, f"[{LONG}]", f'[{{"a": {DEEP}}}]', '["\\ud800"]'])
def test_json_that_cannot_be_stored_is_rejected_by_enqueue_and_schedule_forms(client: Any, text: str) -> None:
    for page, data in (("enqueue_now", {"name": "any"}), ("schedule_create", {**GOOD, "djq_do": "save"})):
        for field, value in (("args", text), ("kwargs", f'{{"a": {text}}}')):
            response = post(client, page, **{**data, field: value})
            assert response.status_code == 400, page
            assert field in response.context["form"].errors
    assert not CronJob.objects.exists()


def test_json_that_cannot_be_stored_is_rejected_by_edit_form(client: Any) -> None:
    form = get(client, "edit").context["form"]
    known = {name: form.initial[name] for name in ("seal", "how", "new_id", "args", "kwargs")}
    for text in (DEEP, f"[{LONG}]"):
        response = post(client, "edit_now", **{**known, "args": text})
        assert response.status_code == 400
        assert "args" in response.context["form"].errors


def test_nul_in_parameter_is_rejected_by_every_page(client: Any) -> None:
    for page in GETS:
        response = client.get(f"{address(page)}?zone=%00")
        assert response.status_code == 400, page.name
        assert response.content == b"zone: The value contains a NUL character.", page.name


def test_nul_in_path_is_rejected(client: Any) -> None:
    response = client.get(address(BY_NAME["queue"]).replace("emails", "e%00"))
    assert response.status_code == 400
    assert response.content.startswith(b"queue: ")


@pytest.mark.parametrize(
    "back",
    [
        "https://evil.example/",
        "//evil.example/",
        "/admin/djqueue/dashboard/\\evil",
        "javascript:alert(1)",
        "/admin/djqueue/dashboard@evil.example",
        "/admin/djqueue/dashboard/\r\nSet-Cookie: a=b",
        "/admin/djqueue/dashboard/" + "x" * 100_000,
    ],
)
def test_action_redirects_only_to_dashboard(client: Any, back: str) -> None:
    response = post(client, "pause", djq_back=back)
    assert response.status_code in (302, 400)
    where = response.headers.get("Location", "/admin/djqueue/dashboard/")
    assert where.startswith("/admin/djqueue/dashboard/")
    assert "\r" not in where
    assert "\n" not in where
    assert "Set-Cookie: a=b" not in str(response.headers)


NASTY = st.one_of(
    st.sampled_from(
        [
            "", " ", "\0", "abc", "-1", "0", "1e999", "nan", "-inf", "NaN", LONG, f"-{LONG}", DEEP, HALF,
            "9999-12-31T23:59", "0001-01-01", "2026-02-30", "<9223372036854775808", ">0", "<-1",
            "<" + "9" * 18,
            "٣", "\u202e", "\ud7ff", "x" * 10_000, "a:" + "9" * 240, 'a:"\\ud800"', "args.99999999999:1",
            "a.b:[[[[", ":", "a:NaN", "{}", "[]", "null", "1:2:3", "../..", "%s%d%n", "'\"><script>",
            "99999999 00:00:00", "P99999999999D", "* * * * *", "failed", "waiting", "any", "2147483648",
            "18446744073709551616", "-9223372036854775809",
        ]
    ),
    st.text(max_size=40),
    st.integers().map(str),
    st.floats().map(str),
    st.datetimes().map(lambda at: at.isoformat()),
)  # fmt: skip
GET_NAMES = (
    "state", "queue", "id", "name", "tag", "worker", "priority", "since", "until", "argument", "error", "at",
    "after", "subject", "concurrency_key", "window", "format", "sort", "q", "user", "action", "job_id",
    "reason", "kind", "fingerprint", "error_type", "older_than", "newer_than", "rate", "expected",
    "args", "kwargs", "delay",
)  # fmt: skip
POST_NAMES = (
    "rate", "concurrency", "what", "confirm", "concurrency_key", "key-name",
    "key-concurrency", "key-rate", "key-weight", "limiter-rate", "limiter-concurrency", "job",
    "state", "queue", "name", "expected",
    "kind", "reason", "error_type", "fingerprint", "older_than", "newer_than", "run_at", "delay",
    "priority", "seal", "how", "new_id", "args", "kwargs", "payload", "unique_key", "job_name",
    "schedule", "every", "timezone",
    "jitter", "start_at", "end_at", "max_executions", "overlap", "missed", "missed_window", "blackouts",
    "on_blackout", "enabled", "on", "djq_do", "djq_back",
)  # fmt: skip
EXAMPLES = pytest.mark.parametrize(
    "examples",
    [
        with_settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow]),
        pytest.param(
            with_settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow]),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["few", "many"],
)


def is_answered(response: Any) -> bool:
    return response.status_code < 500 or response.status_code in (501, 503)


@EXAMPLES
def test_page_answers_any_parameters(client: Any, examples: Any) -> None:
    @examples
    @given(
        page=st.sampled_from(GETS),
        query=st.dictionaries(st.sampled_from(GET_NAMES), NASTY, min_size=1, max_size=4),
    )
    @example(page=BY_NAME["jobs"], query={"state": "waiting", "argument": 'a:"\\ud800"'})
    @example(page=BY_NAME["jobs"], query={"state": "any", "until": "9999-12-31T23:59"})
    @example(page=BY_NAME["errors"], query={"older_than": LONG})
    @example(page=BY_NAME["errors"], query={"older_than": "1e300"})
    def check(page: Any, query: dict[str, str]) -> None:
        response = client.get(address(page), query)
        assert is_answered(response), (page.name, query)

    check()


@EXAMPLES
def test_form_answers_any_values(client: Any, examples: Any) -> None:
    @examples
    @given(
        page=st.sampled_from(POSTS),
        data=st.dictionaries(st.sampled_from(POST_NAMES), NASTY, min_size=1, max_size=8),
    )
    @example(page=BY_NAME["errors_begin"], data={"kind": "purge", "older_than": LONG})
    @example(page=BY_NAME["reschedule"], data={"run_at": "9999-12-31T23:59:59"})
    @example(
        page=BY_NAME["schedule_create"], data={**GOOD, "start_at": "9997-12-31T23:00:00", "djq_do": "save"}
    )
    @example(page=BY_NAME["schedule_create"], data={**GOOD, "schedule": "", "every": "36500 00:00:00"})
    @example(page=BY_NAME["key_limits"], data={"key-name": "\ud7ff" * 300, "key-rate": LONG})
    def check(page: Any, data: dict[str, str]) -> None:
        read_cache.clear()
        filled = (
            {**GOOD, **data} if page.name.startswith("schedule_") and page.name != "schedule_run" else data
        )
        response = client.post(address(page), filled)
        assert is_answered(response), (page.name, data)

    check()


LISTS = ("job", "jobresult", "deadletter", "cronjob")
LIST_NAMES = ("q", "p", "o", "all", "e", "state__exact", "queue", "name", "reason", "outcome",
              "paused__exact", "enabled__exact", "source__exact", "_popup", "_to_field",
              "payload__contains")  # fmt: skip


@EXAMPLES
def test_admin_list_answers_any_parameters(superuser: Any, examples: Any) -> None:
    make_job()

    @examples
    @given(
        model=st.sampled_from(LISTS),
        query=st.dictionaries(st.sampled_from(LIST_NAMES), NASTY, min_size=1, max_size=3),
    )
    @example(model="job", query={"p": LONG})
    @example(model="job", query={"o": f"{LONG}.-1"})
    @example(model="cronjob", query={"enabled__exact": "perhaps"})
    def check(model: str, query: dict[str, str]) -> None:
        response = superuser.get(f"/admin/djqueue/{model}/", query)
        assert is_answered(response), (model, query)

    check()


@pytest.mark.parametrize("model", LISTS)
def test_admin_row_answers_any_key(superuser: Any, model: str) -> None:
    for key in ("0", "-1", LONG[:4_000], "9" * 30, "x" * 3_000, "_00", "%00", "nan", "1e5"):
        for page in ("change", "history", "delete"):
            response = superuser.get(f"/admin/djqueue/{model}/{key}/{page}/")
            assert is_answered(response), (key, page)


def test_body_that_is_not_utf8_is_answered(client: Any) -> None:
    for page in POSTS:
        response = client.post(
            address(page), b"name=\xff\xfe&args=\x80&rate=\xc3", "application/x-www-form-urlencoded"
        )
        assert is_answered(response), page.name
    response = client.get(address(BY_NAME["jobs"]) + "?state=waiting&name=%ff%fe&id=%80")
    assert is_answered(response)


@pytest.mark.parametrize(
    ("args", "kwargs"), [(5, {}), (None, 5), ("abc", {}), ({"a": 1}, 5), (["abc"], 5)], ids=repr
)
def test_pages_show_payload_that_only_resembles_call(client: Any, args: Any, kwargs: Any) -> None:
    Queue("emails").enqueue({"args": args, "kwargs": kwargs}, id="job-2", name="of another process")
    job = "/admin/djqueue/dashboard/jobs/emails/job-2/"
    row = Job.objects.get(job_id="job-2")
    pages = [job, f"{job}edit/", f"/admin/djqueue/job/{row.pk}/change/"]
    for query in ({"state": "waiting"}, {"state": "waiting", "argument": "args.0:7"}):
        assert get(client, "jobs", **query).status_code == 200
    superuser = logged_in(make_superuser())
    for address_of in pages:
        assert superuser.get(address_of).status_code == 200, address_of


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '{"a": ' + LONG + "}", 5], ids=range(5))
def test_pages_show_job_whose_stored_headers_are_malformed(client: Any, text: Any) -> None:
    Job.objects.update(options=msgpack.packb({"headers": text}))
    row = Job.objects.get()
    response = client.get(address(BY_NAME["job"]))
    assert response.status_code == 200
    assert "unreadable" in response.content.decode()
    assert logged_in(make_superuser()).get(f"/admin/djqueue/job/{row.pk}/change/").status_code == 200

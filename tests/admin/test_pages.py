"""The page of one row."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.template.loader import get_template
from django.test.utils import CaptureQueriesContext

from djqueue.dashboard import rendering
from djqueue.models import DeadLetter, Job, JobResult
from tests.admin.factories import (
    change_url,
    list_url,
    logged_in,
    make_attempt,
    make_job,
    make_log,
    make_result,
    make_superuser,
    make_user,
)

pytestmark = pytest.mark.django_db

QUERIES = 9
"""Session, user, two for rights, the job, and one for each table of its belongings."""


def page(row: Any, user: User | None = None) -> str:
    response = logged_in(user or make_superuser()).get(change_url(row))
    assert response.status_code == 200
    return response.content.decode()


def field(html: str, name: str) -> str:
    """What the page shows in a row of the form."""
    found = re.search(rf'field-{name}".*?class="readonly">(.*?)</div>', html, re.DOTALL)
    assert found, f"no {name} on the page"
    return found[1].strip()


def make_full_job() -> Job:
    job = make_job(
        "failed",
        payload={"args": [42], "kwargs": {"to": "ann@example.com"}},
        error_type="shop.NoAddressError",
        error_message="no address",
        traceback="Traceback …\nshop.NoAddressError: no address",
        options=msgpack.packb({"timeout": 30_000, "tags": ["night"]}),
        progress=msgpack.packb(0.5),
    )
    for number in range(1, 4):
        make_attempt(job, number, error_type="shop.NoAddressError", error_message="no address")
    make_log(job, "looking for an address")
    return job


def test_the_page_of_a_job_shows_all_that_is_known_of_it() -> None:
    job = make_full_job()
    html = page(job)
    assert "&#x27;to&#x27;: &#x27;ann@example.com&#x27;" in field(html, "payload_shown")
    assert "42" not in field(html, "payload_shown")  # nobody here knows what the first parameter is called
    assert "&#x27;timeout&#x27;: 30000" in field(html, "options_shown")
    assert "0.5" in field(html, "progress_shown")
    assert "shop.NoAddressError: no address" in field(html, "traceback_shown")
    assert field(html, "attempts_shown").count("NoAddressError: no address") == 3
    assert "looking for an address" in field(html, "log_shown")
    letter = DeadLetter.objects.get()
    assert field(html, "dead_letter") == f'<a href="{change_url(letter)}">no attempts left</a>'


@pytest.mark.parametrize("model", [Job, JobResult, DeadLetter])
def test_a_page_takes_few_queries(model: Any) -> None:
    job = make_full_job()
    make_result(job, 42)
    row = model.objects.first()
    client = logged_in(make_user("view_dashboard", f"view_{model._meta.model_name}"))
    with CaptureQueriesContext(connection) as captured:
        assert client.get(change_url(row)).status_code == 200
    assert len(captured) <= QUERIES, [entry["sql"] for entry in captured.captured_queries]


def test_the_page_of_a_completed_job_shows_its_result() -> None:
    job = make_job("completed")
    make_result(job, {"ok": True, "total": Decimal("9.90")})
    shown = field(page(job), "result_shown")
    assert "Decimal(&#x27;9.90&#x27;)" in shown
    assert f'href="/admin/djqueue/job/?queue=emails&amp;q={job.job_id}"' in page(JobResult.objects.get())


def test_a_result_that_is_over_is_said_to_be() -> None:
    assert field(page(make_job("completed")), "result_shown") == "no longer kept"


def test_a_job_that_has_not_failed_has_no_error_on_its_page() -> None:
    assert "traceback_shown" not in page(make_job("waiting"))


def test_values_are_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>"
    job = make_job("failed", payload=[evil], error_message=evil, traceback=evil, error_type="E")
    make_attempt(job, error_message=evil, error_type=evil)
    make_log(job, evil)
    make_result(job, evil)
    for row in (job, JobResult.objects.get(), DeadLetter.objects.get()):
        html = page(row)
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert(1)" in html


def test_a_long_value_is_cut_and_said_to_be() -> None:
    html = page(make_job(payload={"text": "x" * 200_000}))
    assert len(field(html, "payload_shown")) < 10_200
    assert "Showing the first 10,000 characters." in html


def test_of_a_long_traceback_the_end_is_shown() -> None:
    job = make_job("failed", traceback="begin" + "x" * 20_000 + "the end", error_type="E")
    shown = field(page(job), "traceback_shown")
    assert "the end" in shown
    assert "begin" not in shown
    assert "Showing the last 10,000 characters." in shown


def test_a_payload_that_cannot_be_read_says_why() -> None:
    refused = make_job(payload=None, content_type="application/x-python-serialize")
    assert "is not accepted" in field(page(refused), "payload_shown")
    broken = make_job()
    Job.objects.filter(pk=broken.pk).update(payload=b"\xc1")
    assert "be displayed: not a" in field(page(broken), "payload_shown")


def test_payloads_of_other_content_types_are_decoded_by_theirs() -> None:
    job = make_job(content_type="application/json")
    Job.objects.filter(pk=job.pk).update(payload=b'{"n": [1, 2]}')
    assert "{&#x27;n&#x27;: [1, 2]}" in field(page(job), "payload_shown").replace("\n", "").replace(
        "    ", ""
    ).replace(",}", "}")


def test_nothing_is_inline_so_that_a_strict_content_security_policy_can_stand() -> None:
    job = make_full_job()
    client = logged_in(make_superuser())
    responses = [
        client.get(change_url(job)),
        client.get(list_url("job")),
        client.get(list_url("cronjob")),
    ]
    for response in responses:
        html = response.content.decode()
        assert response.status_code == 200
        assert not re.search(r"<script(?![^>]*\bsrc=)", html)
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", html)


@pytest.mark.urls("tests.admin.office_urls")
def test_a_site_of_the_projects_own_has_the_same_pages() -> None:
    client = logged_in(make_superuser())
    job, letter = make_job("failed"), DeadLetter.objects.get()

    shown = client.get(f"/office/djqueue/job/{job.pk}/change/").content.decode()
    assert f'href="/office/djqueue/deadletter/{letter.pk}/change/"' in shown
    assert 'href="/office/djqueue/dashboard/jobs/emails/' in shown
    shown = client.get(f"/office/djqueue/deadletter/{letter.pk}/change/").content.decode()
    assert f'href="/office/djqueue/job/?queue=emails&amp;q={job.job_id}"' in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ([], "[]"),
        ([1, "a"], "[1, 'a']"),
        ({"a": (1, b"x")}, "{\n    'a': (1, b'x'),\n}"),
        ([[1], {}], "[\n    [1],\n    {},\n]"),
        (
            datetime(2026, 1, 1, tzinfo=UTC),
            "datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)",
        ),
        (["x" * 90], "[\n    '" + "x" * 90 + "',\n]"),
    ],
)
def test_values_are_written_as_python_writes_them(value: Any, text: str) -> None:
    assert "".join(rendering._characters(value)) == text


def test_a_value_nested_deeper_than_anyone_reads_is_cut() -> None:
    value: list[Any] = []
    for _ in range(400):
        value = [value, 1]
    assert "…" in "".join(rendering._characters(value))


@pytest.mark.parametrize("name", ["change_list", "change_form", "attempts", "log"])
def test_the_templates_are_shipped_with_the_package(name: str) -> None:
    assert get_template(f"djqueue/admin/{name}.html")

"""The page of one row."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pytest
from django.contrib.auth.models import User
from django.template.loader import get_template

from djqueue.dashboard import rendering
from djqueue.models import CronJob, DeadLetter, Job, JobResult
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
from tests.statements import recorded

pytestmark = pytest.mark.django_db

QUERIES = 9
"""Session, user, two for permissions, the job, and one for each table with its data."""


def page(row: Any, user: User | None = None) -> str:
    response = logged_in(user or make_superuser()).get(change_url(row))
    assert response.status_code == 200
    return response.content.decode()


def field(html: str, name: str) -> str:
    """Return what the page shows in a row of the form."""
    found = re.search(rf'field-{name}".*?class="readonly">(.*?)</div>', html, re.DOTALL)
    assert found, f"no {name} on the page"
    return found[1].strip()


HEADERS = '{"tenant":7,"x-api-key":"hunter2"}'


def make_full_job() -> Job:
    job = make_job(
        "failed",
        payload={"args": [42], "kwargs": {"to": "ann@example.com"}},
        error_type="shop.NoAddressError",
        error_message="no address",
        traceback="Traceback …\nshop.NoAddressError: no address",
        options=msgpack.packb({"timeout": 30_000, "tags": ["night"], "headers": HEADERS}),
        progress=msgpack.packb(0.5),
    )
    for number in range(1, 4):
        make_attempt(job, number, error_type="shop.NoAddressError", error_message="no address")
    make_log(job, "looking for an address")
    return job


def test_a_jobs_page_shows_everything_about_the_job() -> None:
    job = make_full_job()
    html = page(job)
    assert "&#x27;to&#x27;: &#x27;ann@example.com&#x27;" in field(html, "payload_shown")
    assert "42" not in field(html, "payload_shown")  # no handler is registered that names the first parameter
    assert "&#x27;timeout&#x27;: 30000" in field(html, "options_shown")
    assert "&#x27;tenant&#x27;: 7" in field(html, "options_shown")
    assert "hunter2" not in html
    assert job.headers == {"tenant": 7, "x-api-key": "hunter2"}
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
    with recorded() as statements:
        assert client.get(change_url(row)).status_code == 200
    assert len(statements) <= QUERIES, statements


def test_a_completed_jobs_page_shows_its_result() -> None:
    job = make_job("completed")
    make_result(job, {"ok": True, "total": Decimal("9.90")})
    shown = field(page(job), "result_shown")
    assert "Decimal(&#x27;9.90&#x27;)" in shown
    assert f'href="/admin/djqueue/job/?queue=emails&amp;q={job.job_id}"' in page(JobResult.objects.get())


def test_an_expired_result_is_no_longer_kept() -> None:
    assert field(page(make_job("completed")), "result_shown") == "no longer kept"


def test_a_job_that_has_not_failed_shows_no_error() -> None:
    assert "traceback_shown" not in page(make_job("waiting"))


def test_values_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    job = make_job("failed", payload=[evil], error_message=evil, traceback=evil, error_type="E")
    make_attempt(job, error_message=evil, error_type=evil)
    make_log(job, evil)
    make_result(job, evil)
    for row in (job, JobResult.objects.get(), DeadLetter.objects.get()):
        html = page(row)
        assert "<script>alert" not in html
        assert "&lt;script&gt;alert(1)" in html


def test_a_long_value_is_truncated_with_a_note() -> None:
    html = page(make_job(payload={"text": "x" * 200_000}))
    assert len(field(html, "payload_shown")) < 10_200
    assert "Showing the first 10,000 characters." in html


def test_a_long_traceback_shows_its_end() -> None:
    job = make_job("failed", traceback="begin" + "x" * 20_000 + "the end", error_type="E")
    shown = field(page(job), "traceback_shown")
    assert "the end" in shown
    assert "begin" not in shown
    assert "Showing the last 10,000 characters." in shown


def test_an_unreadable_payload_shows_the_reason() -> None:
    refused = make_job(payload=None, content_type="application/x-python-serialize")
    assert "is not accepted" in field(page(refused), "payload_shown")
    broken = make_job()
    Job.objects.filter(pk=broken.pk).update(payload=b"\xc1")
    assert "be displayed: not a" in field(page(broken), "payload_shown")


def test_payloads_are_decoded_by_their_content_type() -> None:
    job = make_job(content_type="application/json")
    Job.objects.filter(pk=job.pk).update(payload=b'{"n": [1, 2]}')
    assert "{&#x27;n&#x27;: [1, 2]}" in field(page(job), "payload_shown").replace("\n", "").replace(
        "    ", ""
    ).replace(",}", "}")


def test_pages_work_under_a_strict_content_security_policy() -> None:
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


def test_each_list_and_each_row_links_to_the_dashboard() -> None:
    job = make_job("completed")
    failed = make_job("failed")
    rows: dict[Any, tuple[str, str]] = {
        job: ("jobs/", f"jobs/emails/{job.job_id}/"),
        make_result(job, 1): ("jobs/", f"jobs/emails/{job.job_id}/"),
        DeadLetter.objects.get(): ("errors/", f"jobs/emails/{failed.job_id}/"),
    }
    schedule = CronJob.objects.create(name="nightly", job_name="report", schedule="@daily")
    rows[schedule] = ("schedules/", f"schedules/{schedule.pk}/")
    client = logged_in(make_superuser())
    for row, addresses in rows.items():
        pages = (list_url(row._meta.model_name), change_url(row))
        for page_url, address in zip(pages, addresses, strict=True):
            link = f'<a class="djq-button" href="/admin/djqueue/dashboard/{address}">Open in dashboard</a>'
            assert link in client.get(page_url).content.decode()


@pytest.mark.urls("tests.admin.office_urls")
def test_a_custom_admin_site_has_the_same_pages() -> None:
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
def test_values_are_shown_as_python_literals(value: Any, text: str) -> None:
    assert "".join(rendering._characters(value)) == text


def test_a_deeply_nested_value_is_truncated() -> None:
    value: list[Any] = []
    for _ in range(400):
        value = [value, 1]
    assert "…" in "".join(rendering._characters(value))


@pytest.mark.parametrize("name", ["change_list", "change_form", "attempts", "log"])
def test_the_templates_are_part_of_the_package(name: str) -> None:
    assert get_template(f"djqueue/admin/{name}.html")

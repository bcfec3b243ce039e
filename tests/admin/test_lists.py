"""The lists: what they show, and that they stay fast with millions of rows."""

import re
from functools import partial
from typing import Any

import pytest

from djqueue import job as make_job_type
from djqueue.admin import lists
from djqueue.client import registry
from djqueue.models import CronJob, DeadLetter, Job, JobResult
from djqueue.storage.tables import inspector
from tests.admin.factories import (
    change_url,
    list_url,
    logged_in,
    make_job,
    make_result,
    make_superuser,
    make_user,
)
from tests.statements import recorded

pytestmark = pytest.mark.django_db

MODELS = ("job", "jobresult", "deadletter", "cronjob")
QUERIES = 9
"""Maximum for a list: session, user, two for permissions, queues, two for a search, count, rows."""


def make_rows() -> None:
    for state in ("waiting", "delayed", "blocked", "active", "completed", "failed", "cancelled"):
        job = make_job(state, error_type="builtins.ValueError", error_message="no address\nat all")
        make_result(job, 1)
        CronJob.objects.create(name=state, job_name="nightly", schedule="@daily")


def page(model: str, **query: str) -> str:
    response = logged_in(make_superuser()).get(list_url(model, **query))
    assert response.status_code == 200
    return response.content.decode()


def listed(model: str, **query: str) -> list[str]:
    """Return the text of each row's link."""
    rows = re.findall(r'<th class="field-\w+"><a href[^>]*>(.*?)</a></th>', page(model, **query))
    return [re.sub("<.*?>", "", row) for row in rows]


@pytest.mark.parametrize("query", ["", "job-"])
@pytest.mark.parametrize("model", MODELS)
def test_a_list_takes_few_queries_for_any_number_of_rows(model: str, query: str) -> None:
    make_rows()
    client = logged_in(make_user("view_dashboard", f"view_{model}"))
    with recorded() as statements:
        response = client.get(list_url(model, **({"q": query} if query else {})))
    assert response.status_code == 200
    assert len(statements) <= QUERIES, statements
    assert not [text for text in statements if "DISTINCT" in text]
    counts = [text for text in statements if "COUNT(" in text and "djqueue_cron" not in text]
    assert all("LIMIT 10001" in text for text in counts), counts


def test_a_list_does_not_read_the_large_columns() -> None:
    make_job(payload="x" * 100)
    with recorded() as statements:
        page("job")
    rows = [sql for sql in statements if 'ORDER BY "djqueue_job"' in sql]
    assert len(rows) == 1
    for column in ("payload", "options", "progress", "traceback", "error_message"):
        assert f'"{column}"' not in rows[0]


@pytest.mark.dialect
def test_the_newest_jobs_come_first() -> None:
    jobs = [make_job() for _ in range(3)]
    assert listed("job") == [job.job_id for job in reversed(jobs)]


@pytest.mark.dialect
def test_a_list_counts_no_further_than_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MAX_LISTED", 3)
    for _ in range(3):
        make_job()
    assert "More than 10,000" not in page("job")
    make_job()
    assert "More than 10,000 rows match" in page("job")
    assert re.search(r"\b3\s+jobs\b", page("job"))


def test_pages_end_where_the_count_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MAX_LISTED", 4)
    monkeypatch.setattr(lists.ReadOnlyAdmin, "list_per_page", 2)
    jobs = [make_job() for _ in range(9)][::-1]
    assert listed("job", p="2") == [job.job_id for job in jobs[2:4]]
    assert "p=3" not in page("job")


@pytest.mark.parametrize("state", ["waiting", "active", "failed"])
def test_a_state_is_a_badge_with_a_text(state: str) -> None:
    make_job(state)
    assert f'<span class="djq-state djq-state-{state}">{state}</span>' in page("job")


def test_a_pending_job_without_a_handler_is_marked() -> None:
    make_job(name="nobody.knows.this")
    make_job("completed", name="nobody.knows.this.either")
    assert page("job").count("no handler registered") == 1


def test_a_pending_job_with_a_handler_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})

    @make_job_type(name="shop.known")
    def known() -> None: ...

    make_job(name="shop.known")
    assert "no handler registered" not in page("job")


def test_times_are_in_the_viewers_zone(settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    make_job()
    assert '<time datetime="2026-06-01T12:00:00+00:00">2026-06-01 21:00:00</time>' in page("job")


def test_names_are_escaped() -> None:
    make_job(name="<b>bold</b>", queue="<i>", job_id="<script>")
    shown = page("job")
    assert "<b>bold" not in shown
    assert "&lt;b&gt;bold" in shown
    assert "<script>&" not in shown


# Filters.


def test_jobs_are_filtered_by_state_and_queue_and_name() -> None:
    wanted = make_job("failed", queue="a", name="n")
    make_job("waiting", queue="a", name="n")
    make_job("failed", queue="b", name="n")
    make_job("failed", queue="a", name="m")
    assert listed("job", state__exact="failed", queue="a", name="n") == [wanted.job_id]


def test_the_queue_filter_offers_the_queues_of_the_table() -> None:
    for queue in ("a", "b", "b", "ü {x}"):
        make_job(queue=queue)
    shown = page("job")
    assert [text for text in ("?queue=a", "?queue=b", "?queue=%C3%BC") if text in shown] == [
        "?queue=a",
        "?queue=b",
        "?queue=%C3%BC",
    ]


def test_a_queue_that_is_not_offered_can_still_be_filtered_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "MAX_CHOICES", 1)
    make_job(queue="a")
    wanted = make_job(queue="b")
    assert "?queue=b" not in page("job")
    assert listed("job", queue="b") == [wanted.job_id]


def test_the_name_filter_offers_the_registered_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {"shop.known": None})
    make_job()
    assert "?name=shop.known" in page("job")
    assert "?name=shop.known" in page("deadletter")


@pytest.mark.parametrize(
    "find", [partial(inspector.used_queues, "default"), partial(inspector.probed, "default")]
)
@pytest.mark.dialect
def test_queues_are_found_in_order_one_by_one(find: Any) -> None:
    assert find(Job, 9) == []
    for queue in ("b", "a", "b", "A", "ä"):
        make_job(queue=queue)
    assert sorted(find(Job, 9)) == sorted({"a", "b", "A", "ä"})
    assert find(Job, 2) == find(Job)[:2]


def test_dead_letters_are_filtered_by_reason() -> None:
    kept = [make_job("failed"), make_job("failed")]
    DeadLetter.objects.filter(job_id=kept[0].job_id).update(reason="timeout")
    assert listed("deadletter", reason="timeout") == [kept[0].job_id]
    assert "timed out" in page("deadletter")


# Search.


def test_a_whole_id_finds_only_its_job() -> None:
    wanted = make_job(job_id="user:4")
    make_job(job_id="user:42")
    assert listed("job", q=" user:4 ") == [wanted.job_id]


@pytest.mark.dialect
def test_jobs_are_found_by_the_beginning_of_an_id_or_a_name() -> None:
    first = make_job(job_id="0190-a")
    second = make_job(job_id="x", name="0190.jobs.f")
    make_job(job_id="y-0190", name="z.0190")
    assert sorted(listed("job", q="0190")) == sorted([first.job_id, second.job_id])


@pytest.mark.dialect
def test_a_search_for_a_beginning_covers_only_the_newest_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = make_job(job_id="abc-old"), make_job(job_id="abc-new")
    monkeypatch.setattr(lists, "MAX_SEARCHED", 1)
    assert listed("job", q="abc") == [new.job_id]
    assert listed("job", q="abc-old") == [old.job_id]


@pytest.mark.dialect
def test_wildcards_in_a_search_are_plain_characters() -> None:
    make_job(job_id="abc")
    assert listed("job", q="%") == []
    assert listed("job", q="a_c") == []


def test_results_are_found_by_their_job() -> None:
    one, other = make_job("completed"), make_job("completed")
    for job in (one, other):
        make_result(job, 1)
    assert listed("jobresult", q=one.job_id) == [one.job_id]


def test_a_result_links_to_its_job_without_a_query() -> None:
    job = make_job("completed")
    make_result(job, 1)
    shown = logged_in(make_superuser()).get(change_url(JobResult.objects.get())).content.decode()
    assert f'href="/admin/djqueue/job/?queue=emails&amp;q={job.job_id}"' in shown


@pytest.mark.parametrize("model", ["job", "deadletter", "jobresult", "cronjob"])
def test_search_for_a_term_that_is_too_long_finds_nothing(model: str) -> None:
    response = logged_in(make_superuser()).get(f"/admin/djqueue/{model}/", {"q": "x" * 70_000})

    assert response.status_code == 200
    assert response.context["cl"].result_count == 0

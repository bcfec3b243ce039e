"""The pages of bulk writes, and the actions on their jobs."""

import re

import pytest

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.client.storages import close_storage
from djqueue.core.states import State
from djqueue.dashboard import jobsearch, rights
from djqueue.dashboard.views import bulkwrites
from djqueue.models import AuditEvent, BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk
from djqueue.storage.bulkwrites import (
    DEAD_PUBLISHER_AFTER,
    DONE,
    FAILED,
    PUBLISHING,
    UNFINISHED,
    QueueShare,
    tag_of,
)
from djqueue.testing.contract.bulk_writes import report
from djqueue.testing.factories import batch
from tests.dashboard.acting import claim, fail
from tests.dashboard.visiting import ALL_RIGHTS, CAPTURED, PAGES, address, logged_in, one_with, one_without

pytestmark = pytest.mark.django_db

BY_NAME = {page.name: page for page in PAGES}
WRITE = CAPTURED["write"]
TAG = tag_of(WRITE)
BEGIN = {"bulk_write_cancel_begin": BulkKind.CANCEL, "bulk_write_retry_begin": BulkKind.RETRY}


@pytest.fixture
def on_redis(redis_server, settings):
    """Where Redis keeps reports, without a mirror."""
    redis_server.clean()
    options = {"url": redis_server.url, "mirror": False}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}}
    yield get_storage().capabilities.bulk_writes
    close_storage()


@pytest.fixture(params=["database", "redis"])
def kept(request, settings):
    """Where each storage that keeps reports does so."""
    if request.param == "redis":
        return request.getfixturevalue("on_redis")
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    return get_storage().capabilities.bulk_writes


@pytest.fixture
def client():
    return logged_in(one_with(*ALL_RIGHTS))


def text(response):
    return " ".join(re.sub(r"<[^>]*>", " ", response.content.decode()).split())


def hiding(settings, hidden="emails"):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"QUEUE_FILTER": lambda _request, queue: queue != hidden},
    }


def seeded(kept):
    """An import of six jobs of which one runs, one is done and one has failed; and others' jobs."""
    states = {"emails": QueueShare(2, 1, 6, 2)}
    kept.keep(report(WRITE, shares=states, rows=9, rejected={"payload": 1}, names=("emails",), user="ann"))
    for number in range(6):
        delay = 3_600 if number == 5 else None
        Queue("emails").enqueue(number, id=f"i{number}", tags=(TAG,), delay=delay)
    Queue("emails").enqueue(1, id="other", tags=("import:another",))


# The pages.


def test_memory_storage_has_no_bulk_writes(client, memory):
    assert "Bulk writes are not available with the in-memory storage" in text(
        client.get(address(BY_NAME["bulk_writes"]))
    )
    assert client.get(address(BY_NAME["bulk_write"])).status_code == 404


def test_list_shows_state_and_progress_of_each_bulk_write(client, kept):
    assert "No bulk writes in the last 30 days" in text(client.get(address(BY_NAME["bulk_writes"])))
    kept.keep(report("w1", app="nightly", shares={"emails": QueueShare(4, 1, 1_000, 7)}, rows=4_000))
    kept.keep(report("w2", app="weekly", state=DONE, shares={"images": QueueShare(2, 2, 5, 0, ended=True)}))
    kept.keep(report("w3", app="yearly", state=FAILED, error="no"))

    response = client.get(address(BY_NAME["bulk_writes"]))

    shown = text(response)
    assert shown.index("yearly") < shown.index("weekly") < shown.index("nightly")
    assert "nightly version 1 ▶ publishing 1 4,000 1,000 7 0 emails" in shown
    assert "weekly version 1 ✔ done" in shown
    assert "yearly version 1 ✖ failed" in shown
    kept.keep(report("w4", shares={queue: QueueShare() for queue in "abcde"}))
    assert "a, b, c +2" in text(client.get(address(BY_NAME["bulk_writes"])))
    assert '<progress max="1" value="0.2500"' in response.content.decode()


def test_list_marks_bulk_write_that_was_already_published(client, kept):
    kept.keep(report("w1", app="nightly", state=DONE, rows=5))
    kept.keep(report("w2", app="nightly", state=DONE, rows=5, skipped=True))

    again, first = re.findall(r"nightly (.*?)done", text(client.get(address(BY_NAME["bulk_writes"]))))

    assert (again, first) == ("version 1 already published ✔ ", "version 1 ✔ ")


def test_bulk_operations_link_to_bulk_writes(client, kept):
    assert (
        f'href="{address(BY_NAME["bulk_writes"])}"'
        in client.get(address(BY_NAME["operations"])).content.decode()
    )


def test_list_pages_from_newer_to_older_bulk_writes(client, kept, monkeypatch):
    monkeypatch.setattr(bulkwrites, "REPORTS_LISTED", 2)
    for number in range(3):
        kept.keep(report(f"w{number}", app=f"app-{number}", shares={"q": QueueShare()}))
    first = client.get(address(BY_NAME["bulk_writes"]))
    [older] = re.findall(r'href="([^"]*after=[^"]*)"', first.content.decode())

    assert "app-0" not in text(first)
    assert "app-0" in text(client.get(older))


def test_bulk_write_of_dead_publisher_is_unfinished(client, kept, monkeypatch):
    noted = kept.keep(report(WRITE, app="nightly", shares={"emails": QueueShare(2, 1)}))
    monkeypatch.setattr(
        "djqueue.dashboard.views.bulkwrites.SYSTEM_CLOCK", At(noted.updated_at + DEAD_PUBLISHER_AFTER + 1)
    )

    shown = text(client.get(address(BY_NAME["bulk_write"])))

    assert "✖ unfinished" in shown
    assert "Running workers publish the rest if the write was committed." in shown
    assert "The next write of the same application resumes this one." in shown


@pytest.mark.parametrize("share", [QueueShare(2, 0), QueueShare()])
def test_failed_bulk_write_advises_to_run_the_load_again(client, kept, share):
    kept.keep(report(WRITE, state=FAILED, shares={"emails": share}))

    shown = text(client.get(address(BY_NAME["bulk_write"])))

    assert "No jobs were enqueued: run the load again" in shown


def test_failed_bulk_write_offers_no_action_for_jobs_of_other_writes(client, kept):
    seeded(kept)
    kept.keep(report("w2", state=FAILED, shares={"emails": QueueShare(2, 0)}))

    assert "Cancel remaining" in text(client.get(address(BY_NAME["bulk_write"])))
    assert "Cancel remaining" not in text(client.get(address(BY_NAME["bulk_write"]).replace(WRITE, "w2")))


def test_page_of_many_queues_shows_the_first_with_unpublished_ones_on_top(client, kept):
    many = {f"q{number:04}": QueueShare(2, 2, 5, 0, ended=True) for number in range(2_000)}
    kept.keep(report(WRITE, shares={**many, "q1999": QueueShare(2, 1, 1)}))

    shown = text(client.get(address(BY_NAME["bulk_write"])))

    assert "q1999 1 / 2 1 0 q0000 2 / 2 5 0" in shown
    assert "q0018 2 / 2 5 0 1,980 more queues" in shown


def test_preview_of_write_to_many_queues_reads_few_pages(client, on_redis, monkeypatch):
    many = {f"q{number:04}": QueueShare(1, 1, 1, 0, ended=True) for number in range(2_000)}
    on_redis.keep(report(WRITE, state=DONE, shares=many))
    Queue("q1999").enqueue(1, id="last", tags=(TAG,))
    Queue("q1998").enqueue(1, id="failed", tags=(TAG,))
    fail("failed", queue="q1998")
    reads, calls = get_storage().reads, []
    for name in ("cursor_page", "dead_letter_page"):
        read = getattr(reads, name)
        monkeypatch.setattr(
            reads, name, lambda *args, _read=read, **kw: calls.append(args) or _read(*args, **kw)
        )

    for page in ("bulk_write_cancel", "bulk_write_retry"):
        calls.clear()
        response = client.get(address(BY_NAME[page]))
        shown = text(response)
        assert "1+ matching" in shown
        assert "Counts cover only some of the queues" in shown
        assert "q0019 +1,980" in shown
        assert response.context["can_begin"]
        assert len(calls) == bulkwrites.PREVIEW_CALLS


class At:
    def __init__(self, now):
        self.now = lambda: now


def test_page_shows_every_detail_of_bulk_write(client, kept):
    said = {"state": UNFINISHED, "error": "StorageError: away <b>", "resumed": "w0", "skipped": True}
    kept.keep(
        report(
            WRITE,
            app="nightly",
            version=20261122,
            shares={"emails": QueueShare(4, 1, 1_000, 7), "images": QueueShare(0, 0, 3, 0, ended=True)},
            names=("shop.send", "shop.bill"),
            rows=1_012,
            rejected={"payload": 2},
            parts=3,
            batches=5,
            spark="app-2026",
            user="ann",
            **said,
        )
    )

    response = client.get(address(BY_NAME["bulk_write"]))

    shown = text(response)
    for words in (
        "StorageError: away &lt;b&gt;",
        "this version was already published",
        "Resumed an earlier write of this version: w0",
        "payload 2",
        "emails 1 / 4",
        "images ✔ 3 0",
        "Details Application nightly Version 20261122 Batches 5 Name write-1",
        f"Job tag {TAG}",
        "shop.send, shop.bill",
        "Spark application app-2026 User ann",
    ):
        assert words in shown, words


def test_bulk_retry_shows_counts_by_result(client, kept):
    seeded(kept)
    kept.keep(
        report(
            "w2",
            state=DONE,
            operation="retry",
            answers={"retried": 7, "not_failed": 3},
            shares={"emails": QueueShare(ended=True, dead_letters=4)},
            rows=12,
            rejected={"id": 2},
        )
    )

    response = client.get(address(BY_NAME["bulk_write"]).replace(WRITE, "w2"))

    shown = text(response)
    assert "12 rows 7 retried 3 not_failed 2 rejected 4 dead letters among them" in shown
    assert "Job states" not in shown
    assert "/cancel/" not in response.content.decode()
    assert "Operation retry" in shown


def test_page_counts_only_jobs_of_the_bulk_write(client, kept):
    seeded(kept)

    response = client.get(address(BY_NAME["bulk_write"]))

    assert "5 waiting 1 delayed 0 blocked 0 active 0 completed 0 failed 0 cancelled" in text(response)
    assert "these queues only" not in text(response)
    lists = f"tag={TAG.replace(':', '%3A')}" in response.content.decode()
    assert lists is bool(jobsearch.states_with_rows(get_storage()))


def test_jobs_are_counted_before_the_mirror_has_them(client, on_redis, settings):
    storage = settings.DJQUEUE["STORAGE"]
    settings.DJQUEUE = {"STORAGE": {**storage, "OPTIONS": {**storage["OPTIONS"], "mirror": True}}}
    seeded(get_storage().capabilities.bulk_writes)

    assert "5 waiting 1 delayed 0 blocked" in text(client.get(address(BY_NAME["bulk_write"])))


def test_page_shows_how_many_jobs_have_finished(client, on_redis):
    seeded(on_redis)
    fail("i0")
    claim("emails")

    shown = text(client.get(address(BY_NAME["bulk_write"])))

    assert "1 of 6 finished" in shown
    assert "3 waiting 1 delayed 0 blocked 1 active 0 completed 1 failed 0 cancelled" in shown


def test_counts_cover_a_limited_sample_and_the_page_says_so(client, kept, monkeypatch):
    seeded(kept)
    monkeypatch.setattr(bulkwrites, "SAMPLE_SIZE", 4)
    monkeypatch.setattr(bulkwrites, "MIN_SAMPLE", 2)

    shown = text(client.get(address(BY_NAME["bulk_write"])))

    assert "Counts cover the newest 4 jobs of these queues only." in shown


def test_unknown_bulk_write_is_not_found(client, kept):
    for name in ("bulk_write", "bulk_write_cancel", "bulk_write_retry"):
        response = client.get(address(BY_NAME[name]))
        assert response.status_code == 404
        assert "Bulk write not found" in text(response)
    for name in BEGIN:
        assert client.post(address(BY_NAME[name])).status_code == 404
    assert not BulkOperation.objects.exists()


# Queues that the user does not see.


def test_bulk_writes_to_hidden_queues_are_hidden(client, kept, settings):
    kept.keep(report(WRITE, app="secret-app", shares={"emails": QueueShare(), "images": QueueShare()}))
    kept.keep(report("w2", app="open-app", shares={"images": QueueShare()}))
    kept.keep(report("w3", app="nameless-app", state=FAILED))
    hiding(settings)

    shown = text(client.get(address(BY_NAME["bulk_writes"])))

    assert "open-app" in shown
    assert "secret-app" not in shown
    assert "nameless-app" not in shown
    for name in ("bulk_write", "bulk_write_cancel", "bulk_write_retry"):
        assert client.get(address(BY_NAME[name])).status_code == 404


def test_pages_of_the_list_are_full_of_visible_bulk_writes(client, kept, settings, monkeypatch):
    monkeypatch.setattr(bulkwrites, "REPORTS_LISTED", 2)
    for number in range(7):
        kept.keep(report(f"w{number}", shares={"images" if number % 2 == 0 else "emails": QueueShare()}))
    hiding(settings)
    seen, after = [], ""
    for _page in range(2):
        response = client.get(
            address(BY_NAME["bulk_writes"], after=after) if after else address(BY_NAME["bulk_writes"])
        )
        assert len(response.context["rows"]) == 2
        seen += [row.report.write for row in response.context["rows"]]
        after = seen[-1]
        older = response.context["older"]
        assert bool(older) is (len(seen) < 4)
    assert sorted(seen) == ["w0", "w2", "w4", "w6"]
    for write in ("w1", "unknown"):
        response = client.get(address(BY_NAME["bulk_writes"], after=write))
        assert (response.context["rows"], response.context["older"]) == ([], "")


@pytest.mark.parametrize("page", BEGIN)
def test_action_on_hidden_bulk_write_is_refused_and_logged(client, kept, settings, page):
    seeded(kept)
    hiding(settings)

    assert client.post(address(BY_NAME[page])).status_code == 404

    assert not BulkOperation.objects.exists()
    event = AuditEvent.objects.get()
    assert (event.action, event.refused, event.detail) == (page, True, {"write": WRITE, "queues": ["emails"]})
    assert client.get(address(BY_NAME["history"])).context["entries"] == []


# What is done.


def test_cancel_selects_only_remaining_jobs_of_the_bulk_write(client, kept):
    seeded(kept)
    assert (
        address(BY_NAME["bulk_write_cancel"]) in client.get(address(BY_NAME["bulk_write"])).content.decode()
    )
    preview = client.get(address(BY_NAME["bulk_write_cancel"]))
    assert "<strong>6</strong>" in preview.content.decode()
    assert not BulkOperation.objects.exists()

    response = client.post(address(BY_NAME["bulk_write_cancel_begin"]), {"expected": "6", "rate": "900"})

    row = BulkOperation.objects.get()
    assert response["Location"].endswith(f"/history/operations/{row.pk}/")
    assert (row.kind, row.rate, row.expected) == (BulkKind.CANCEL, 900, 6)
    assert (row.filter["tag"], row.filter["queues"]) == (TAG, ["emails"])
    event = AuditEvent.objects.get()
    assert (event.action, event.count, event.refused) == ("bulk_write_cancel_begin", 6, False)
    assert event.detail["write"] == WRITE
    assert TAG in text(client.get(response["Location"]))


def test_workers_run_the_cancel_and_retry_of_bulk_write(client, on_redis):
    storage = get_storage()
    seeded(on_redis)
    for job_id in ("i0", "i1"):
        fail(job_id)
    Queue("emails").enqueue(1, id="dead", tags=("import:another",), priority=9)
    fail("dead")

    client.post(address(BY_NAME["bulk_write_cancel_begin"]))
    assert bulk.Bulk(storage, "default").work() == 4
    ids = [f"i{number}" for number in range(6)]
    assert storage.reads.states("emails", ids) == [State.FAILED] * 2 + [State.CANCELLED] * 4
    assert "<strong>2</strong>" in client.get(address(BY_NAME["bulk_write_retry"])).content.decode()

    client.post(address(BY_NAME["bulk_write_retry_begin"]))
    assert bulk.Bulk(storage, "default").work() == 2
    assert storage.reads.states("emails", ids[:2]) == [State.WAITING] * 2
    assert storage.reads.states("emails", ["dead", "other"]) == [State.FAILED, State.WAITING]
    assert {row.state for row in BulkOperation.objects.all()} == {BulkState.DONE}


def test_finished_bulk_write_offers_no_actions(client, kept):
    kept.keep(report(WRITE, state=DONE, shares={"emails": QueueShare(1, 1, 1, 0, ended=True)}))

    html = client.get(address(BY_NAME["bulk_write"])).content.decode()
    assert address(BY_NAME["bulk_write_cancel"]) not in html
    assert address(BY_NAME["bulk_write_retry"]) not in html
    assert "No jobs are pending." in text(client.get(address(BY_NAME["bulk_write_cancel"])))
    assert "None of these jobs has failed." in text(client.get(address(BY_NAME["bulk_write_retry"])))


@pytest.mark.parametrize(
    ("page", "right"), [("bulk_write_cancel", rights.CANCEL), ("bulk_write_retry", rights.DEAD_LETTERS)]
)
def test_action_without_permission_is_not_offered_and_refused(kept, page, right):
    seeded(kept)
    client = logged_in(one_without(right))

    assert address(BY_NAME[page]) not in client.get(address(BY_NAME["bulk_write"])).content.decode()
    assert client.get(address(BY_NAME[page])).status_code == 403
    assert client.post(address(BY_NAME[f"{page}_begin"])).status_code == 403


def test_invalid_rate_is_rejected_with_the_form(client, kept):
    seeded(kept)

    response = client.post(address(BY_NAME["bulk_write_cancel_begin"]), {"rate": "-1"})

    assert response.status_code == 400
    assert "errorlist" in response.content.decode()
    assert not BulkOperation.objects.exists()


def test_preview_warns_that_bulk_write_is_still_publishing(client, kept):
    seeded(kept)
    assert kept.get(WRITE).state == PUBLISHING

    assert "still publishing jobs" in text(client.get(address(BY_NAME["bulk_write_cancel"])))


def test_preview_of_large_queue_counts_only_the_first_jobs(client, on_redis):
    storage = get_storage()
    on_redis.keep(report(WRITE, shares={"emails": QueueShare(1)}))
    for _ in range(11):
        storage.enqueue([batch(1_000, queue="emails")])

    shown = text(client.get(address(BY_NAME["bulk_write_cancel"])))

    assert "0 +" in shown or "0+" in shown
    assert "Counts cover the first" in shown  # 10,000 jobs, or fewer if the server is busy
    assert "Cancel jobs" in shown

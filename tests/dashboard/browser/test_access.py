"""Every page for everybody: in light and dark, wide and narrow, and without scripts."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from djqueue import Queue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import RunningJob
from djqueue.models import BulkKind, BulkOperation, CronJob
from djqueue.operations import bulk
from djqueue.storage.bulkwrites import DONE, UNFINISHED, QueueShare, tag_of
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.database.bulkwrites import DatabaseBulkWriteReports
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.contract.bulk_writes import report
from djqueue.testing.factories import worker
from tests.admin.factories import NOON
from tests.dashboard.acting import fail
from tests.dashboard.visiting import CAPTURED, PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

AXE = Path(__file__).parents[1] / "vendor" / "axe-core-4.14.1" / "axe-core-4.14.1.min.js"
DOWNLOADS = {"dead_letters_export", "metrics_export", "stream", "queue_stream"}
SHOWN = [
    pytest.param(page, id=page.name) for page in PAGES if page.method == "GET" and page.name not in DOWNLOADS
]
MIRRORED = """() => {
  const first = document.querySelector(".djq-tabs li").getBoundingClientRect();
  const status = document.querySelector(".djq-status")?.getBoundingClientRect();
  return first.left > innerWidth / 2 && (!status || status.right < innerWidth / 2);
}"""
OURS = "() => axe.run({include: [['#djq']]}, {resultTypes: ['violations']})"


def looks():
    """Every page as it may look. The ordinary tests see each page in one of its looks, by turns."""
    every = [("light", 1280), ("dark", 1280), ("light", 390)]
    for number, page in enumerate(SHOWN):
        for turn, (scheme, width) in enumerate(every):
            marks = () if turn == number % len(every) else pytest.mark.thorough
            yield pytest.param(*page.values, scheme, width, id=f"{page.id}-{scheme}-{width}", marks=marks)


def every_third(first):
    """Every page. The ordinary tests see one page of three."""
    for number, page in enumerate(SHOWN):
        marks = () if number % 3 == first else pytest.mark.thorough
        yield pytest.param(*page.values, id=page.id, marks=marks)


@lru_cache
def axe() -> str:
    return AXE.read_text()


def tell_of_a_worker(storage):
    """One with everything that its page shows, and another of an older version."""
    now = storage.engine.clock.now()
    running = (RunningJob("emails", "job-1", "shop.jobs.send_receipt", now - 90_000),)
    about = {"kind": "runworkers", "heartbeat": 5_000, "rss": 123_000_000, "version": "0.5"}
    older = {**about, "host": "web-1", "concurrency": 10, "started_at": now - 9_000_000, "project": "2026.10"}
    newer = {**about, "started_at": now - 60_000, "project": "2026.11", "queues": ("emails", "images")}
    storage.workers.register(worker(CAPTURED["worker"], active=2, jobs=running, **older))
    storage.workers.register(worker("w2:12346:a1b2c3", host="web-2", state="quiet", concurrency=4, **newer))
    storage.workers.save_dump(CAPTURED["worker"], FRAMES)


def tell_of_imports(monkeypatch):
    """Two reports of bulk writes, in the tables though the jobs are in memory; and jobs of the first."""
    kept = DatabaseBulkWriteReports("default", SYSTEM_CLOCK)
    monkeypatch.setattr(MemoryStorage, "capabilities", Capabilities(in_process=True, bulk_writes=kept))
    write, now = CAPTURED["write"], SYSTEM_CLOCK.now()
    kept.keep(
        report(
            write,
            app="nightly-receipts-of-all-shops",
            shares={"emails": QueueShare(12, 5, 5_000, 21), "reports-of-the-quarter": QueueShare(4, 0)},
            names=("shop.jobs.send_receipt",),
            rows=16_021,
            rejected={"payload": 3, "priority": 1},
            state=UNFINISHED,
            error="StorageUnavailableError: redis at localhost:6379/0 does not answer: Connection refused.",
            started_at=now,
            spark="app-20261122085501-0001",
            user="ann",
        )
    )
    kept.keep(
        report("w2", app="weekly", state=DONE, shares={"q": QueueShare(1, 1, 9)}, rows=9, started_at=now)
    )
    queue = Queue("emails")
    queue.enqueue(1, id="imported", tags=(tag_of(write),), priority=9)
    fail("imported")
    queue.enqueue_many(range(5), tags=(tag_of(write),))


FRAMES = """Worker w1, process 12345, running, at 2026-11-22T05:00:00+00:00
djqueue 0.5, Python 3.13.0
2 of 10 slots in use

Thread djqueue-job_0
  File "/srv/shop/shop/jobs.py", line 12, in send_receipt
    answer = smtp.send(message_of(order), timeout=seconds_that_the_partner_has, retries=number_of_retries)
"""


@pytest.fixture
def jobs(memory, monkeypatch):
    """Jobs to look at."""
    tell_of_imports(monkeypatch)
    queue = Queue("emails")
    queue.enqueue({"to": "ann@example.com"}, id="job-1")
    queue.enqueue_many(range(5))
    tell_of_a_worker(queue.storage)
    schedule = CronJob(pk=CAPTURED["pk"], name="night", job_name="emails", schedule="0 * * * *")
    schedule.save(force_insert=True)
    CronJob.objects.update(next_run_at=NOON)  # it is late
    Queue("images").enqueue(1, id="bad")
    fail("bad", queue="images")
    begun = bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), expected=3)
    BulkOperation.objects.filter(pk=begun.pk).update(id=CAPTURED["pk"])
    return queue


@pytest.mark.parametrize(("page", "scheme", "width"), list(looks()))
def test_axe_finds_nothing(page, scheme, width, open_page, jobs):
    window = open_page(address(page), scheme=scheme, width=width)
    window.wait_for_function("window.htmx !== undefined")
    window.evaluate(axe())
    found: Any = window.evaluate(OURS)
    assert [
        (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found["violations"]
    ] == []
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


@pytest.mark.parametrize("page", list(every_third(0)))
def test_a_page_can_be_read_without_scripts(page, open_page, jobs):
    window = open_page(address(page), scripts=False)
    expect(window.locator("#djq-live")).to_be_visible()
    assert window.locator("#djq-live").inner_text().strip()


@pytest.mark.parametrize("page", list(every_third(1)))
def test_a_page_from_right_to_left_is_mirrored_and_scrolls_no_more_than_others(
    page, open_page, jobs, settings
):
    settings.LANGUAGE_CODE = "ar"
    window = open_page(address(page))
    assert window.evaluate("document.documentElement.dir") == "rtl"
    assert window.evaluate(MIRRORED)
    for width in (1280, 390):
        window.set_viewport_size({"width": width, "height": 900})
        assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), width

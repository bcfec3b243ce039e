"""Accessibility of every page: light and dark, wide and narrow, right to left, and without scripts."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from djqueue import Queue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.workers import RunningJob
from djqueue.models import BulkKind, BulkOperation, CronJob
from djqueue.operations import bulk
from djqueue.storage.bulkwrites import DONE, UNFINISHED, QueueShare, tag_of
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.database.bulkwrites import SqlBulkWriteReports
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.contract.bulk_writes import report
from djqueue.testing.factories import worker
from tests.admin.factories import NOON
from tests.dashboard.acting import add_error, fail
from tests.dashboard.visiting import CAPTURED, PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

AXE = Path(__file__).parents[1] / "vendor" / "axe-core-4.14.1" / "axe-core-4.14.1.min.js"
DOWNLOADS = {"errors_export", "job_types_export", "stream", "queue_stream"}
SHOWN = [page for page in PAGES if page.method == "GET" and page.name not in DOWNLOADS]
MIRRORED = """() => {
  const first = document.querySelector(".djq-tabs li").getBoundingClientRect();
  const status = document.querySelector(".djq-status")?.getBoundingClientRect();
  return first.left > innerWidth / 2 && (!status || status.right < innerWidth / 2);
}"""
OURS = "() => axe.run({include: [['#djq']]}, {resultTypes: ['violations']})"


GROUPS = [SHOWN[start : start + 4] for start in range(0, len(SHOWN), 4)]
"""Pages that a test opens in one window, one after the other."""
LOOKS = [("light", 1280), ("dark", 1280), ("light", 390)]


def group_id(pages):
    return "+".join(page.name for page in pages)


def looks():
    """Yield every group of pages in every look. Ordinary tests see each group in one look, by turns."""
    for number, pages in enumerate(GROUPS):
        for turn, (scheme, width) in enumerate(LOOKS):
            marks = () if turn == number % len(LOOKS) else pytest.mark.thorough
            yield pytest.param(pages, scheme, width, id=f"{group_id(pages)}-{scheme}-{width}", marks=marks)


def every_third(first):
    """Yield every group of pages. Ordinary tests see one of three."""
    for number, pages in enumerate(GROUPS):
        marks = () if number % 3 == first else pytest.mark.thorough
        yield pytest.param(pages, id=group_id(pages), marks=marks)


@lru_cache
def axe() -> str:
    return AXE.read_text()


def register_workers(storage):
    """Register a worker with everything that its page shows, and another one of a newer project."""
    now = storage.engine.clock.now()
    running = (RunningJob("emails", "job-1", "shop.jobs.send_receipt", now - 90_000),)
    about = {"kind": "runworkers", "heartbeat": 5_000, "rss": 123_000_000, "version": "0.5"}
    older = {**about, "host": "web-1", "concurrency": 10, "started_at": now - 9_000_000, "project": "2026.10"}
    newer = {**about, "started_at": now - 60_000, "project": "2026.11", "queues": ("emails", "images")}
    storage.workers.register(worker(CAPTURED["worker"], active=2, jobs=running, **older))
    storage.workers.register(worker("w2:12346:a1b2c3", host="web-2", state="quiet", concurrency=4, **newer))
    storage.workers.save_dump(CAPTURED["worker"], FRAMES)


def keep_bulk_writes(monkeypatch):
    """Keep two reports of bulk writes in the tables, though jobs are in memory; enqueue jobs of the first."""
    kept = SqlBulkWriteReports("default", SYSTEM_CLOCK)
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
    """Enqueue jobs, register workers and keep what else the pages show."""
    keep_bulk_writes(monkeypatch)
    queue = Queue("emails")
    queue.enqueue({"to": "ann@example.com"}, id="job-1")
    queue.enqueue_many(range(5))
    register_workers(queue.storage)
    schedule = CronJob(pk=CAPTURED["pk"], name="night", job_name="emails", schedule="0 * * * *")
    schedule.save(force_insert=True)
    CronJob.objects.update(next_run_at=NOON)  # it is late
    Queue("images").enqueue(1, id="bad")
    fail("bad", queue="images")
    add_error()
    begun = bulk.begin("default", BulkKind.RETRY, bulk.Selection(("emails",)), expected=3)
    BulkOperation.objects.filter(pk=begun.pk).update(id=CAPTURED["pk"])
    return queue


def violations(window) -> list[Any]:
    """Return what axe finds on an open page."""
    window.evaluate(axe())
    found: Any = window.evaluate(OURS)
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]


def scrolls_sideways(window) -> bool:
    return not window.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("pages", "scheme", "width"), list(looks()))
def test_pages_are_accessible_and_fit_the_window(pages, scheme, width, open_page, jobs):
    window, found = None, {}
    for page in pages:
        window = open_page(address(page), scheme=scheme, width=width, beside=window)
        window.wait_for_function("window.htmx !== undefined")
        found[page.name] = (violations(window), scrolls_sideways(window))
    assert found == dict.fromkeys(found, ([], False))


@pytest.mark.parametrize("pages", list(every_third(0)))
def test_pages_are_readable_without_scripts(pages, open_page, jobs):
    window = None
    for page in pages:
        window = open_page(address(page), scripts=False, beside=window)
        expect(window.locator("#djq-live")).to_be_visible()
        assert window.locator("#djq-live").inner_text().strip(), page.name


@pytest.mark.parametrize("pages", list(every_third(1)))
def test_pages_in_right_to_left_language_are_mirrored_and_fit_the_window(pages, open_page, jobs, settings):
    settings.LANGUAGE_CODE = "ar"
    window = None
    for page in pages:
        window = open_page(address(page), beside=window)
        assert window.evaluate("document.documentElement.dir") == "rtl", page.name
        assert window.evaluate(MIRRORED), page.name
        for width in (1280, 390):
            window.set_viewport_size({"width": width, "height": 900})
            assert not scrolls_sideways(window), (page.name, width)

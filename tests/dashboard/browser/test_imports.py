"""Bulk imports for everybody: as all pages are, with imports to see, and without scripts."""

import pytest
from playwright.sync_api import expect

from djqueue import Queue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.storage.database.imports import DatabaseImports
from djqueue.storage.imports import DONE, UNFINISHED, Share, tag_of
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.contract.imports import report
from tests.dashboard.acting import fail
from tests.dashboard.browser.test_access import OURS, axe
from tests.dashboard.visiting import CAPTURED, PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

WRITE = CAPTURED["write"]
IMPORTS = [page for page in PAGES if page.method == "GET" and page.name.startswith("import")]
BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def imports(memory, monkeypatch):
    """Reports in the tables, of jobs in memory."""
    kept = DatabaseImports("default", SYSTEM_CLOCK)
    monkeypatch.setattr(MemoryStorage, "imports", kept)
    now = SYSTEM_CLOCK.now()
    kept.keep(
        report(
            WRITE,
            app="nightly-receipts-of-all-shops",
            shares={"emails": Share(12, 5, 5_000, 21), "reports-of-the-quarter": Share(4, 0)},
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
    kept.keep(report("w2", app="weekly", state=DONE, shares={"q": Share(1, 1, 9)}, rows=9, started_at=now))
    queue = Queue("emails")
    queue.enqueue(1, id="bad", tags=(tag_of(WRITE),))
    fail("bad")
    queue.enqueue_many(range(5), tags=(tag_of(WRITE),))
    return kept


@pytest.mark.parametrize("page", IMPORTS, ids=lambda page: page.name)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_nothing(page, scheme, width, open_page, imports):
    window = open_page(address(page), scheme=scheme, width=width)
    window.wait_for_function("window.htmx !== undefined")
    window.evaluate(axe())
    found = window.evaluate(OURS)
    assert [
        (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found["violations"]
    ] == []
    assert window.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


def test_the_rest_of_an_import_is_cancelled_without_scripts(open_page, imports):
    window = open_page(address(BY_NAME["operations"]), scripts=False)
    window.get_by_role("link", name="Bulk imports").click()
    window.get_by_role("link", name="nightly-receipts-of-all-shops").click()
    expect(window.locator("#djq-live")).to_contain_text("1 of 6 have ended")
    window.get_by_role("link", name="Cancel the rest…").click()
    window.get_by_role("button", name="Cancel them").click()

    expect(window.locator("body")).to_contain_text("It has begun, and is done by the workers.")
    expect(window.locator("#djq-live")).to_contain_text(tag_of(WRITE))

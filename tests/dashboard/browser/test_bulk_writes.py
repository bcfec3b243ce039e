"""Bulk writes in the browser, without scripts."""

import pytest
from playwright.sync_api import expect

from djqueue.storage.bulkwrites import tag_of
from tests.dashboard.browser.test_access import keep_bulk_writes
from tests.dashboard.visiting import CAPTURED, PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}


def test_remaining_jobs_of_bulk_write_are_cancelled_without_scripts(open_page, monkeypatch):
    keep_bulk_writes(monkeypatch)
    window = open_page(address(BY_NAME["operations"]), scripts=False)
    window.get_by_role("link", name="Bulk writes").click()
    window.get_by_role("link", name="nightly-receipts-of-all-shops").click()
    expect(window.locator("#djq-live")).to_contain_text("1 of 6 finished")
    window.get_by_role("link", name="Cancel remaining jobs…").click()
    window.get_by_role("button", name="Cancel jobs").click()

    expect(window.locator("body")).to_contain_text("Bulk operation started.")
    expect(window.locator("#djq-live")).to_contain_text(tag_of(CAPTURED["write"]))

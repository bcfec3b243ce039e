"""Controlling a worker in the browser, with and without scripts."""

import pytest
from playwright.sync_api import expect

from djqueue.client import get_storage
from djqueue.dashboard.reading import read_cache
from djqueue.testing.factories import worker
from tests.dashboard.browser.test_access import violations
from tests.dashboard.visiting import PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}


@pytest.mark.parametrize("scripts", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_worker_is_quieted_and_stopped_after_confirmation(open_page, scripts):
    storage = get_storage()
    storage.workers.register(worker("w1", host="web-1", heartbeat=5_000))
    page = open_page(address(BY_NAME["workers"]), scripts=scripts)
    page.get_by_role("button", name="Quiet").click()
    expect(page.locator(".messagelist")).to_contain_text("to stop claiming jobs")
    assert storage.workers.register(worker("w1", host="web-1", state="quiet")) == ("quiet",)
    read_cache.clear()

    page.goto(address(BY_NAME["workers"]))
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Stop…").click()
    expect(page.locator("#djq")).to_contain_text("The worker has no active jobs.")
    assert storage.workers.register(worker("w1", host="web-1", state="quiet")) == ()
    if scripts:
        assert violations(page) == []

    page.get_by_role("button", name="Stop worker").click()
    expect(page.locator(".messagelist")).to_contain_text("to stop.")
    assert page.url.endswith(address(BY_NAME["workers"]))
    assert storage.workers.register(worker("w1", host="web-1", state="quiet")) == ("stop",)


def test_stack_dump_appears_on_open_page(open_page):
    storage = get_storage()
    storage.workers.register(worker("w1"))
    page = open_page(address(BY_NAME["worker"]))
    page.get_by_role("button", name="Dump stacks").click()
    expect(page.locator(".messagelist")).to_contain_text("Requested a stack dump")
    assert storage.workers.register(worker("w1")) == ("dump",)
    storage.workers.save_dump("w1", 'File "shop/jobs.py", line 3, in send')
    page.wait_for_function("window.htmx !== undefined")
    page.keyboard.press("r")
    expect(page.locator("#djq-live")).to_contain_text("line 3, in send")

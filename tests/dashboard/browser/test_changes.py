"""Editing, retrying, deleting and rescheduling a job in the browser, with and without scripts."""

import pytest
from playwright.sync_api import expect

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.testing.factories import a_failed_job
from tests.dashboard.visiting import PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BY_NAME = {page.name: page for page in PAGES}
SCRIPTS = pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
SCRIPTS_FIRST = pytest.mark.parametrize(
    "scripts", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["scripts", "no scripts"]
)


@job(name="tests.changes.mail", queue="emails")
def mail(to, *, password=None):
    """Registered, so that its arguments can be checked."""


@SCRIPTS
def test_failed_job_is_edited_and_retried(open_page, scripts):
    storage = get_storage()
    Queue("emails").enqueue({"args": ["ann"], "kwargs": {"password": "hunter2"}}, id="other")
    payload = storage.reads.jobs("emails", ["other"])[0].payload
    storage.jobs.remove("emails", ["other"])
    a_failed_job(storage, queue="emails", id="job-1", name="tests.changes.mail", payload=payload)

    page = open_page(address(BY_NAME["job"]), scripts=scripts)
    page.get_by_role("link", name="Edit and retry").click()
    box = page.get_by_label("Positional arguments")
    expect(box).to_have_value('[\n  "ann"\n]')
    box.fill('["bob", 1, 2]')
    page.get_by_role("button", name="Retry with these arguments").click()
    expect(page.locator(".errorlist")).to_contain_text("does not accept these arguments")

    page.get_by_label("Positional arguments").fill('["bob"]')
    page.get_by_role("button", name="Retry with these arguments").click()
    expect(page.locator(".messagelist")).to_contain_text("The job will be retried with the new arguments")
    versions = page.locator(".djq-versions details")
    versions.locator("summary").click()
    expect(versions).to_contain_text("'ann'")
    assert "hunter2" not in page.content()
    info = Queue("emails").get_job("job-1")
    assert info.state is State.WAITING
    assert info.payload == {"args": ["bob"], "kwargs": {"password": "hunter2"}}


@SCRIPTS_FIRST
def test_deletion_is_undone(open_page, scripts):
    Queue("emails").enqueue(1, id="job-1")
    page = open_page(address(BY_NAME["job"]), scripts=scripts)
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".messagelist")).to_contain_text("The job will be deleted in 30 seconds")
    expect(page.locator(".djq-deletion")).to_contain_text("The job may start until then")
    page.locator(".messagelist").get_by_role("button", name="Undo").click()
    expect(page.locator(".messagelist")).to_contain_text("Undone. No jobs were deleted.")
    expect(page.locator(".djq-deletion")).to_have_count(0)


@SCRIPTS_FIRST
def test_deletion_of_selected_dead_letters_is_undone(open_page, scripts):
    for number in range(2):
        a_failed_job(get_storage(), queue="emails", id=f"job-{number}")
    page = open_page(address(BY_NAME["errors"]), scripts=scripts)
    page.get_by_label("Select job-1").check()
    page.get_by_role("button", name="Delete selected").click()
    expect(page.locator(".messagelist")).to_contain_text("1 dead letter of emails will be deleted")
    expect(page.get_by_text("deletion pending", exact=True)).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("deletion pending", exact=True)).to_have_count(0)


def test_job_is_rescheduled(open_page):
    Queue("emails").enqueue(1, id="job-1")
    page = open_page(address(BY_NAME["job"]))
    page.get_by_label("Run at").fill("2035-06-01T12:00:07")
    page.get_by_role("button", name="Reschedule").click()
    expect(page.locator(".messagelist")).to_contain_text("Rescheduled to 2035-06-01 12:00:07")
    expect(page.get_by_label("Run at")).to_have_value("2035-06-01T12:00:07")

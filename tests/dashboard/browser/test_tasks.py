"""The twelve tasks of an operator, each within its budget of clicks from Status."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.core.workers import RunningJob
from djqueue.dashboard.reading import read_cache
from djqueue.models import Annotation, CronJob
from djqueue.testing.factories import worker
from tests.dashboard.acting import claim, complete, fail
from tests.dashboard.visiting import PAGES, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

STATUS = address(next(page for page in PAGES if page.name == "status"))


@job(name="tests.tasks.send", queue="emails")
def send(order_id):
    """Registered, so that its parameters have names."""


class Operator:
    """A person at Status, whose clicks are counted."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0
        page.wait_for_function("window.htmx !== undefined")

    def click(self, target: Locator) -> None:
        target.click()
        self.clicks += 1

    def follow(self, name: str, within: str = "#djq") -> None:
        self.click(self.page.locator(within).get_by_role("link", name=name).first)

    def press(self, name: str, within: str = "#djq") -> None:
        self.click(self.page.locator(within).get_by_role("button", name=name).first)

    def search(self, text: str) -> None:
        """Open the palette by keyboard and type."""
        self.page.keyboard.press("Control+k")
        self.page.locator("#djq-palette input").fill(text)

    def sees(self, text: str | re.Pattern[str], within: str = "#djq-live") -> None:
        expect(self.page.locator(within)).to_contain_text(text)


@pytest.fixture
def night(settings: Any, memory: None) -> None:
    """Failed jobs new since a deploy, a backlog without a worker, a stuck job, a late schedule."""
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"},
    }
    queue, storage = Queue("emails"), get_storage()
    queue.enqueue({"args": [5], "kwargs": {}}, name="tests.tasks.send", id="early")
    complete("early", names=["tests.tasks.send"])
    Annotation.objects.create(at=to_datetime(1), label="v1", follows=0)
    Annotation.objects.create(at=to_datetime(SYSTEM_CLOCK.now()), label="v2", follows=1)
    queue.enqueue(1, id="broken")
    fail("broken")
    queue.enqueue({"args": [7], "kwargs": {}}, name="tests.tasks.send", id="order-7", tags=("acme",))
    queue.enqueue({"args": [8], "kwargs": {}}, name="tests.tasks.send", id="order-8", tags=("acme",))
    Queue("images").enqueue(1, name="shop.jobs.resize", id="pixel")
    claim("images", ["shop.jobs.resize"])
    now = SYSTEM_CLOCK.now()
    stuck = RunningJob("images", "pixel", "shop.jobs.resize", now - 9 * 3_600_000)
    storage.workers.register(
        worker("w1", host="web-1", heartbeat=600_000, queues=("images",), active=1, jobs=(stuck,))
    )
    CronJob(pk=1, name="night run", job_name="tests.tasks.send", schedule="0 4 * * *", queue="emails").save(
        force_insert=True
    )
    read_cache.clear()


@pytest.fixture
def operator(open_page: Any, night: None) -> Operator:
    return Operator(open_page(STATUS))


def test_is_anything_wrong_takes_no_click(operator):
    operator.sees(re.compile(r"\d problems"), ".djq-verdict")
    operator.sees("Queue emails has no worker.")
    assert operator.clicks == 0


def test_why_a_job_is_not_running_takes_two_clicks(operator):
    operator.follow("Waiting", ".djq-facts")
    operator.follow("tests.tasks.send")
    operator.sees("Why this job is not running")
    assert operator.clicks <= 2


def test_what_failed_since_which_deploy_takes_one_click(operator):
    operator.sees("New since the deploy: NoAddressError: no address")
    operator.follow("NoAddressError", ".djq-problem")
    operator.sees("Failed attempts per hour")
    operator.sees(re.compile(r"Failed jobs\s*1"))
    assert operator.clicks <= 1


def test_retrying_one_kind_of_failure_takes_three_clicks(operator):
    operator.follow("Retry…", ".djq-problem")
    operator.press("Retry")
    expect(operator.page.locator("#djq-live")).to_contain_text("emails")
    assert operator.page.url.endswith("/history/operations/1/") or "operations" in operator.page.url
    assert operator.clicks <= 3


def test_stopping_one_job_type_takes_two_clicks(operator):
    operator.search("hold tasks.send")
    operator.press("Hold tests.tasks.send in emails", "#djq-palette")
    operator.sees("Held tests.tasks.send in emails.", ".messagelist")
    assert claim("emails", ["tests.tasks.send"]) == []
    assert operator.clicks <= 2


def test_stopping_a_queue_takes_two_clicks(operator):
    operator.search("pause emails")
    operator.press("Pause queue emails", "#djq-palette")
    operator.sees("Paused", ".messagelist")
    assert Queue("emails").is_paused()
    assert operator.clicks <= 2


def test_enter_in_the_palette_acts_on_nothing(operator):
    operator.search("pause emails")
    operator.page.keyboard.press("Enter")
    button = operator.page.locator("#djq-palette").get_by_role("button", name="Pause queue emails")
    expect(button).to_be_focused()
    assert not Queue("emails").is_paused()


def test_arguments_and_error_of_a_job_take_one_click(operator):
    operator.search("broken")
    operator.follow("broken", "#djq-palette")
    operator.sees("no address")
    operator.sees("Payload")
    assert operator.clicks <= 1


def test_when_the_backlog_is_done_takes_no_click(operator):
    operator.sees("never: no worker")
    assert operator.clicks == 0


def test_which_worker_is_stuck_and_on_what_takes_one_click(operator):
    operator.sees("Job shop.jobs.resize runs for much longer than others.")
    operator.follow("Workers", ".djq-facts")
    operator.sees(re.compile(r"w1.*resize\s+9(\.0)? h", re.DOTALL))
    assert operator.clicks <= 1


def test_running_a_schedule_takes_two_clicks(operator):
    operator.search("run schedule night")
    operator.press("Run schedule night run now", "#djq-palette")
    operator.sees("Enqueued a job for night run.", ".messagelist")
    assert operator.clicks <= 2


def test_finding_jobs_by_argument_takes_two_clicks(operator):
    operator.follow("Jobs", ".djq-tabs")
    operator.page.get_by_label("Argument").fill("order_id:7")
    operator.press("Find")
    expect(operator.page.locator("#djq-live tbody tr")).to_have_count(1)
    operator.sees("order_id=7")
    assert operator.clicks <= 2


def test_acting_on_all_jobs_of_a_tenant_takes_three_clicks(operator):
    operator.follow("Waiting", ".djq-facts")
    operator.page.get_by_label("Tag").fill("acme")
    operator.page.keyboard.press("Enter")
    operator.page.wait_for_url(re.compile("tag=acme"))
    operator.follow("Cancel all matching…")
    operator.press("Cancel jobs")
    assert operator.clicks <= 3
    operator.sees(re.compile(r"Matched\s*2\s.*Tag\s*acme", re.DOTALL))
    assert get_storage().reads.states("emails", ["order-7"]) == [State.WAITING]  # until a worker acts


def test_comparing_p95_before_and_after_the_deploy_takes_two_clicks(operator):
    operator.follow("Job types", ".djq-tabs")
    operator.follow("tests.tasks.send")
    operator.sees("Before and after")
    operator.sees(re.compile(r"before.*after", re.DOTALL))
    assert operator.clicks <= 2

"""The palette: what a text finds, and that it names nothing that a user may not see or do."""

import re
from html import unescape

import pytest

from djqueue import Queue, job
from djqueue.client import get_storage
from djqueue.dashboard import rights
from djqueue.dashboard.reading import read_cache
from djqueue.models import CronJob
from djqueue.testing.factories import worker
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

PAGE = next(page for page in PAGES if page.name == "palette")
SECRET = "payroll"


@job(name="tests.palette.payroll_run", queue=SECRET)
def payroll_run():
    """Registered, so that the palette knows it."""


def hides_payroll(_request, queue):
    return queue != SECRET


@pytest.fixture
def everything():
    """Something of each kind, named like the hidden queue."""
    Queue(SECRET).enqueue(1, id="payroll-1", name="tests.palette.waiting_payroll")
    Queue("emails").enqueue(1, id="mail-1")
    CronJob(pk=1, name="payroll of the month", job_name="emails", schedule="0 4 1 * *", queue=SECRET).save(
        force_insert=True
    )
    get_storage().workers.register(worker("payroll-w1", queues=(SECRET,)))
    read_cache.clear()


def found(client, text, **headers):
    """Return what the palette lists by its headings."""
    html = client.get(address(PAGE, q=text), headers=headers).content.decode()
    html = html[html.index('class="djq-found"') :]
    groups = re.findall(r"<h2>(.*?)</h2>\s*<ul>(.*?)</ul>", html.partition("</div>")[0], re.DOTALL)
    return {
        heading: [
            unescape(re.sub(r"<[^>]+>", "", entry)).strip()
            for entry in re.findall("<li>(.*?)</li>", entries, re.S)
        ]
        for heading, entries in groups
    }


def test_text_finds_queues_job_types_jobs_schedules_workers_and_actions(everything):
    client = logged_in(one_with(*ALL_RIGHTS))
    assert found(client, "payroll", **{"HX-Request": "true"}) == {
        "Queues": ["payroll"],
        "Job types": ["tests.palette.payroll_run", "tests.palette.waiting_payroll"],
        "Schedules": ["payroll of the month emails"],
        "Workers": ["payroll-w1 host"],
        "Actions": [
            "Pause queue payroll",
            "Dump stacks of worker payroll-w1",
            "Run schedule payroll of the month now",
            "Hold tests.palette.payroll_run in payroll",
            "Hold tests.palette.waiting_payroll in payroll",
        ],
    }
    assert found(client, "payroll-1")["Jobs"] == ["payroll-1 payroll, waiting"]
    assert "Cancel payroll-1" in " ".join(found(client, "payroll-1")["Actions"])
    assert found(client, "PAY run")["Actions"] == [
        "Run schedule payroll of the month now",
        "Hold tests.palette.payroll_run in payroll",
    ]
    assert found(client, "")["Pages"][:3] == ["Status", "Jobs", "Job types"]


def test_user_limited_to_queues_learns_nothing_of_others(request, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": hides_payroll}}
    request.getfixturevalue("everything")  # with the filter, as new settings begin with a new storage
    client = logged_in(one_with(*ALL_RIGHTS))
    for text in ("payroll", "payroll-1", "payroll-w1", "payr"):
        assert found(client, text) == {}, text
    assert found(client, "mail")["Queues"] == ["emails"]


def test_only_permitted_actions_and_pages_are_offered(everything):
    client = logged_in(one_with(rights.VIEW))
    assert "Actions" not in found(client, "payroll")
    assert "Actions" not in found(client, "mail-1")
    assert "System" not in found(client, "")["Pages"]
    assert "Actions" in found(logged_in(one_with(rights.VIEW, rights.PAUSE)), "payroll")


def test_names_are_escaped(everything):
    html = logged_in(one_with(rights.VIEW)).get(address(PAGE, q="<script>")).content.decode()
    assert "<script>" not in html[html.index('id="djq-live"') :].partition("djq-bottom")[0]

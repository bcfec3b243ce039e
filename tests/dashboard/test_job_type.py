"""The page of a job type: its numbers before and after a deploy, its runs and errors, and running it."""

import re
from typing import Any

import pytest

from djqueue import Queue, job
from djqueue.client import get_storage, registry
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.metrics import MINUTE, NO_TIMES, RunStats
from djqueue.core.units import to_datetime
from djqueue.core.workers import WorkerInfo
from djqueue.dashboard import boards, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views.jobtype import periods
from djqueue.models import Annotation, AuditEvent, CronJob
from tests.dashboard.acting import complete, fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with, one_without

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


@pytest.fixture
def client() -> Any:
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture
def greet(monkeypatch: Any) -> Any:
    """A job that is registered, with parameters of several kinds."""
    monkeypatch.setattr(registry, "_types", {})

    @job(name="emails", queue="emails")
    def greet(to: str, times: int = 1, *, loud: bool = False, about: dict | None = None, share: float = 1.0):
        """Send a greeting.

        Twice, if it is loud.
        """

    return greet


def shown(client: Any, name: str = "emails", **query: Any) -> Any:
    return client.get(address(BY_NAME["job_type"], **query).replace("emails", name))


def run(client: Any, **given: str) -> Any:
    return client.post(address(BY_NAME["enqueue_now"]), given)


def arguments() -> Any:
    from djqueue.codecs import decode

    [record] = get_storage().reads.page("emails", None, 10)
    return decode(record.payload, record.options.content_type)


def test_page_shows_counts_runs_errors_and_who_knows_the_job(client: Any, greet: Any) -> None:
    queue = Queue("emails")
    queue.enqueue_many([1, 2], ids=["a", "b"])
    complete("a")
    fail("b", "no address of 7")
    storage = get_storage()
    storage.workers.register(WorkerInfo("w1", "host", 7, None, ("emails",), 4, 1))
    schedule = CronJob.objects.create(name="night", job_name="emails", schedule="0 4 * * *")
    storage.workers.record_runs([RunStats("emails", "emails", 1, 0, 1, 0, NO_TIMES, NO_TIMES)])
    storage.sweep()

    response = shown(client)

    whole = response.context["whole"]
    assert (whole.counts.completed, whole.counts.failed, whole.failing) == (1, 1, 50)
    assert {one.id for one in response.context["runs"].latest} == {"a", "b"}
    assert [one.id for one in response.context["workers"]] == ["w1"]
    assert [one.pk for one in response.context["schedules"]] == [schedule.pk]
    assert response.context["queues"] == ["emails"]
    [group] = response.context["groups"]
    assert (group.group.error_type, group.group.attempts) == ("shop.NoAddressError", 1)
    html = response.content.decode()
    assert "Send a greeting." in html
    assert "emails(to: str, times: int = 1, *, loud: bool = False" in html


def test_job_type_is_held_for_a_time_and_released(client: Any, greet: Any) -> None:
    hold, release = (address(BY_NAME[name]) for name in ("hold", "release"))
    queue = Queue("emails")
    queue.enqueue(1, id="a")
    assert f'formaction="{hold}"' in shown(client).content.decode()

    assert client.post(hold, {"hours": "24", "reason": "the provider is down"}).status_code == 302
    [held] = queue.holds()
    assert held.until - held.since == pytest.approx(24 * 60 * MINUTE, abs=MINUTE)
    for page in ("job_type", "queue"):
        html = client.get(address(BY_NAME[page])).content.decode()
        assert "the provider is down" in html
        assert f'formaction="{release}"' in html
    html = client.get(address(BY_NAME["queue"])).content.decode()
    assert "❚❚ jobs held" in html
    assert "never: held" in html
    html = client.get(address(BY_NAME["job"]).replace("job-1", "a")).content.decode()
    assert "Jobs named emails are held in this queue." in html
    assert "Reason: the provider is down" in html
    assert f'formaction="{release}"' in html

    client.post(release)
    assert queue.holds() == []
    assert "The hold has already ended." in client.post(release, follow=True).content.decode()
    assert [(one.action, one.queue) for one in AuditEvent.objects.order_by("pk")] == [
        ("hold", "emails"),
        ("release", "emails"),
    ]
    assert AuditEvent.objects.earliest("pk").detail["reason"] == "the provider is down"
    assert client.post(hold, {"hours": "soon"}).status_code == 400


def test_user_who_may_not_pause_sees_holds_without_buttons(greet: Any) -> None:
    client = logged_in(one_without(rights.PAUSE))
    Queue("emails").enqueue(1)
    Queue("emails").hold("emails", reason="the provider is down")
    for page in ("job_type", "queue"):
        html = client.get(address(BY_NAME[page])).content.decode()
        assert "the provider is down" in html
        assert address(BY_NAME["release"]) not in html
    assert client.post(address(BY_NAME["hold"])).status_code == 403
    event = AuditEvent.objects.get()
    assert (event.action, event.queue, event.refused) == ("hold", "emails", True)
    assert event.detail == {"name": "emails"}


def test_numbers_are_compared_before_and_after_a_mark(client: Any) -> None:
    start = SYSTEM_CLOCK.now() // MINUTE * MINUTE - 10 * MINUTE
    series = [
        boards.empty_bucket("", start + at * MINUTE, MINUTE)._replace(
            completed=9 if at < 5 else 3, failed=at // 5
        )
        for at in range(10)
    ]
    before, after = periods(series, start + 5 * MINUTE - 1)
    assert (before.rate, before.failing) == (9, 0)
    assert (after.rate, after.failing) == (4, 25)

    Queue("emails").enqueue(1)
    now = SYSTEM_CLOCK.now()
    old = Annotation.objects.create(at=to_datetime(now - 20 * MINUTE), label="v1 <b>")
    new = Annotation.objects.create(at=to_datetime(now - 10 * MINUTE), label="v2")
    marks = {row.label: int(row.at.timestamp() * 1_000) for row in (old, new)}
    assert shown(client).context["mark"] == marks["v2"]
    chosen = shown(client, mark=marks["v1 <b>"])
    assert chosen.context["mark"] == marks["v1 <b>"]
    assert "v1 &lt;b&gt;" in chosen.content.decode()
    assert shown(client, mark="7").context["mark"] == marks["v2"]


def test_job_is_run_by_hand_with_fields_from_its_signature(client: Any, greet: Any) -> None:
    html = shown(client).content.decode()
    assert re.findall(r'name="(arg_\w+)"', html) == [
        "arg_to",
        "arg_times",
        "arg_loud",
        "arg_about",
        "arg_share",
    ]

    response = run(client, arg_to="7", arg_times="2", arg_loud="true", arg_about='{"a": [1]}', priority="3")

    assert "/jobs/emails/" in response["Location"]
    assert arguments() == {
        "args": [],
        "kwargs": {"to": "7", "times": 2, "loud": True, "about": {"a": [1]}},
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"arg_to": "ann", "arg_times": "two"}, "Enter a whole number"),
        ({"arg_to": "ann", "arg_about": "{1"}, "Invalid JSON at line 1"),
        ({}, "does not accept these arguments"),
        ({"arg_to": "ann", "kwargs": '{"by": 1}'}, "does not accept these arguments"),
        ({"arg_to": "ann", "arg_loud": "loud"}, "Select a valid choice"),
    ],
)
def test_wrong_arguments_are_refused_beside_their_field(
    client: Any, greet: Any, given: Any, why: str
) -> None:
    response = run(client, **given)
    assert response.status_code == 400
    assert why in response.content.decode()
    assert get_storage().queues.names() == []


def test_form_needs_the_permission_to_enqueue(client: Any, greet: Any) -> None:
    assert 'id="djq-run"' in shown(client).content.decode()
    assert 'id="djq-run"' not in shown(logged_in(one_with(rights.VIEW))).content.decode()


def test_job_of_a_hidden_queue_does_not_exist(client: Any, greet: Any, settings: Any) -> None:
    hidden: set[str] = set()
    seen = {"QUEUE_FILTER": lambda _request, name: name not in hidden}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("emails").enqueue(1)
    Queue("other").enqueue(1)
    assert shown(client).status_code == 200
    assert "emails" in client.get(address(BY_NAME["job_types"])).context["idle"]
    hidden.add("emails")
    read_cache.clear()
    assert shown(client).status_code == 404
    assert "greeting" not in shown(client).content.decode()
    assert client.get(address(BY_NAME["job_types"])).context["idle"] == []
    response = run(client, arg_to="ann")
    assert response.status_code == 400
    assert "arg_times" not in response.content.decode()


def test_unknown_job_type_is_not_found(client: Any) -> None:
    assert shown(client, "nothing").status_code == 404

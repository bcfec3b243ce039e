"""The page of a queue: groups, shared limiter, limits, objective, forecast and annotations."""

import pytest
from django.db import connection

from djqueue import Limiter, Queue
from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest
from djqueue.core.policies import KeyLimit, Rate
from djqueue.core.workers import WorkerInfo
from djqueue.dashboard import boards, rights
from djqueue.dashboard.boards import Forecast
from djqueue.dashboard.reading import read_cache
from djqueue.models import AuditEvent
from djqueue.operations.annotations import annotate
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, one_with
from tests.support import eventually

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
SLOW = {"rate": "1/h", "concurrency": None}


def hides_reports(request, queue):
    return queue != "reports"


@pytest.fixture
def queue():
    return Queue("emails")


@pytest.fixture
def sharing(settings):
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "LIMITERS": {"mail": {"RATE": "100/h", "CONCURRENCY": 3}},
        "QUEUES": {"emails": {"LIMITER": "mail"}, "reports": {"LIMITER": "mail"}},
    }


@pytest.fixture
def boss():
    return logged_in(one_with(*ALL_RIGHTS))


@pytest.fixture
def viewer():
    return logged_in(one_with(rights.VIEW))


def shown(client, name="queue", **query):
    read_cache.clear()
    return client.get(address(BY_NAME[name], **query)).content.decode()


def post(client, page, **data):
    return client.post(address(BY_NAME[page]), data)


def claim(queue, many=1):
    request = ClaimRequest("w1", many, frozenset({queue}), (queue,))
    return get_storage().claim(request).jobs


def noted(action):
    return AuditEvent.objects.get(action=action, refused=False)


# Concurrency keys.


def test_busiest_keys_come_first_with_their_limits(queue, viewer):
    queue.enqueue_many([1, 2, 3], concurrency_key="<acme>")
    queue.enqueue(1, concurrency_key="other")
    queue.set_key_limit("other", concurrency=7, rate="2/m", weight=3)
    claim("emails")

    html = shown(viewer)

    assert html.index("&lt;acme&gt;") < html.index(">other</a>")
    assert "1/1" in html
    assert "0/7" in html
    assert "2/m" in html
    assert "Pause" not in html


def test_queue_without_keys_shows_none(queue, viewer):
    queue.enqueue(1)
    assert 'id="djq-keys"' not in shown(viewer)


def test_key_is_found_with_or_without_jobs(queue, viewer):
    queue.pause_key("quiet")
    html = shown(viewer, concurrency_key="quiet")
    assert html.count(">quiet</a>") == 1
    assert "❚❚ paused" in html


def test_key_is_paused_and_resumed(queue, boss):
    queue.enqueue(1, concurrency_key="a/b")

    assert post(boss, "pause_key", concurrency_key="a/b").status_code == 302
    assert queue.key_limits() == {"a/b": KeyLimit(paused=True)}
    assert claim("emails") == []
    event = noted("pause_key")
    assert (event.queue, event.detail["concurrency_key"]) == ("emails", "a/b")
    assert (event.detail["old"], event.detail["new"]) == ({"paused": False}, {"paused": True})
    assert f'formaction="{address(BY_NAME["resume_key"])}"' in shown(boss)

    assert post(boss, "resume_key", concurrency_key="a/b").status_code == 302
    assert queue.key_limits() == {}
    assert len(claim("emails")) == 1


@pytest.mark.parametrize("page", ["pause_key", "resume_key"])
def test_key_without_name_is_rejected(queue, boss, page):
    response = post(boss, page)
    assert response.status_code == 302
    assert queue.key_limits() == {}
    assert "The action failed" in shown(boss)
    assert not AuditEvent.objects.exists()


def test_limits_of_key_are_set_and_logged_with_old_values(queue, boss):
    queue.set_key_limit("vip", concurrency=2)
    form = shown(boss, concurrency_key="vip")
    assert 'name="key-concurrency" value="2"' in form

    data = {"key-name": "vip", "key-concurrency": "5", "key-rate": "10/m", "key-weight": "3"}
    assert post(boss, "key_limits", **data).status_code == 302

    assert queue.key_limits() == {"vip": KeyLimit(5, rate=Rate(10, 60_000), weight=3)}
    detail = noted("key_limits").detail
    assert detail["concurrency_key"] == "vip"
    assert detail["old"] == {"concurrency": 2, "rate": None, "weight": None}
    assert detail["new"] == {"concurrency": 5, "rate": "10/m", "weight": 3}


def test_default_limits_of_keys_are_set(queue, boss):
    assert post(boss, "key_limits", **{"key-concurrency": "4"}).status_code == 302
    assert queue.key_limits() == {None: KeyLimit(4)}
    assert "Default concurrency per key: 4 jobs" in shown(boss)

    assert post(boss, "key_limits").status_code == 302
    assert queue.key_limits() == {}


@pytest.mark.parametrize(
    "wrong", [{"key-rate": "often"}, {"key-concurrency": "0"}, {"key-name": "g", "key-weight": "-1"}]
)
def test_invalid_limits_of_key_are_rejected(queue, boss, wrong):
    response = post(boss, "key_limits", **wrong)
    assert response.status_code == 400
    assert "errorlist" in response.content.decode()
    assert queue.key_limits() == {}
    assert not AuditEvent.objects.exists()


def test_keys_of_global_mode_have_no_controls(queue, boss, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"emails": {"KEY_MODE": "global"}}}
    Queue("emails").enqueue(1, concurrency_key="g")
    html = shown(boss)
    assert 'id="djq-keys"' not in html
    assert "key-concurrency" not in html


# What it shares with others.


def test_shared_limiter_shows_queues_that_use_it(sharing, viewer):
    Queue("emails").enqueue_many([1, 2])
    Queue("reports").enqueue_many([1, 2])
    claim("reports", 2)
    claim("emails", 2)

    html = shown(viewer)

    assert "Shared limiter mail" in html
    assert "3/3 (full)" in html
    assert "100/h, 97 starts available" in html
    taken = html[html.index("Used by") : html.index("Waiting queues")]
    assert taken.index("reports <strong>2</strong></a>") < taken.index("emails <strong>1</strong></a>")
    assert ">emails</a></li></ul>" in html[html.index("Waiting queues") :]
    assert "Limits of mail" not in html


def test_queue_without_limiter_shows_none(queue, boss):
    assert "djq-limiter" not in shown(boss)
    assert post(boss, "limiter").status_code == 404


def test_shared_limiter_is_set_and_logged_with_old_values(sharing, boss):
    assert 'name="limiter-concurrency" value="3"' in shown(boss)

    data = {"limiter-rate": "5/m", "limiter-concurrency": ""}
    assert post(boss, "limiter", **data).status_code == 302

    state = Limiter("mail").state()
    assert (state.rate, state.concurrency) == (Rate(5, 60_000), None)
    detail = noted("limiter").detail
    assert detail["limiter"] == "mail"
    assert detail["old"] == {"rate": "100/h", "concurrency": 3}
    assert detail["new"] == {"rate": "5/m", "concurrency": None}


def test_limiter_shared_with_hidden_queue_cannot_be_set(sharing, boss, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"QUEUE_FILTER": hides_reports}}
    Queue("reports").enqueue(1)
    claim("reports")

    html = shown(boss)
    assert "Shared limiter mail" in html
    assert "reports" not in html
    assert "Limits of mail" not in html
    assert post(boss, "limiter", **{"limiter-rate": "1/m"}).status_code == 403
    assert Limiter("mail").state().rate == Rate(100, 3_600_000)
    assert AuditEvent.objects.get().refused


def test_invalid_limit_of_limiter_is_rejected(sharing, boss):
    response = post(boss, "limiter", **{"limiter-rate": "now and then"})
    assert "must be like" in response.content.decode()
    assert Limiter("mail").state().concurrency == 3


def test_limits_of_queue_are_logged_with_old_values(queue, boss):
    queue.set_limits(rate="1/h")
    assert post(boss, "limits", rate="2/m", concurrency="9").status_code == 302
    detail = noted("limits").detail
    assert (detail["old"], detail["new"]) == (SLOW, {"rate": "2/m", "concurrency": 9})


def test_form_changes_only_the_limit_that_the_user_edited(queue, boss):
    queue.set_limits(rate="1/h", concurrency=2)
    assert 'name="initial-rate" value="1/h"' in shown(boss)
    queue.set_limits(rate="5/h")  # by somebody else, after the page was shown

    before = {"initial-rate": "1/h", "initial-concurrency": "2"}
    assert post(boss, "limits", rate="1/h", concurrency="9", **before).status_code == 302

    assert noted("limits").detail["new"] == {"concurrency": 9}
    row = get_storage().reads.overview([queue.name]).queues[0]
    assert (row.rate, row.concurrency) == (Rate(5, 3_600_000), 9)


def test_unedited_form_changes_nothing(queue, boss):
    queue.set_limits(rate="1/h")

    before = {"initial-rate": "1/h", "initial-concurrency": ""}
    assert post(boss, "limits", rate="1/h", concurrency="", **before).status_code == 302

    assert not AuditEvent.objects.exists()


@pytest.mark.parametrize(("action", "paused"), [("pause", True), ("resume", False)])
def test_pause_and_resume_of_queue_are_logged_with_old_state(queue, boss, action, paused):
    queue.pause() if not paused else queue.resume()
    assert post(boss, action).status_code == 302
    assert queue.is_paused() is paused
    detail = noted(action).detail
    assert (detail["old"], detail["new"]) == ({"paused": not paused}, {"paused": paused})


# Objectives.


@pytest.mark.parametrize(("objective", "is_late"), [(60, False), (0.001, True)])
def test_queue_over_its_objective_is_marked(settings, viewer, objective, is_late):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"emails": {"OBJECTIVE": objective}}}
    Queue("emails").enqueue(1)
    if is_late:
        eventually(
            lambda: get_storage().reads.overview().at > get_storage().reads.overview().queues[0].oldest_at + 1
        )

    for name in ("queue", "queues", "status"):
        assert ("(target 1 ms)" in shown(viewer, name)) is is_late, name
    assert 'data-djq-line="bound">Objective' in shown(viewer)
    assert ("Jobs of emails start later than their target." in shown(viewer, "status")) is is_late


def test_queue_without_objective_is_never_over_it(queue, viewer):
    queue.enqueue(1)
    assert "bjective" not in shown(viewer)
    assert "(target" not in shown(viewer, "status")


def test_page_estimates_when_queue_drains(queue, viewer):
    assert "No waiting jobs" in shown(viewer)
    queue.enqueue(1)
    assert "never: no worker" in shown(viewer)
    assert "never: no worker" in shown(viewer, "queues")
    get_storage().workers.register(WorkerInfo("w1", "host", 1, None, ("emails",), 1, 0))
    assert "estimating" in shown(viewer)
    assert "estimating" in shown(viewer, "queues")
    queue.pause()
    assert "never: paused" in shown(viewer)
    assert "never: paused" in shown(viewer, "queues")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Forecast("draining", 100_000), "about 2 min"),
        (Forecast("draining", 1_200_000), "2 min to 20 min"),
        (Forecast("steady"), "not shrinking"),
        (Forecast("never"), "never: the backlog is growing"),
    ],
)
def test_forecast_of_backlog_is_shown(queue, viewer, monkeypatch, found, said):
    queue.enqueue_many([1, 2, 3])
    monkeypatch.setattr(boards, "forecast", lambda samples: found)
    monkeypatch.setattr(boards.QueueRow, "workers", 1)
    monkeypatch.setattr(boards.QueueRow, "leaving", 2.0)
    monkeypatch.setattr(boards.QueueRow, "arriving", 0.5)
    assert said in shown(viewer)
    assert "(0 in, 2 out per minute)" in " ".join(shown(viewer).split())
    assert said in shown(viewer, "queues")


# Marks.


def test_annotation_is_in_the_row_of_its_minute_in_every_chart(queue, viewer):
    queue.enqueue(1)
    annotate("default", "v<1>")
    annotate("default", "long ago", 1_700_000_000_000)

    for name in ("queue", "status", "job_types"):
        html = shown(viewer, name)
        assert html.count("⚑ v&lt;1&gt;</span>") == (1 if name == "status" else 2), name
        assert "long ago" not in html
    assert 'data-djq-annotation="' in html


@pytest.mark.dialect
def test_charts_show_no_annotations_if_their_table_is_missing(queue, viewer):
    queue.enqueue(1)

    def no_such_table(execute, sql, *given):
        return execute(sql.replace("djqueue_annotation", "djqueue_nothing"), *given)

    with connection.execute_wrapper(no_such_table):
        assert "djq-throughput" in shown(viewer)


def test_large_counts_have_separators_of_thousands(queue, viewer):
    queue.enqueue_many(range(1_201), concurrency_key="g")

    assert "1,200 jobs are waiting for their concurrency keys." in shown(viewer)

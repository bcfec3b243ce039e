"""Saved views of jobs: who has which, and what they tell of hidden queues."""

import pytest
from django.db import OperationalError
from django.utils import timezone

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.workers import WorkerInfo
from djqueue.dashboard import rights
from djqueue.dashboard.actions import FilterForm
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import savedviews
from djqueue.models import AuditEvent
from tests.dashboard.visiting import PAGES, logged_in, one_with
from tests.dashboard.visiting import address as address_of

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}


def address(page, **query):
    return address_of(BY_NAME[page], **query)


def user(*more):
    return logged_in(one_with(rights.VIEW, rights.SAVE_VIEW, *more))


@pytest.fixture
def ann():
    return user(rights.SHARE_VIEW)


@pytest.fixture
def bob():
    return user()


def save(client, view, page="view_save", /, **query):
    return client.post(address(page), {"view": view, **query})


def views(client):
    """Return the views on the page by name, with their URLs."""
    read_cache.clear()
    return {one.view.name: one.url for one in client.get(address("jobs")).context["views"]}


def delete(client, name):
    pk = AuditEvent.objects.filter(detail__view=name, detail__has_key="query").latest("pk").pk
    return client.post(address("view_delete").replace("/1/", f"/{pk}/"))


def test_filter_is_saved_opened_and_deleted(bob):
    saved = save(bob, "Late mails", state="waiting", queue="emails", name="", page_size="7")
    assert saved["Location"] == address("jobs", state="waiting", queue="emails")
    assert views(bob) == {"Late mails": address("jobs", state="waiting", queue="emails")}
    html = bob.get(address("jobs", queue="emails", state="waiting")).content.decode()
    assert '<input type="hidden" name="queue" value="emails">' in html
    assert delete(bob, "Late mails").status_code == 302
    assert views(bob) == {}
    assert delete(bob, "Late mails").status_code == 302


def test_view_keeps_every_filter_of_the_list():
    assert set(savedviews.FIELDS) == {"state", *FilterForm.base_fields}


def test_view_replaces_the_one_of_the_user_with_the_same_name(ann, bob):
    save(bob, "Mine", state="failed")
    save(ann, "Mine", state="active")
    save(bob, "Mine", state="waiting")
    assert views(bob) == {"Mine": address("jobs", state="waiting")}
    assert views(ann) == {"Mine": address("jobs", state="active")}


@pytest.mark.parametrize("name", ["", "  ", "x" * 61])
def test_view_needs_a_short_name(bob, name):
    save(bob, name, state="failed")
    assert views(bob) == {}


def test_shared_view_is_seen_by_others_who_cannot_change_it(ann, bob):
    save(ann, "Ours", "view_share", state="failed")
    assert views(bob) == {"Ours": address("jobs", state="failed")}
    assert "shared by" in bob.get(address("jobs")).content.decode()
    assert address("view_delete") not in bob.get(address("jobs")).content.decode()
    assert delete(bob, "Ours").status_code == 403
    assert save(bob, "Theirs", "view_share").status_code == 403
    refused = AuditEvent.objects.filter(refused=True).values_list("action", flat=True)
    assert [*refused] == ["view_delete", "view_share"]
    assert views(bob).keys() == {"Ours"}
    assert delete(user(rights.SHARE_VIEW), "Ours").status_code == 302
    assert views(bob) == {}


REFUSED = {"queue": "q" * 256, "argument": "order", "priority": "high", "since": "noon"}


@pytest.mark.parametrize("field", REFUSED)
def test_filter_that_the_list_refuses_is_not_saved(bob, field):
    refused = save(bob, "Mine", state="failed", **{field: REFUSED[field]})
    assert refused["Location"] == address("jobs")
    assert save(bob, "Mine", error="x" * 10_000).status_code == 400
    assert views(bob) == {}
    save(bob, "Mine", state="x" * 10_000, priority="0")
    assert views(bob) == {"Mine": address("jobs", priority=0)}


def test_times_of_shared_view_are_shown_in_the_zone_of_each_user(ann, bob):
    with timezone.override("Asia/Tokyo"):
        saved = save(ann, "Noon", "view_share", since="2026-06-01T21:00:00")
        assert saved["Location"] == address("jobs", since="2026-06-01T21:00:00")
    with timezone.override("Europe/Berlin"):
        assert views(bob) == {"Noon": address("jobs", since="2026-06-01T14:00:00")}
        assert "since=2026-06-01T14%3A00%3A00" in bob.get(address("history")).content.decode()


def test_views_are_found_among_many_changes(ann, bob, monkeypatch, caplog):
    monkeypatch.setattr(savedviews, "PART", 2)
    monkeypatch.setattr(savedviews, "MAX_ROWS", 6)
    save(bob, "Old", state="failed")
    for _ in range(4):
        save(ann, "New", state="active")
    assert views(bob) == {"Old": address("jobs", state="failed")}
    assert not caplog.records
    save(ann, "New", state="active")
    save(ann, "New", state="active")
    assert views(bob) == {}
    assert views(ann) == {"New": address("jobs", state="active")}
    assert "before the last 6 changes" in caplog.text


def test_user_has_a_limited_number_of_views(ann, bob, monkeypatch):
    monkeypatch.setattr(savedviews, "MAX_VIEWS", 2)
    for name in ("One", "Two", "Three"):
        save(bob, name, state="failed")
    assert views(bob).keys() == {"One", "Two"}
    save(bob, "Two", state="active")
    assert views(bob)["Two"] == address("jobs", state="active")
    delete(bob, "One")
    for client in (ann, bob):
        save(client, "Three")
        assert "Three" in views(client)


def test_last_known_views_are_shown_if_they_cannot_be_read(bob, monkeypatch):
    save(bob, "Mine", state="failed")
    shown = views(bob)

    def fail(_model):
        raise OperationalError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(savedviews, "rows_of", fail)
        read_cache.forget()
        assert {one.view.name: one.url for one in bob.get(address("jobs")).context["views"]} == shown
        assert views(bob) == {}
    read_cache.forget()
    assert bob.get(address("jobs")).context["views"]


def test_view_of_hidden_worker_is_hidden(ann, bob, settings):
    for queue in ("emails", "payroll"):
        Queue(queue).enqueue(1)
        info = WorkerInfo(f"w-{queue}", "host", 7, (queue,), ("send",), 4, SYSTEM_CLOCK.now())
        get_storage().workers.register(info)
        save(ann, f"Ours {queue}", "view_share", queue="emails", worker=info.id)
    save(ann, "Gone", "view_share", queue="emails", worker="w-payroll")
    delete(ann, "Gone")
    assert views(bob).keys() == {"Ours emails", "Ours payroll"}
    seen = {"QUEUE_FILTER": lambda _request, name: name == "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    for queue in ("emails", "payroll"):
        Queue(queue).enqueue(1)
        get_storage().workers.register(
            WorkerInfo(f"w-{queue}", "host", 7, (queue,), ("send",), 4, SYSTEM_CLOCK.now())
        )
    assert views(bob).keys() == {"Ours emails"}
    for page in ("history", "palette"):
        html = bob.get(address(page, q="ours")).content.decode().partition('id="djq-live"')[2]
        assert html.count("Ours") == 1
        assert "Gone" not in html


def test_view_tells_nothing_of_hidden_queues(ann, bob, settings):
    for queue in ("emails", "payroll"):
        Queue(queue).enqueue(1)
    for queue in ("emails", "payroll", ""):
        save(ann, f"Ours {queue}".strip(), "view_share", queue=queue, name="pay")
    save(bob, "My payroll", queue="payroll")
    save(bob, "My jobs", state="failed")
    assert views(bob).keys() == {"Ours", "Ours emails", "Ours payroll", "My payroll", "My jobs"}
    seen = {"QUEUE_FILTER": lambda _request, name: name == "emails"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": seen}
    Queue("payroll").enqueue(1)
    assert views(bob).keys() == {"Ours emails", "My jobs"}
    for page in ("history", "palette"):
        html = bob.get(address(page, q="pay")).content.decode()
        assert "payroll" not in html
    for page in ("history", "palette"):
        html = bob.get(address(page, q="ours")).content.decode().partition('id="djq-live"')[2]
        assert html.count("Ours") == 1
    assert save(bob, "Guess", queue="payroll").status_code == 403
    assert views(bob).keys() == {"Ours emails", "My jobs"}


def test_palette_finds_views(bob):
    save(bob, "Late mails", state="waiting")
    read_cache.clear()
    html = bob.get(address("palette", q="late")).content.decode()
    assert f'href="{address("jobs", state="waiting")}"' in html

"""Every list, row and page of djqueue in the admin, for every permission, QUEUE_FILTER and READ_ONLY."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client

from djqueue.dashboard import rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardPage
from djqueue.dashboard.urls import PAGES
from djqueue.models import AuditEvent, Job
from tests.admin import ungated_urls
from tests.admin.factories import logged_in, make_superuser, make_user
from tests.admin.walk import HIDDEN, SECRET, SETTINGS, SHOWN, Scene, ask, body, sees_shown, state, write_count

pytestmark = pytest.mark.django_db

DASHBOARDS: dict[str, dict[str, Any]] = {
    "open": {},
    "filtered": {"QUEUE_FILTER": sees_shown},
    "read-only": {"READ_ONLY": True},
    "filtered and read-only": {"QUEUE_FILTER": sees_shown, "READ_ONLY": True},
}
DOES = sorted({page.right for page in PAGES if page.method == "POST"})


# The other walks find nothing more than the one with a filter.
WALKED = [pytest.param(name, marks=() if name == "filtered" else pytest.mark.thorough) for name in DASHBOARDS]


@pytest.fixture(params=WALKED)
def dashboard(request: pytest.FixtureRequest, settings: Any) -> str:
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS[request.param]}
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_snapshots() -> Iterator[None]:
    read_cache.clear()
    yield
    read_cache.clear()


def all_of_djqueue() -> list[str]:
    found = Permission.objects.filter(content_type__app_label="djqueue")
    return list(found.values_list("codename", flat=True))


def viewer(*more: str) -> User:
    views = [name for name in all_of_djqueue() if name.startswith("view_") and name != rights.VIEW_PAYLOAD]
    return make_user(*{*views, *more})


def leaks(
    site: Any,
    scene: Scene,
    client: Client,
    *,
    may: frozenset[str],
    dashboard: str,
    only: str = "",
    only_changes: bool = False,
) -> list[str]:
    """Return what a user can see or do without permission: a list of sentences, empty if all is well.

    may: the permissions of the user.
    only: walk only URLs whose name contains this text.
    only_changes: walk only pages of the dashboard that change something, for the queue that the user sees.
    """
    found = []
    filtered, read_only = "filtered" in dashboard, "read-only" in dashboard
    before = state()
    for target, method in product(scene.targets(site), ("GET", "POST")):
        if only not in target.label:
            continue
        if only_changes and (
            target.queue != SHOWN or not (target.page and target.page.method == method == "POST")
        ):
            continue
        noted = AuditEvent.objects.filter(refused=False).count()
        written = write_count()
        response = ask(client, target, method)
        text = body(response)
        after = before if write_count() == written else state()
        where = f"{method} {target.label} ({response.status_code})"
        if response.status_code >= 500:
            found.append(f"{where} failed")
        if SECRET in text and not (target.page and target.page.name == "reveal"):
            found.append(f"{where} shows a hidden value")
        if filtered and response.status_code == 200 and HIDDEN in text.replace(target.url, ""):
            found.append(f"{where} shows a hidden queue: {around(text)}")
        if filtered and after[HIDDEN] != before[HIDDEN]:
            found.append(f"{where} changed a hidden queue")
        if after != before:
            if method == "GET":
                found.append(f"{where} changed something")
            elif read_only:
                found.append(f"{where} changed something of a read-only dashboard")
            elif target.page is None:
                found.append(f"{where} changed something outside of the dashboard")
            elif not {rights.VIEW, target.page.right} <= may:
                found.append(f"{where} changed something without the right to")
            elif AuditEvent.objects.filter(refused=False).count() == noted:
                found.append(f"{where} changed something, and nothing is in the activity log")
        before = after
    return found


def around(text: str) -> str:
    """Return the text around the name of the hidden queue."""
    at = text.index(HIDDEN)
    return " ".join(text[max(0, at - 150) : at + 50].split())


ALL = frozenset(value for name, value in vars(rights).items() if name.isupper() and isinstance(value, str))


def test_a_superuser_can_see_and_do_what_the_settings_allow(dashboard: str) -> None:
    scene = Scene()
    client = logged_in(make_superuser())
    assert leaks(admin.site, scene, client, may=ALL, dashboard=dashboard) == []
    if "read-only" not in dashboard:
        # The walk performs actions, instead of only being refused.
        done = set(
            AuditEvent.objects.filter(refused=False, user=User.objects.get().username).values_list(
                "action", flat=True
            )
        )
        assert len(done) > 20, sorted(done)


def test_a_viewer_changes_nothing(settings: Any) -> None:
    dashboard = "filtered"
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS[dashboard]}
    scene = Scene()
    client = logged_in(viewer())
    may = frozenset({rights.VIEW, rights.STORAGE})
    assert leaks(admin.site, scene, client, may=may, dashboard=dashboard) == []


@pytest.mark.parametrize("right", DOES)
def test_a_permission_allows_its_actions_and_no_others(right: str, settings: Any) -> None:
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS["filtered"]}
    scene = Scene()
    client = logged_in(viewer(right))
    may = frozenset({rights.VIEW, rights.STORAGE, right})
    assert leaks(admin.site, scene, client, may=may, dashboard="filtered", only_changes=True) == []


def test_each_right_and_each_list_has_one_permission() -> None:
    found = Permission.objects.filter(content_type__app_label__startswith="djqueue")
    lists = {"view_job", "view_jobresult", "view_deadletter", "view_cronjob"}
    assert sorted(found.values_list("codename", flat=True)) == sorted(ALL | lists)


def test_without_permission_to_view_the_dashboard_every_page_is_refused(settings: Any) -> None:
    settings.DJQUEUE = SETTINGS
    scene = Scene()
    client = logged_in(make_user(*(name for name in all_of_djqueue() if name != rights.VIEW)))
    before = state()
    for target in scene.targets(admin.site):
        for method in ("GET", "POST"):
            response = ask(client, target, method)
            allowed = {403, 405}
            if response.status_code == 302 and target.page is None:  # from a row's old URL to its new one
                response = client.get(response["Location"])
            assert response.status_code in allowed, f"{method} {target.label}"
    assert state() == before


def test_anonymous_users_are_redirected_to_the_login(settings: Any) -> None:
    settings.DJQUEUE = SETTINGS
    scene = Scene()
    for target in scene.targets(admin.site):
        for method in ("GET", "POST"):
            response = ask(Client(), target, method)
            assert response.status_code == 302, f"{method} {target.label}"
            assert "/login/" in response["Location"]


# The walk detects missing checks.


@pytest.mark.urls("tests.admin.ungated_urls")
def test_the_walk_detects_a_list_without_the_gate(settings: Any) -> None:
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS["filtered and read-only"]}
    client = logged_in(make_superuser())
    found = leaks(
        ungated_urls.site, Scene(), client, may=ALL, dashboard="filtered and read-only", only="_job_"
    )
    assert any("job_changelist" in one and "shows a hidden queue" in one for one in found), found
    assert any("changed something of a read-only dashboard" in one for one in found), found


def test_the_walk_detects_a_page_without_the_gate(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS["filtered"]}
    by_name = {page.name: page for page in PAGES}

    def everything(_request: Any, *_args: Any, **_captured: Any) -> Any:
        return HttpResponse(" ".join(Job.objects.values_list("queue", flat=True)))

    page: DashboardPage = by_name["system"]
    monkeypatch.setattr(type(page), "view", everything)
    scene = Scene()
    found = leaks(
        admin.site, scene, logged_in(make_superuser()), may=ALL, dashboard="filtered", only="system"
    )
    assert any("djqueue_dashboard_system" in one and "shows a hidden queue" in one for one in found), found


# The index.


def test_the_admin_has_the_dashboard_and_four_lists(settings: Any) -> None:
    settings.DJQUEUE = {"DASHBOARD": {"ADMIN_LISTS": True}}
    registered = {
        model._meta.model_name for model in admin.site._registry if model._meta.app_label == "djqueue"
    }
    assert registered == {"job", "jobresult", "deadletter", "cronjob", "dashboard"}
    html = logged_in(make_superuser()).get("/admin/").content.decode()
    for name in registered:
        assert f'href="/admin/djqueue/{name}/"' in html


@pytest.mark.parametrize(
    "query",
    [
        "payload__contains=zz",
        "error_message__startswith=z",
        "options__gt=a",
        "queue__startswith=zz",
        "id__gt=0",
    ],
)
def test_a_url_can_only_filter_by_columns_that_the_list_offers(query: str, settings: Any) -> None:
    settings.DJQUEUE = SETTINGS
    Scene()
    response = logged_in(make_superuser()).get(f"/admin/djqueue/job/?{query}")
    assert response.status_code == 400


def test_a_list_offers_and_finds_only_queues_that_the_user_may_see(settings: Any) -> None:
    settings.DJQUEUE = {**SETTINGS, "DASHBOARD": DASHBOARDS["filtered"]}
    Scene()
    client = logged_in(make_superuser())
    for query in (f"q={HIDDEN}-done", f"q={HIDDEN[:4]}", f"queue={HIDDEN}", "state__exact=failed"):
        html = client.get(f"/admin/djqueue/job/?{query}").content.decode()
        assert f"{HIDDEN}-failed" not in html
        assert f"{HIDDEN}.jobs" not in html
    assert f"{SHOWN}-failed" in html

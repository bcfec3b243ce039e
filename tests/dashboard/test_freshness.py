"""Unchanged pages: the server responds with 304 without reading or rendering them."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import RequestFactory
from django.test.signals import template_rendered
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import ProgressReport
from djqueue.core.policies import Rate
from djqueue.core.workers import WorkerInfo
from djqueue.dashboard import boards, reading, rights
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import schedules
from djqueue.models import Annotation, BulkKind, CronJob
from djqueue.operations import bulk
from djqueue.storage.memory import MemoryStorage
from tests.dashboard.acting import claim, complete, fail
from tests.dashboard.visiting import ALL_RIGHTS, PAGES, address, logged_in, make_superuser, one_with

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
VERSIONED = [page.name for page in PAGES if page.parts is not None]
READS = (
    "overview",
    "series",
    "cursor_page",
    "jobs",
    "explain",
    "flow",
    "concurrency_keys",
    "dead_letters",
    "counts",
)
STATEMENTS = 7
"""Of a page that has not changed: session, user, small reads of the page's own tables, one in a savepoint."""


class Viewer:
    """A user with an open page that is refreshed, without cached reads."""

    def __init__(self, page: str, client: Any = None) -> None:
        self.client = client or logged_in(make_superuser())
        self.url = address(BY_NAME[page])
        self.tag = ""

    def look(self, **headers: str) -> Any:
        read_cache.forget()
        given = {"HX-Request": "true", "HX-PTag": self.tag, **headers}
        response = self.client.get(self.url, headers=given)
        self.tag = response.headers.get("HX-PTag", self.tag)
        return response


def minute() -> int:
    """Return the current minute, which the charts of pages show."""
    return SYSTEM_CLOCK.now() // 60_000


@pytest.fixture
def _steady(monkeypatch):
    """Keep versions valid beyond the minute, so that only the changes of a test end them."""
    monkeypatch.setattr(reading, "MINUTE", 10**12)


@pytest.fixture
def queue():
    queue = Queue("emails")
    queue.enqueue({"args": [1], "kwargs": {}}, id="job-1")
    queue.pause()  # so that there is no estimate that follows the clock
    CronJob(pk=1, name="night", job_name="emails", schedule="0 4 1 1 *").save(force_insert=True)
    return queue


def test_most_used_pages_have_versions():
    assert {"status", "queues", "queue", "jobs", "job", "errors", "schedules", "schedule"} <= {*VERSIONED}


@pytest.mark.parametrize("name", [name for name in VERSIONED if name != "job"])
@pytest.mark.usefixtures("_steady")
def test_unchanged_page_is_neither_read_nor_rendered(queue, name, monkeypatch):
    viewer = Viewer(name)
    assert viewer.look().status_code == 200
    rendered, read = [], []

    def note(template, **_more):
        rendered.append(template.name)

    template_rendered.connect(note)
    storage = get_storage()
    for verb in READS:
        real = getattr(storage.reads, verb)
        monkeypatch.setattr(
            storage.reads, verb, lambda *a, _verb=verb, _real=real, **k: read.append(_verb) or _real(*a, **k)
        )
    with CaptureQueriesContext(connection) as captured:
        response = viewer.look()
    template_rendered.disconnect(note)
    assert response.status_code == 304
    assert response.content == b""
    assert (rendered, read) == ([], [])
    assert len(captured) <= STATEMENTS, captured.captured_queries
    assert viewer.look().status_code == 304


@pytest.mark.usefixtures("_steady")
def test_page_of_finished_job_is_neither_read_nor_rendered(queue, monkeypatch):
    queue.resume()
    complete("job-1")
    viewer = Viewer("job")
    assert viewer.look().status_code == 200
    monkeypatch.setattr(get_storage(), "jobs", lambda *args: pytest.fail("the job was read"))
    assert viewer.look().status_code == 304


def worker(**said):
    return WorkerInfo(
        **{"id": "w9", "host": "h", "pid": 7, "queues": None, "names": ("emails",), **REST, **said}
    )


REST = {"concurrency": 4, "started_at": 1}


WORKER = WorkerInfo("w9", "host", 7, None, ("emails",), 4, 1)
CHANGES = {
    "an enqueue": lambda: Queue("emails").enqueue(2),
    "an enqueue to a new queue": lambda: Queue("reports").enqueue(2),
    "a claim": lambda: (Queue("emails").resume(), claim()),
    "an end": lambda: (Queue("emails").resume(), complete("job-1")),
    "a failure": lambda: (Queue("emails").resume(), fail("job-1")),
    "a cancel": lambda: Queue("emails").cancel("job-1"),
    "a resume": lambda: Queue("emails").resume(),
    "a limit": lambda: get_storage().queues.set_limits("emails", Rate(1_000_000, 60_000), 7),
    "a worker": lambda: get_storage().workers.register(WORKER),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["status", "queues", "queue", "jobs", "errors"])
@pytest.mark.usefixtures("_steady")
def test_not_modified_response_agrees_with_rendering(queue, name, change):
    viewer = Viewer(name)
    began = minute()
    viewer.look()
    CHANGES[change]()
    response = viewer.look()
    if response.status_code == 304:
        # It was rendered to be compared, and is the same; or it would be.
        viewer.tag = viewer.tag.partition(".")[0]
        assert viewer.look().status_code == 304 or minute() != began
    else:
        assert response.content


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("_steady")
def test_list_of_queues_is_rendered_after_every_change(queue, change):
    if change == "a cancel":
        Queue("emails").enqueue(3)
    viewer = Viewer("queues")
    viewer.look()
    assert viewer.look().status_code == 304
    CHANGES[change]()
    assert viewer.look().status_code == 200


@pytest.mark.usefixtures("_steady")
def test_progress_and_log_lines_change_the_page_of_job(queue):
    queue.resume()
    [claimed] = claim()
    viewer = Viewer("job")
    for said in ({"progress": 0.5}, {"lines": ((1_000, "a line"),)}):
        viewer.look()
        assert viewer.look().status_code == 304
        get_storage().report([ProgressReport("emails", "job-1", claimed.token, **said)])
        assert viewer.look().status_code == 200


@pytest.mark.usefixtures("_steady")
def test_rows_of_dashboard_tables_change_their_pages(queue):
    overview, jobs, cron = Viewer("status"), Viewer("jobs"), Viewer("schedules")
    jobs.url += "?state=waiting"
    for viewer in (overview, jobs, cron):
        viewer.look()
        assert viewer.look().status_code == 304
    selection = bulk.Selection(("emails",), ids=("job-1",), state="waiting")
    bulk.begin("default", BulkKind.DELETE, selection, user="ann", expected=1)
    assert jobs.look().status_code == 200
    CronJob.objects.update(enabled=False)
    assert cron.look().status_code == 200
    Annotation.objects.create(at=timezone.now(), label="v2")
    assert overview.look().status_code == 200
    CronJob.objects.update(enabled=True, next_run_at=timezone.now() - timedelta(hours=1))
    assert overview.look().status_code == 200


@pytest.mark.usefixtures("_steady")
def test_saved_views_do_not_end_the_tag_of_an_open_list(queue):
    viewer = Viewer("jobs")
    viewer.look()
    assert reading.parse_tag(viewer.tag).until > SYSTEM_CLOCK.now() + 3_600_000


def version(viewer: Viewer) -> str:
    """The version in the tag that a page gets when it is rendered."""
    viewer.tag = ""
    assert viewer.look().status_code == 200
    found = reading.parse_tag(viewer.tag).version
    assert found
    return found


@pytest.mark.usefixtures("_steady")
def test_tag_of_schedule_does_not_depend_on_secret_arguments(queue):
    # Without a key, PostgreSQL's sequence may yield that of the fixture's row.
    row = CronJob.objects.create(
        pk=2, name="mail", job_name="send", queue="emails", schedule="@yearly", kwargs={"password": "4711"}
    )
    cron, one = Viewer("schedules"), Viewer("schedule")
    one.url = one.url.replace("/1/", f"/{row.pk}/")
    known = version(cron), version(one)
    CronJob.objects.filter(pk=row.pk).update(kwargs={"password": "4710"}, args=[1])
    assert (version(cron), version(one)) == known
    CronJob.objects.filter(pk=row.pk).update(timezone="Europe/Berlin")
    assert version(cron) != known[0]
    assert version(one) != known[1]


@pytest.mark.usefixtures("_steady")
def test_tag_does_not_depend_on_schedules_of_hidden_queues(queue, settings):
    hidden = {"QUEUE_FILTER": lambda _request, name: name != "zz"}
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": hidden}
    for pk, name, where in ((2, "shown", "emails"), (3, "hidden", "zz")):
        CronJob.objects.create(pk=pk, name=name, job_name="send", queue=where, schedule="@yearly")
    request = RequestFactory().get("/")
    known = schedules.schedule_parts(request)
    CronJob.objects.filter(name="hidden").update(timezone="Europe/Berlin")
    assert schedules.schedule_parts(request) == known
    CronJob.objects.filter(name="shown").update(timezone="Europe/Berlin")
    assert schedules.schedule_parts(request) != known


@pytest.mark.usefixtures("_steady")
def test_version_in_tag_depends_on_secret_key(queue):
    request = RequestFactory().get("/")
    request.user = make_superuser()
    known = reading._digest(request, "1", ())
    assert reading._digest(request, "1", ()) == known
    with override_settings(SECRET_KEY="another"):
        assert reading._digest(request, "1", ()) != known


@pytest.mark.usefixtures("_steady")
def test_granted_or_revoked_permission_changes_the_page(queue):
    user = one_with(rights.VIEW)
    viewer = Viewer("queues", logged_in(user))
    viewer.look()
    assert viewer.look().status_code == 304
    right = Permission.objects.get(codename=rights.PAUSE)
    user.user_permissions.add(right)
    assert b"Resume" in viewer.look().content
    user.user_permissions.remove(right)
    assert b"Resume" not in viewer.look().content
    user.user_permissions.clear()
    assert viewer.look().status_code == 403


@pytest.mark.usefixtures("_steady")
def test_version_depends_on_dashboard_settings(queue, settings):
    hidden: set[str] = set()
    settings.DJQUEUE = {
        **settings.DJQUEUE,
        "DASHBOARD": {"QUEUE_FILTER": lambda _request, name: name not in hidden},
    }
    Queue("emails").enqueue(1, id="job-1")
    Queue("emails").pause()
    viewer = Viewer("queues")
    viewer.look()
    viewer.look()
    assert viewer.look().status_code == 304
    hidden.add("emails")
    assert b"emails" not in viewer.look().content
    assert viewer.look().status_code == 304
    hidden.clear()
    assert b"emails" in viewer.look().content


@pytest.mark.usefixtures("_steady")
def test_language_and_time_zone_change_the_page(queue, settings):
    viewer = Viewer("queues")
    viewer.look()
    assert viewer.look().status_code == 304
    settings.LANGUAGE_CODE = "de"
    assert viewer.look(**{"Accept-Language": "de"}).status_code == 200
    assert viewer.look(**{"Accept-Language": "de"}).status_code == 304
    settings.TIME_ZONE = "Asia/Tokyo"
    assert viewer.look(**{"Accept-Language": "de"}).status_code == 200


@pytest.mark.usefixtures("_steady")
def test_tag_is_valid_for_one_user_and_one_url(queue):
    first, second = Viewer("queues"), Viewer("queues", logged_in(one_with(rights.VIEW)))
    first.look()
    second.tag = first.tag
    assert second.look().status_code == 200
    filtered = Viewer("queues", first.client)
    filtered.tag, filtered.url = first.tag, f"{first.url}?q=nothing"
    assert filtered.look().status_code == 200


def test_tag_expires_with_the_minute_and_content_is_compared_instead(queue, monkeypatch):
    viewer = Viewer("queues")
    viewer.look()
    tag = reading.parse_tag(viewer.tag)
    assert tag.version
    looks = []
    real = boards.read_board
    monkeypatch.setattr(boards, "read_board", lambda: looks.append(1) or real())
    viewer.tag = str(tag._replace(until=0))
    assert viewer.look().status_code in (200, 304)
    assert looks


@pytest.mark.usefixtures("_steady")
def test_version_of_page_with_estimate_expires_soon(queue):
    queue.resume()
    viewer = Viewer("queues")
    viewer.look()
    board = boards.read_board()
    assert reading.parse_tag(viewer.tag).until <= board.at + 1_000


@pytest.mark.usefixtures("_steady")
def test_read_older_than_the_version_gets_no_version(queue):
    viewer = Viewer("queues")
    read_cache.read("board", boards.read_board, versioned=True)
    response = viewer.client.get(viewer.url, headers={"HX-Request": "true"})
    tag = reading.parse_tag(response.headers["HX-PTag"])
    # The board may be older than the version: what it lacks would be hidden.
    assert not tag.version or tag.until <= MemoryStorage().engine.clock.now() + 1_000


@pytest.mark.parametrize("tag", ["", "x", "a.b.c", "a.b", "a.b.9" * 9, "..", "a..99999999999999"])
def test_invalid_tag_matches_nothing(queue, tag):
    viewer = Viewer("queues")
    viewer.tag = tag
    assert viewer.look().status_code == 200


def test_storage_without_change_version_is_compared_by_content(queue, monkeypatch):
    monkeypatch.setattr(get_storage().reads, "change_version", lambda: None)
    viewer = Viewer("queues")
    began = minute()
    assert viewer.look().status_code == 200
    assert "." not in viewer.tag
    assert viewer.look().status_code == 304 or minute() != began
    assert len(ALL_RIGHTS) == len(reading.ALL_RIGHTS)

"""A walk over every URL of djqueue in an admin site: the lists, the rows and the dashboard's pages.

The URLs come from `site._registry`, so that new lists and pages are included. The walk fails for a model
without a row here, and for a route with an unknown capture.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.contrib.admin import AdminSite
from django.db import connection
from django.test import Client
from django.urls import URLPattern, reverse

from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardPage
from djqueue.dashboard.urls import PAGES
from djqueue.models import (
    Annotation,
    AuditEvent,
    BulkKind,
    BulkOperation,
    CronJob,
    DeadLetter,
    ErrorGroup,
    GroupState,
    Job,
    JobResult,
    LimiterState,
    QueueState,
    WorkerState,
)
from djqueue.operations import bulk
from tests.admin.factories import NOON, make_attempt, make_job, make_log, make_result
from tests.dashboard.schedules import GOOD

SHOWN, HIDDEN = "mail", "zzhidden"
"""The queues. Every row of the second one contains its name."""
SECRET = "zzsecret"
"""Hidden value in the payloads and results of both queues."""
SETTINGS = {
    "STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"},
    "LIMITERS": {"mail-limiter": {}, "zzhidden-limiter": {}},
    "QUEUES": {SHOWN: {"LIMITER": "mail-limiter"}, HIDDEN: {"LIMITER": "zzhidden-limiter"}},
}
WATCHED = (
    BulkOperation,
    CronJob,
    DeadLetter,
    ErrorGroup,
    GroupState,
    Job,
    JobResult,
    LimiterState,
    QueueState,
)
"""Tables that only the actions of users change in these tests."""


def sees_shown(_request: Any, queue: str) -> bool:
    """The QUEUE_FILTER of the walk."""
    return queue == SHOWN


class Target(NamedTuple):
    """A URL to request."""

    label: str
    url: str
    page: DashboardPage | None
    """The dashboard's page; None for a list or a row of the admin."""
    queue: str
    """The queue whose data the URL shows."""


class Scene:
    """The same rows for both queues."""

    def __init__(self) -> None:
        self.captured: dict[str, dict[str, Any]] = {}
        self.rows: dict[tuple[Any, str], Any] = {}
        Annotation.objects.create(at=NOON, label="v1")
        for queue in (SHOWN, HIDDEN):
            self._fill(queue)
        read_cache.clear()

    def _fill(self, queue: str) -> None:
        secret = {"args": [], "kwargs": {"password": SECRET, "to": "ann"}}
        name = f"{queue}.jobs.send"
        given = {"queue": queue, "name": name, "payload": secret}
        waiting = make_job("waiting", **given, job_id=f"{queue}-waiting")
        make_job("delayed", **given, job_id=f"{queue}-delayed")
        make_job("failed", **given, job_id=f"{queue}-failed", error_type="ValueError", error_message=queue)
        done = make_job("completed", **given, job_id=f"{queue}-done")
        made = [
            waiting,
            DeadLetter.objects.get(queue=queue),
            make_result(done, {"token": SECRET}),
            make_attempt(done, worker=f"{queue}-worker"),
            make_log(done, f"line of {queue}"),
            QueueState.objects.create(name=queue, concurrency=3),
            ErrorGroup.objects.create(
                queue=queue,
                key="abc",
                fingerprints=["abc"],
                name=name,
                error_type="ValueError",
                message=queue,
                first_seen=NOON,
                last_seen=datetime.now(UTC),
            ),
            GroupState.objects.create(queue=queue, concurrency_key=f"{queue}-key", concurrency=2),
            LimiterState.objects.create(name=f"{queue}-limiter", concurrency=4),
            CronJob.objects.create(
                name=f"{queue}-cron", job_name=name, queue=queue, schedule="@yearly", **_values(secret)
            ),
            WorkerState.objects.create(
                worker_id=f"{queue}-worker",
                host=f"{queue}-host",
                pid=1,
                queues=[queue],
                names=[name],
                concurrency=1,
                started_at=NOON,
                seen_at=datetime.now(UTC),
                state="running",
            ),
        ]
        self.rows.update({(type(row), queue): row for row in made})
        cron = self.rows[CronJob, queue]
        operation = bulk.begin("default", BulkKind.CLEAN, bulk.Selection((queue,), states=("cancelled",)))
        AuditEvent.objects.create(at=NOON, user="ann", action="pause", queue=queue, job_id=f"{queue}-done")
        view = AuditEvent.objects.create(
            at=NOON,
            action="view_share",
            queue=queue,
            user="ann",
            user_pk="0",
            detail={"view": f"shared view of {queue}", "query": {"queue": queue}},
        )
        self.captured[queue] = {
            "queue": queue,
            "job_id": f"{queue}-failed",
            "worker": f"{queue}-worker",
            "write": f"{queue}-write",
            "key": "abc",
            "name": queue,
            "schedules/": cron.pk,
            "views/": view.pk,
            "history/operations/": operation.pk,
        }

    def targets(self, site: AdminSite) -> Iterator[Target]:
        """Yield every URL of djqueue on a site, for both queues."""
        pages = {f"djqueue_dashboard_{page.name}": page for page in PAGES}
        pages["djqueue_dashboard_changelist"] = pages["djqueue_dashboard_status"]
        for model, model_admin in site._registry.items():
            if model._meta.app_label != "djqueue":
                continue
            for pattern in model_admin.get_urls():
                if pattern.name == "djqueue_dashboard_moved":
                    continue  # it shows nothing: it redirects to a page that is visited
                for queue in (SHOWN, HIDDEN):
                    url = self._address(site, model, pattern, queue)
                    label = f"{pattern.name} of {queue}"
                    yield Target(label, url, pages.get(pattern.name or ""), queue)

    def _address(self, site: AdminSite, model: Any, pattern: URLPattern, queue: str) -> str:
        names = re.findall(r"<(?:\w+:)?(\w+)>", str(pattern.pattern))
        row = (
            self.rows.get((model, queue)) or model._default_manager.first() if "object_id" in names else None
        )
        known = {**self.captured[queue], "object_id": getattr(row, "pk", None)}
        route = str(pattern.pattern)
        if "pk" in names:
            parts = ("schedules/", "history/operations/", "views/")
            known["pk"] = known[next(part for part in parts if route.startswith(part))]
        values = {name: known[name] for name in names}
        assert None not in values.values(), f"{model.__name__} needs a row in tests/admin/walk.py"
        if pattern.name is None:  # the admin's old URL of a row
            return reverse(f"{site.name}:djqueue_{model._meta.model_name}_changelist") + f"{row.pk}/"
        return reverse(f"{site.name}:{pattern.name}", kwargs=values)


def write_count() -> object:
    """Return what every write changes: on SQLite, the rows written so far. Elsewhere it always differs."""
    return connection.connection.total_changes if connection.vendor == "sqlite" else object()


def state() -> dict[str, list[str]]:
    """Return all rows by queue; rows that don't name the hidden queue count as the visible one's."""
    found: dict[str, list[str]] = {SHOWN: [], HIDDEN: []}
    for model in WATCHED:
        for row in model._default_manager.order_by("pk").values():
            plain = {name: bytes(one) if isinstance(one, memoryview) else one for name, one in row.items()}
            text = f"{model.__name__} {plain}"
            found[HIDDEN if HIDDEN in text else SHOWN].append(text)
    return found


def data_for(target: Target) -> dict[str, Any]:
    """Return form data with which a page would change something."""
    queue = target.queue
    jobs = [f"{queue}/{queue}-{one}" for one in ("waiting", "delayed", "failed", "done")]
    wanted = {"all_promote_begin": "delayed", "all_cancel_begin": "waiting", "all_delete_begin": "completed"}
    page = target.page.name if target.page else ""
    data: dict[str, Any] = {
        "job": jobs,
        "confirm": f"{queue}-cron" if page.startswith("schedule") else "1" if "worker" in page else queue,
        "what": "completed",
        "kind": "retry",
        "queue": queue,
        "view": f"view of {queue}",
        "concurrency_key": f"{queue}-key",
        "key-name": f"{queue}-key",
        "key-concurrency": "9",
        "limiter-concurrency": "9",
        "concurrency": "8",
        "delay": "60",
        "priority": "5",
        "on": "0",
        # For the admin's own forms.
        "action": "delete_selected",
        "_selected_action": ["1", "2", "3"],
        "post": "yes",
    }
    if page in wanted:
        data["state"] = wanted[page]
    if page in ("schedule_create", "schedule_save"):
        data |= {**GOOD, "name": f"{queue}-another", "queue": queue, "djq_do": "save", "schedule": "@daily"}
    return data


def ask(client: Client, target: Target, method: str) -> Any:
    """Make a request without snapshots of earlier ones."""
    read_cache.clear()
    if method == "POST":
        response = client.post(target.url, data_for(target))
        # Messages on the next page would repeat what was typed here.
        client.cookies.pop("messages", None)
        return response
    return client.get(target.url)


def body(response: Any) -> str:
    """Return the text of a response, streamed or not, and its redirect."""
    content = b"".join(response.streaming_content) if response.streaming else response.content
    return f"{response.headers.get('Location', '')} {content.decode()}"


def _values(payload: dict[str, Any]) -> dict[str, Any]:
    return {"args": payload["args"], "kwargs": payload["kwargs"]}

"""Who may do what: one table of rights, asked by the views and by the templates alike."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from django.http import HttpRequest
from django.utils.module_loading import import_string

from djqueue.conf import get_settings

VIEW = "view_dashboard"
VIEW_PAYLOAD = "view_payload"
ENQUEUE = "enqueue_job"
RETRY = "retry_job"
EDIT = "edit_job"
CANCEL = "cancel_job"
DELETE = "delete_job"
PAUSE = "pause_queue"
CONFIGURE = "configure_queue"
DRAIN = "drain_queue"
DEAD_LETTERS = "manage_dlq"
CRON = "manage_cron"
WORKERS = "control_worker"
STORAGE = "view_storage"

READING = frozenset({VIEW, VIEW_PAYLOAD, STORAGE})
"""Rights that change nothing, which a read-only dashboard leaves."""

QueueFilter = Callable[[HttpRequest, str], bool]


def may(request: HttpRequest, right: str) -> bool:
    """Whether the user has a right, beside that to see the dashboard; if it changes something, as far as
    the dashboard is not read-only.
    """
    if right not in READING and get_settings().dashboard.read_only:
        return False
    user: Any = request.user
    return all(user.has_perm(f"djqueue.{one}") for one in (VIEW, right))


class Rights:
    """The rights of a user, as a template asks for them: `may.pause_queue`."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request

    def __getitem__(self, right: str) -> bool:
        return may(self._request, right)


def sees(request: HttpRequest, queue: str) -> bool:
    """Whether the user is to know of a queue: as `QUEUE_FILTER` says."""
    chosen = get_settings().dashboard.queue_filter
    if chosen is None:
        return True
    return bool((_imported(chosen) if isinstance(chosen, str) else chosen)(request, queue))


def hides_queues() -> bool:
    """Return whether the settings have a `QUEUE_FILTER`, so that a user may not see every queue."""
    return get_settings().dashboard.queue_filter is not None


def sees_each(request: HttpRequest, queues: Iterable[str]) -> bool:
    """Whether the user is to know of all of these queues."""
    return all(sees(request, queue) for queue in queues)


@lru_cache(maxsize=8)
def _imported(path: str) -> QueueFilter:
    found: QueueFilter = import_string(path)
    return found

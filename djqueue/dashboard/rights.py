"""Permissions of the dashboard, used by views and templates alike."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from django.http import HttpRequest
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError, UnknownQueueError

VIEW = "view_dashboard"
VIEW_PAYLOAD = "view_payload"
ENQUEUE = "enqueue_job"
RETRY = "retry_job"
EDIT = "edit_job"
CANCEL = "cancel_job"
DELETE = "delete_job"
PAUSE = "pause_queue"
CONFIGURE = "configure_queue"
CLEAR = "clear_queue"
DEAD_LETTERS = "manage_dlq"
CRON = "manage_cron"
WORKERS = "control_worker"
STORAGE = "view_storage"
SAVE_VIEW = "save_view"
SHARE_VIEW = "share_view"

READING = frozenset({VIEW, VIEW_PAYLOAD, STORAGE})
"""Permissions that allow no changes. Only these apply if the dashboard is read-only."""

QueueFilter = Callable[[HttpRequest, str], bool]


def may(request: HttpRequest, right: str) -> bool:
    """Return whether the user has a permission, and may see the dashboard.

    A read-only dashboard denies permissions that allow changes.
    """
    if right not in READING and get_settings().dashboard.read_only:
        return False
    user: Any = request.user
    return all(user.has_perm(f"djqueue.{one}") for one in (VIEW, right))


class Rights:
    """The permissions of a user in templates: `may.pause_queue`."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request

    def __getitem__(self, right: str) -> bool:
        return may(self._request, right)


def sees(request: HttpRequest, queue: str) -> bool:
    """Return whether the user can see a queue, according to `QUEUE_FILTER`."""
    chosen = get_settings().dashboard.queue_filter
    if chosen is None:
        return True
    return bool((_imported(chosen) if isinstance(chosen, str) else chosen)(request, queue))


def hides_queues() -> bool:
    """Return whether `QUEUE_FILTER` is set, so that queues may be hidden from the user."""
    return get_settings().dashboard.queue_filter is not None


def reason(error: DjqueueError) -> str:
    """Return the text of an error, without a suggestion of a queue that the user may not be able to see."""
    if isinstance(error, UnknownQueueError) and hides_queues():
        return _("The queue doesn't exist or you don't have access.")
    return str(error)


def sees_each(request: HttpRequest, queues: Iterable[str]) -> bool:
    """Return whether the user can see all of these queues."""
    return all(sees(request, queue) for queue in queues)


@lru_cache(maxsize=8)
def _imported(path: str) -> QueueFilter:
    found: QueueFilter = import_string(path)
    return found

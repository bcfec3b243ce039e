"""Annotations in the dashboard's charts: a new version of the project, or a user's note."""

from django.db import Error

from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.options import check_text
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.models import Annotation
from djqueue.storage.base import Storage

from .sweeps import alias_of

logger = Log("djqueue.annotations")


def annotate(alias: str, label: str, now: int | None = None) -> Annotation:
    """Add an annotation now, or at a time in UTC milliseconds. Raises OptionError."""
    at = SYSTEM_CLOCK.now() if now is None else now
    row = Annotation(at=to_datetime(at), label=_checked(label))
    row.save(using=alias)
    _forget_old(alias, at)
    return row


def annotate_version(storage: Storage, now: int | None = None) -> None:
    """Annotate the start of a new VERSION of the project; of many processes, one does so.

    Without the setting or the table, nothing happens.
    """
    version = get_settings().version
    if not version:
        return
    alias = alias_of(storage)
    at = SYSTEM_CLOCK.now() if now is None else now
    rows = Annotation.objects.using(alias)
    try:
        last = _last(alias)
        while last is None or last.label != version:
            # Of several processes that find the same last version, one succeeds.
            follows = 0 if last is None else last.pk
            last, _ = rows.get_or_create(follows=follows, defaults={"at": to_datetime(at), "label": version})
        _forget_old(alias, at)
    except Error as error:
        # A project without database storage need not have the tables.
        logger.debug("Could not annotate the version: %s", in_one_line(error))


def last_deploy(alias: str) -> tuple[int, str] | None:
    """Return the time of the last new version that workers started with, and the version; None if unknown."""
    last = _last(alias)
    return None if last is None or last.follows == 0 else (to_milliseconds(last.at), last.label)


def _forget_old(alias: str, now: int) -> None:
    oldest, last = to_datetime(now - get_settings().metrics.day), _last(alias)
    rows = Annotation.objects.using(alias).filter(at__lt=oldest)
    (rows if last is None else rows.exclude(pk=last.pk)).delete()


def _last(alias: str) -> Annotation | None:
    """Return the version that was noted last."""
    return Annotation.objects.using(alias).filter(follows__isnull=False).order_by("-id").first()


def _checked(label: str) -> str:
    text = check_text("label", label.strip())
    if not text.isprintable():
        raise OptionError(f"label: {text!r} has characters that cannot be shown")
    return text

"""Groups of errors as rows: what workers have counted is added to them, and users resolve or ignore them.

A group has the failed attempts of one job type in a queue that were raised at the same place, or whose
messages are alike. Each fingerprint of a message belongs to one group, so that groups share no dead letter.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import WARNING
from typing import Any, Literal

from django.db import DataError, Error
from django.db.models import QuerySet

from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errorgroups import MAX_FINGERPRINTS, Sighting, masked, tally
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog, in_one_line
from djqueue.core.metrics import HOUR
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.fields import NAME_LENGTH
from djqueue.models import ErrorGroup
from djqueue.storage.base import Storage
from djqueue.storage.tables.dberrors import NO_TABLE, raise_named

from .sweeps import alias_of, with_tables

logger = Log("djqueue.errors")
throttled = ThrottledLog(logger, 60.0)

STORED_AT_ONCE = 100
"""Different errors stored by one round of maintenance."""
HOURS = 14 * 24
"""Hours of which a group has the counts."""
MAX_VERSIONS = 20
"""Versions of a group, those seen last."""
MAX_GROUPS = 2_000
"""Groups that are kept, those seen last."""
MAX_TRIES = 20
"""Tries to change a row that other processes change, too."""

GroupState = Literal["open", "back", "resolved", "ignored"]


def state_of(group: ErrorGroup, now: int) -> GroupState:
    """Return the state of a group at a time in UTC milliseconds."""
    if group.resolved_at is not None:
        return "resolved"
    if group.ignored_until is not None and to_milliseconds(group.ignored_until) > now:
        return "ignored"
    return "open" if group.came_back_at is None else "back"


def is_open(group: ErrorGroup, now: int) -> bool:
    """Return whether a person should look at a group."""
    return state_of(group, now) in ("open", "back")


def new_since(group: ErrorGroup) -> int:
    """Return when a group was new for the last time: first seen, or back after it was resolved."""
    return to_milliseconds(group.came_back_at or group.first_seen)


def recording(storage: Storage) -> Callable[[], None]:
    """Return a function that stores the errors of this process; it does nothing without the table."""
    alias = alias_of(storage, ErrorGroup)
    tally.is_stored = True

    def store() -> None:
        sightings = tally.take(STORED_AT_ONCE)
        try:
            record(alias, sightings)
        finally:
            tally.put_back(sightings)

    return with_tables(store, tally.__len__, alias, logger, "store the errors")


def record(alias: str, sightings: list[Sighting]) -> None:
    """Add errors to their groups, and remove those that are stored, or that the database refuses, from the
    list.
    """
    keys = [one.key for one in sightings]
    index = GroupIndex(
        _groups(alias).filter(
            queue__in={key.queue for key in keys},
            name__in={key.name[:NAME_LENGTH] for key in keys},
            error_type__in={key.error_type[:NAME_LENGTH] for key in keys},
        )
    )
    parts: dict[int, tuple[ErrorGroup, list[Sighting]]] = {}
    for one in sightings:
        group = index.find(one)
        parts.setdefault(id(group), (group, []))[1].append(one)
    waiting, kept, has_new = list(parts.values()), list[Sighting](), False
    while waiting:
        group, same = waiting[0]
        try:
            if group.pk is None:
                group, is_new = _create(alias, group)
                has_new = has_new or is_new
            if not _change(alias, group, partial(_add_all, sightings=same)):
                kept += same
        except (ValueError, DataError) as error:
            text = "Could not store the error %s of %r: %s. Its attempts are not counted."
            throttled.log(WARNING, "refused", text, group.key, group.name, in_one_line(error).rstrip("."))
        del waiting[0]
        sightings[:] = [*kept, *(one for _, part in waiting for one in part)]
    if has_new:
        _forget_old(alias)


def resolve(alias: str, queue: str, key: str, version: str = "", now: int | None = None) -> ErrorGroup | None:
    """Resolve a group; it comes back when a worker of this or an unknown version fails with it.

    Args:
        version: Version without the error; empty for any that has not failed with it so far.

    Returns:
        The group; None if there is none.
    """
    at = SYSTEM_CLOCK.now() if now is None else now

    def change(row: ErrorGroup) -> None:
        row.resolved_at, row.resolved_in = to_datetime(at), version
        row.known_versions = [one for one in row.versions if one != version]
        row.ignored_until = row.came_back_at = None

    return _changed(alias, queue, key, change)


def ignore(alias: str, queue: str, key: str, until: int) -> ErrorGroup | None:
    """Ignore a group until a time in UTC milliseconds; return the group, or None if there is none."""

    def change(row: ErrorGroup) -> None:
        row.ignored_until, row.resolved_at = to_datetime(until), None

    return _changed(alias, queue, key, change)


def reopen(alias: str, queue: str, key: str) -> ErrorGroup | None:
    """Undo `resolve` and `ignore`; return the group, or None if there is none."""

    def change(row: ErrorGroup) -> None:
        row.ignored_until = row.resolved_at = None

    return _changed(alias, queue, key, change)


def newest(alias: str, limit: int, queues: Iterable[str] | None = None) -> list[ErrorGroup]:
    """Return the groups of queues (None: of all) that were seen last; none without the table."""
    try:
        rows = _groups(alias)
        if queues is not None:
            rows = rows.filter(queue__in=queues)
        return list(rows.order_by("-last_seen", "-pk")[:limit])
    except Error as error:
        if not NO_TABLE.search(str(error)):
            raise_named(alias, error)
        logger.debug("Could not read the errors: %s", in_one_line(error))
        return []


def _groups(alias: str) -> "QuerySet[ErrorGroup]":
    return ErrorGroup.objects.using(alias)


class GroupIndex:
    """Groups by their fingerprints, and those that take in further ones by their place."""

    def __init__(self, rows: Iterable[ErrorGroup]) -> None:
        self._of_mark: dict[tuple[str, ...], ErrorGroup] = {}
        self._of_place: dict[tuple[str, ...], ErrorGroup] = {}
        self._marks: dict[int, int] = {}
        """Number of fingerprints, by the identity of a group."""
        for row in rows:
            for mark in row.fingerprints:
                self._join(row, mark)

    def find(self, sighting: Sighting) -> ErrorGroup:
        """Return the group of an error: the one with its fingerprint, otherwise one of its place, otherwise a
        new one, which is not saved.
        """
        new = _new(sighting)
        kind, mark = (new.queue, new.name, new.error_type), sighting.key.fingerprint
        found = self._of_mark.get((*kind, mark))
        if found is None:
            found = self._of_place.get((*kind, new.place), new) if new.place else new
            self._join(found, mark)
        return found

    def _join(self, row: ErrorGroup, mark: str) -> None:
        kind, count = (row.queue, row.name, row.error_type), self._marks.get(id(row), 0) + 1
        self._of_mark[(*kind, mark)] = row
        self._marks[id(row)] = count
        if count < MAX_FINGERPRINTS:
            self._of_place[(*kind, row.place)] = row
        elif self._of_place.get((*kind, row.place)) is row:
            del self._of_place[(*kind, row.place)]


def _new(sighting: Sighting) -> ErrorGroup:
    key, first = sighting.key, to_datetime(sighting.first)
    return ErrorGroup(
        queue=key.queue,
        key=key.fingerprint,
        name=key.name[:NAME_LENGTH],
        error_type=key.error_type[:NAME_LENGTH],
        place=key.place[:NAME_LENGTH],
        fingerprints=[key.fingerprint],
        title=masked(sighting.message),
        first_seen=first,
        last_seen=first,
    )


def _create(alias: str, new: ErrorGroup) -> tuple[ErrorGroup, bool]:
    names = ("name", "error_type", "place", "fingerprints", "title", "first_seen", "last_seen")
    values = {name: getattr(new, name) for name in names}
    return _groups(alias).get_or_create(queue=new.queue, key=new.key, defaults=values)


def _add_all(row: ErrorGroup, sightings: Sequence[Sighting]) -> None:
    for one in sightings:
        _add(row, one)


def _add(row: ErrorGroup, sighting: Sighting) -> None:
    key = sighting.key
    row.attempts += sighting.attempts
    row.jobs += sighting.jobs
    row.first_seen = min(row.first_seen, to_datetime(sighting.first))
    if row.last_seen <= to_datetime(sighting.last):
        row.last_seen, row.message = to_datetime(sighting.last), sighting.message
    if key.fingerprint not in row.fingerprints and len(row.fingerprints) < MAX_FINGERPRINTS:
        row.fingerprints = [*row.fingerprints, key.fingerprint]
    hour = sighting.last // HOUR
    hours = {**row.hours, str(hour): row.hours.get(str(hour), 0) + sighting.attempts}
    row.hours = {one: count for one, count in hours.items() if int(one) > hour - HOURS}
    is_back = row.resolved_at is not None and to_milliseconds(row.resolved_at) <= sighting.last
    if is_back and (not key.version or key.version not in row.known_versions):
        row.resolved_at, row.came_back_at = None, to_datetime(sighting.last)
    if key.version:
        count, began, _ = row.versions.get(key.version, (0, sighting.first, 0))
        versions = {
            **row.versions,
            key.version: [count + sighting.attempts, min(began, sighting.first), sighting.last],
        }
        row.versions = dict(sorted(versions.items(), key=lambda item: -item[1][2])[:MAX_VERSIONS])


def _changed(alias: str, queue: str, key: str, change: Callable[[ErrorGroup], object]) -> ErrorGroup | None:
    row = _groups(alias).filter(queue=queue, key=key).first()
    return None if row is None or not _change(alias, row, change) else row


def _change(alias: str, row: ErrorGroup, change: Callable[[ErrorGroup], object]) -> bool:
    """Change a row, unless it was removed. If another process has changed it, read it again first."""
    for _ in range(MAX_TRIES):
        before = row.revision
        change(row)
        row.revision = before + 1
        fields = [field.attname for field in ErrorGroup._meta.concrete_fields if not field.primary_key]
        values = {name: getattr(row, name) for name in fields}
        if _groups(alias).filter(pk=row.pk, revision=before).update(**values):
            return True
        try:
            row.refresh_from_db(using=alias)
        except ErrorGroup.DoesNotExist:
            return False
    logger.warning("Could not change the error %s: other processes change it all the time.", row.key)
    return False


def _forget_old(alias: str) -> None:
    """Delete groups that were not seen for as long as metrics are kept, and those above the limit."""
    oldest = to_datetime(SYSTEM_CLOCK.now() - get_settings().metrics.day)
    _groups(alias).filter(last_seen__lt=oldest).delete()
    surplus = _groups(alias).order_by("-last_seen", "-pk")[MAX_GROUPS : MAX_GROUPS + STORED_AT_ONCE]
    if pks := list(surplus.values_list("pk", flat=True)):
        _groups(alias).filter(pk__in=pks).delete()


def hours_until(group: ErrorGroup, now: int, count: int = HOURS) -> list[int]:
    """Return a group's failed attempts of each of the last hours, oldest first."""
    last = now // HOUR
    found: dict[str, Any] = group.hours
    return [found.get(str(hour), 0) for hour in range(last - count + 1, last + 1)]

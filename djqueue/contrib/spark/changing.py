"""What a DataFrame's rows do to jobs that are there, by their ids: retry, cancel, delete, update.

By the storage's own verbs, whose words are counted. A task that is run again does it again, which changes
nothing more; only its words differ then.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.options import check_text
from djqueue.storage.base import Storage

from .options import CANCEL, DELETE, RETRY, UPDATE, WriteOptions, parse
from .rows import Columns, RowReader

READ_AT_ONCE = 200
"""Jobs whose payloads are looked at together."""

Send = Callable[..., Any]
"""Calls a storage's verb with arguments: see `Sending`."""


class JobChange(NamedTuple):
    """What one row says of one job."""

    id: str
    priority: int | None = None
    run_at: int | None = None
    payload: bytes | None = None


class ChangeColumns(Columns):
    """What each column is for in an operation on jobs that are there."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.said = {name: parse(name, value) for name, value in options.constants.items()}
        self.payload_columns = [one for one in (self.payload, self.args, self.kwargs) if one is not None]
        is_said = bool(self.payload_columns or options.include)
        self.has_payload = options.operation in (RETRY, UPDATE) and is_said
        if options.operation == RETRY and options.dry_run and self.has_payload:
            raise OptionError("dryRun can't be combined with a payload: remove one of them.")
        says = self.has_payload or self.said or self.per_row
        if options.operation == UPDATE and not says:
            raise OptionError(
                "update: no change was given; set priority, runAt or a payload, as options or columns"
            )


class Changing(RowReader):
    """Does what the rows of one task say.

    send: how the storage's verbs are called.
    wait: called with a queue and a number of jobs before these are sent.
    """

    def __init__(
        self, plan: ChangeColumns, storage: Storage, send: Send, wait: Callable[[str, int], object]
    ) -> None:
        super().__init__(plan)
        self._plan = plan
        self._storage = storage
        self._send = send
        self._wait = wait
        self._payload = plan.payload_reader() if plan.has_payload else None
        self.answers: dict[str, Counter[str]] = {}
        """What became of the jobs of each queue, in the storage's words."""

    def run(self, batches: Iterable[Any]) -> None:
        """Work off record batches, each queue's rows together."""
        verb = VERBS[self._plan.options.operation]
        size = self._plan.options.batch_size
        open_: dict[str, list[JobChange]] = {}
        for batch in batches:
            for row in self.rows(batch):
                try:
                    queue, change = self._plan.queue_of(row), self._change(row)
                except DjqueueError as error:
                    self.refuse(error)
                    continue
                changes = open_.setdefault(queue, [])
                changes.append(change)
                if len(changes) == size:
                    self._do(verb, queue, open_.pop(queue))
        for queue, changes in open_.items():
            self._do(verb, queue, changes)

    def _change(self, row: Mapping[str, Any]) -> JobChange:
        plan = self._plan
        said = dict(plan.said)
        for name, column in plan.per_row.items():
            if row[column] is not None:
                said[name] = parse(name, row[column])
        payload = None
        if self._payload is not None and not _are_null(row, plan.payload_columns):
            payload = self._payload(row)
        return JobChange(check_text("id", row[plan.id_column or ""]), payload=payload, **said)

    def _do(self, verb: "Verb", queue: str, changes: Sequence[JobChange]) -> None:
        self._wait(queue, len(changes))
        answers = self.answers.setdefault(queue, Counter())
        if self._plan.options.dry_run:
            ids = [change.id for change in changes]
            answers.update(self._send(self._storage.jobs.retry, queue, ids, dry_run=True))
        else:
            answers.update(verb(self._storage, self._send, queue, changes))


def _are_null(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return bool(columns) and all(row[column] is None for column in columns)


Verb = Callable[[Storage, Send, str, Sequence[JobChange]], Iterable[str]]


def _retry(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    unchanged = [change.id for change in changes if change.payload is None]
    if unchanged:
        yield from send(storage.jobs.retry, queue, unchanged)
    revised = [change for change in changes if change.payload is not None]
    for first in range(0, len(revised), READ_AT_ONCE):
        some = revised[first : first + READ_AT_ONCE]
        found = send(storage.jobs, queue, [change.id for change in some])
        for change, record in zip(some, found, strict=True):
            if record is None:
                yield "not_found"
                continue
            yield send(
                storage.jobs.replace_payload, queue, change.id, change.payload, record.payload, retry=True
            )


def _cancel(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    for result in send(storage.jobs.cancel, queue, [change.id for change in changes]):
        yield result.status


def _delete(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    for removed in send(storage.jobs.remove, queue, [change.id for change in changes]):
        yield "removed" if removed else "not_removed"


def _update(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    """Those that get the same together; the time comes last, as a job whose time has come may start."""
    done = dict.fromkeys(range(len(changes)), True)
    said = _alike(changes, lambda change: (change.priority, change.payload))
    said.pop((None, None), None)
    for (priority, payload), places in said.items():
        ids = [changes[place].id for place in places]
        for place, was in zip(places, send(storage.jobs.update, queue, ids, priority, payload), strict=True):
            done[place] = was
    times = _alike(changes, lambda change: change.run_at)
    times.pop(None, None)
    for run_at, places in times.items():
        ids = [changes[place].id for place in places]
        for place, was in zip(places, send(storage.jobs.reschedule, queue, ids, run_at), strict=True):
            done[place] = done[place] and was
    for place, change in enumerate(changes):
        says_nothing = change == JobChange(change.id)
        yield "unchanged" if says_nothing else "updated" if done[place] else "not_updated"


def _alike(changes: Sequence[JobChange], what: Callable[[JobChange], Any]) -> dict[Any, list[int]]:
    """The places of those that say the same."""
    found: dict[Hashable, list[int]] = {}
    for place, change in enumerate(changes):
        found.setdefault(what(change), []).append(place)
    return found


VERBS: Mapping[str, Verb] = {RETRY: _retry, CANCEL: _cancel, DELETE: _delete, UPDATE: _update}
"""What is done for each operation."""

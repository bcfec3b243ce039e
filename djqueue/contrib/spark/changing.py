"""Retry, cancel, delete or update the jobs whose ids are in a DataFrame.

The storage's results are counted. Repeating a task is safe: it changes nothing more, and only the results
differ.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from djqueue.core.errors import DjqueueError, OptionError
from djqueue.core.options import check_text
from djqueue.storage import actions
from djqueue.storage.actions import Action
from djqueue.storage.base import Storage

from .arrow import slices_of
from .columns import Columns
from .options import CANCEL, DELETE, RETRY, UPDATE, WriteOptions, parse
from .rows import RowReader

READ_BATCH = 200
"""Maximum number of jobs to read at once."""
READ_BYTES = 1024 * 1024
"""Payloads to read at once, in bytes, as far as the previous ones tell."""
PAYLOAD_BYTES = 8 * 1024 * 1024
"""Maximum memory of payloads that wait for their call."""

Send = Callable[..., Any]
"""Calls a storage operation, and retries it; see `StorageRetry`."""


class JobChange(NamedTuple):
    """The change of a job that one row requests."""

    id: str
    priority: int | None = None
    run_at: int | None = None
    payload: bytes | None = None


class ChangeColumns(Columns):
    """The role of each column in an operation on existing jobs."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.constants = {name: parse(name, value) for name, value in options.constants.items()}
        self.given_columns = [one for one in (self.payload, self.args, self.kwargs) if one is not None]
        """The columns of a payload; a row in which all of them are null has none."""
        is_given = bool(self.given_columns or options.include)
        self.has_payload = options.operation in (RETRY, UPDATE) and is_given
        if options.exclude and not self.has_payload:
            raise OptionError(
                f"excludeColumns: has no effect on the operation {options.operation} without includeColumns, "
                "which makes a payload of columns: set it, or remove excludeColumns"
            )
        if options.operation == RETRY and options.dry_run and self.has_payload:
            raise OptionError("dryRun can't be combined with a payload: remove one of them.")
        has_change = self.has_payload or self.constants or self.per_row
        if options.operation == UPDATE and not has_change:
            raise OptionError(
                "update: no change was given; set priority, runAt or a payload, as options or columns"
            )

    @property
    def payload_columns(self) -> tuple[str, ...]:
        """The columns that payloads are made from."""
        return super().payload_columns if self.has_payload else ()


class JobChanger(RowReader):
    """Apply the changes that the rows of one task request.

    Args:
        plan: The columns.
        storage: The storage of the jobs.
        send: Calls a storage operation.
        wait: Called with a queue and a number of jobs before each call.
        partition: The number of the partition, for errors.
    """

    def __init__(
        self,
        plan: ChangeColumns,
        storage: Storage,
        send: Send,
        wait: Callable[[str, int], object],
        partition: int = 0,
    ) -> None:
        super().__init__(plan, partition)
        self._plan: ChangeColumns = plan
        self._storage = storage
        self._send = send
        self._wait = wait
        self._payload = plan.payload_reader() if plan.has_payload else None
        self.answers: dict[str, Counter[str]] = {}
        """Results as the storage returns them, by queue."""

    def run(self, batches: Iterable[Any]) -> None:
        """Apply the changes in record batches, grouped by queue."""
        operation = OPERATIONS[self._plan.options.operation]
        size = self._plan.options.batch_size
        by_queue: dict[str, list[JobChange]] = {}
        payloads = 0
        for batch in batches:
            for part in slices_of(batch, size):
                for row, error in self.rows(part):
                    self.read += 1
                    request = self._change_or_none(row, error)
                    if request is None:
                        continue
                    queue, change = request
                    changes = by_queue.setdefault(queue, [])
                    changes.append(change)
                    payloads += len(change.payload or b"")
                    if len(changes) == size:
                        self._do(operation, queue, by_queue.pop(queue))
                    elif payloads > PAYLOAD_BYTES:
                        self._do_all(operation, by_queue)
                        payloads = 0
        self._do_all(operation, by_queue)

    def _do_all(self, operation: "Operation", open_: dict[str, list[JobChange]]) -> None:
        for queue, changes in open_.items():
            self._do(operation, queue, changes)
        open_.clear()

    def _change_or_none(
        self, row: Mapping[str, Any], error: DjqueueError | None
    ) -> tuple[str, JobChange] | None:
        try:
            if error is not None:
                raise error
            return self._plan.queue_of(row), self._change(row)
        except DjqueueError as problem:
            self.reject(row, problem)
            return None

    def _change(self, row: Mapping[str, Any]) -> JobChange:
        plan = self._plan
        values = dict(plan.constants)
        for name, column in plan.per_row.items():
            if row[column] is not None:
                values[name] = parse(name, row[column])
        payload = None
        if self._payload is not None and not _are_null(row, plan.given_columns):
            payload = self._payload(row)
        return JobChange(check_text("id", row[plan.id_column or ""]), payload=payload, **values)

    def _do(self, operation: "Operation", queue: str, changes: Sequence[JobChange]) -> None:
        self._wait(queue, len(changes))
        answers = self.answers.setdefault(queue, Counter())
        if self._plan.options.dry_run:
            ids = [change.id for change in changes]
            answers.update(self._send(actions.RETRY.dry_run, self._storage, queue, ids))
        else:
            answers.update(operation(self._storage, self._send, queue, changes))


def _are_null(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return bool(columns) and all(row[column] is None for column in columns)


Operation = Callable[[Storage, Send, str, Sequence[JobChange]], Iterable[str]]


def _retry(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    unchanged = [change for change in changes if change.payload is None]
    if unchanged:
        yield from _act(actions.RETRY, storage, send, queue, unchanged)
    edited = [change for change in changes if change.payload is not None]
    first, size = 0, 1
    while first < len(edited):
        batch = edited[first : first + size]
        records = send(storage.reads.jobs, queue, [change.id for change in batch])
        for change, record in zip(batch, records, strict=True):
            if record is None:
                yield "not_found"
                continue
            yield send(
                storage.jobs.replace_payload, queue, change.id, change.payload, record.payload, retry=True
            )
        first += len(batch)
        read = sum(len(record.payload) for record in records if record is not None)
        fitting = READ_BYTES * len(batch) // max(1, read)
        size = max(1, min(READ_BATCH, 4 * size, fitting))


def _act(
    action: Action, storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]
) -> Iterable[str]:
    answers: list[str] = send(action.call, storage, queue, [change.id for change in changes])
    return answers


def _update(storage: Storage, send: Send, queue: str, changes: Sequence[JobChange]) -> Iterator[str]:
    """Update jobs, equal changes in one call. Set `run_at` last, because a due job may start at once."""
    done = dict.fromkeys(range(len(changes)), True)
    updates = _grouped_by(changes, lambda change: (change.priority, change.payload))
    updates.pop((None, None), None)
    for (priority, payload), indexes in updates.items():
        ids = [changes[index].id for index in indexes]
        for index, is_updated in zip(
            indexes, send(storage.jobs.update, queue, ids, priority, payload), strict=True
        ):
            done[index] = is_updated
    times = _grouped_by(changes, lambda change: change.run_at)
    times.pop(None, None)
    for run_at, indexes in times.items():
        ids = [changes[index].id for index in indexes]
        for index, is_updated in zip(indexes, send(storage.jobs.reschedule, queue, ids, run_at), strict=True):
            done[index] = done[index] and is_updated
    for index, change in enumerate(changes):
        is_empty = change == JobChange(change.id)
        yield "unchanged" if is_empty else "updated" if done[index] else "not_updated"


def _grouped_by(changes: Sequence[JobChange], key: Callable[[JobChange], Any]) -> dict[Any, list[int]]:
    """Return the indexes of the changes by key."""
    indexes_by_key: dict[Hashable, list[int]] = {}
    for index, change in enumerate(changes):
        indexes_by_key.setdefault(key(change), []).append(index)
    return indexes_by_key


OPERATIONS: Mapping[str, Operation] = {
    RETRY: _retry,
    CANCEL: partial(_act, actions.CANCEL),
    DELETE: partial(_act, actions.REMOVE),
    UPDATE: _update,
}
"""Implementations by operation."""

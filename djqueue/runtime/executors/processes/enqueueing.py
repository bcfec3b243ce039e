"""Enqueues of sandboxed processes: requests to the worker, which checks them and calls the storage.

The process has no storage: it sends its batches to the worker as plain MessagePack. The worker trusts nothing
in them, and checks each value as it would check a caller's, and each queue against the permissions.

`requests_of`, `frames_of` and `read_answer` are the process's side; all else is the worker's.
"""

import asyncio
import errno
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import msgpack

from djqueue.client import envelope, registry
from djqueue.client.announcing import announcer
from djqueue.conf import Settings
from djqueue.core.backoff import Backoff
from djqueue.core.errors import (
    DjqueueError,
    OptionError,
    PayloadTooLargeError,
    QueueFullError,
    StorageError,
    by_code,
)
from djqueue.core.job import Batch, Claimed, EnqueueResult
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog
from djqueue.core.options import (
    DURATIONS,
    OF_ENQUEUE,
    PARSERS,
    EnqueueOptions,
    JobKey,
    JobOptions,
    check_text,
    parse_options,
)
from djqueue.core.permissions import Permissions
from djqueue.core.states import State
from djqueue.core.threads import on_thread
from djqueue.core.units import LATEST, MAX_DURATION
from djqueue.signals import job_enqueued
from djqueue.storage.base import Storage
from djqueue.storage.wire import has_more_values

from . import frames
from .frames import SAFE_CONTENT, FrameError, checked

LARGEST_REQUEST = 4 * 1024 * 1024
"""Maximum bytes of a request, unless a single job may be larger."""
PART = 64 * 1024
"""Bytes of a request in one frame."""
MAX_JOBS = 10_000
"""Maximum of jobs in one request."""
MAX_BATCHES = 1_000
"""Maximum of batches in one request. A batch has the jobs that differ only in payload."""
MAX_VALUES = 200_000
"""Maximum of values in one request: a list takes one byte there, and much more in memory."""
FIELDS = 7
"""Number of values of a batch in a request."""
STORED_DURATIONS = DURATIONS - OF_ENQUEUE
KEYS = frozenset({"depends_on", "dependents"})
CHECKED = frozenset(PARSERS) - OF_ENQUEUE - {"backoff", "headers"} - DURATIONS - KEYS
"""Options that a process sends as a caller writes them."""
DENIED = "permission"
"""Code of an answer that stands for PermissionError; the other codes are those of `core.errors`."""
SMALL_REQUEST = 4_096
"""Bytes of a request that is read on the loop; larger ones could delay it."""
SIGNAL_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether receivers of signals have caught up."""


logger = Log("djqueue.worker")
failures = ThrottledLog(logger, 10.0)


def requests_of(batches: Sequence[Batch], max_payload: int) -> list[bytes]:
    """Return the requests that enqueue some batches: one, or several for a large batch.

    Raises PayloadTooLargeError for several batches that are too large for one request.
    """
    body: bytes = msgpack.packb([_packed(batch) for batch in batches])
    jobs = sum(len(batch.payloads) for batch in batches)
    is_small = len(batches) <= MAX_BATCHES and jobs <= MAX_JOBS and len(body) <= largest_request(max_payload)
    if is_small and not has_more_values(body, MAX_VALUES):
        return [body]
    if len(batches) > 1 or jobs < 2:
        raise PayloadTooLargeError(
            f"{jobs:,} jobs with {len(body):,} bytes are too many for one step of a job with permissions; "
            f"the limits are {MAX_JOBS:,} jobs, {MAX_BATCHES:,} of them with options of their own, and "
            f"{largest_request(max_payload):,} bytes. Enqueue fewer at a time"
        )
    [batch] = batches
    middle = jobs // 2
    halves = [
        batch._replace(payloads=batch.payloads[part], ids=None if batch.ids is None else batch.ids[part])
        for part in (slice(None, middle), slice(middle, None))
    ]
    return [request for half in halves for request in requests_of([half], max_payload)]


def frames_of(request: bytes) -> bytes:
    """Return the frames of a request, each of bounded size."""
    starts = range(0, len(request), PART)
    return b"".join(
        frames.pack(frames.ENQUEUE, request[start : start + PART], start + PART >= len(request))
        for start in starts
    )


def read_answer(code: str, text: str, results: Iterable[Sequence[Any]]) -> list[EnqueueResult]:
    """Return the results of a request. Raises the error with which the worker refused it."""
    if code == DENIED:
        raise PermissionError(errno.EACCES, text)
    if code:
        raise by_code(code, text)
    return [
        EnqueueResult(job_id, status, queue, None if state is None else State(state), None, replaced)
        for job_id, status, queue, state, replaced in results
    ]


class JobEnqueuer:
    """Enqueues jobs for the processes of some permissions."""

    def __init__(self, storage: Storage, settings: Settings, permissions: Permissions) -> None:
        self._storage = storage
        self._settings = settings
        self._permissions = permissions

    async def enqueue(self, claimed: Claimed, request: bytes) -> list[EnqueueResult]:
        """Enqueue the jobs of a request that a process sent while it ran a job.

        Raises the errors of `read_request`, and StorageError.
        """
        read = partial(read_request, request, claimed, self._permissions, self._settings)
        is_small = len(request) <= SMALL_REQUEST
        batches = read() if is_small else await on_thread(read)
        try:
            results = await self._storage.aenqueue(batches)
        except Exception as error:
            if isinstance(error, QueueFullError) or (
                isinstance(error, DjqueueError) and not isinstance(error, StorageError)
            ):
                raise
            # The text may name servers and users, which are not the handler's to know.
            failures.log(
                logging.ERROR,
                (claimed.name, type(error)),
                "Could not enqueue jobs for job %s (%s).",
                claimed.id,
                claimed.name,
                exc_info=error,
            )
            kind = type(error) if isinstance(error, StorageError) else StorageError
            raise kind(f"the storage of the worker failed: {type(error).__name__}") from error
        left = iter(results)
        for batch in batches:
            answers = [next(left) for _ in batch.payloads]
            self._announce(batch, answers)
        while announcer.is_behind:  # noqa: ASYNC110 - a thread sends them, without an event
            # A handler must not fill the memory with signals that wait for their receivers.
            await asyncio.sleep(SIGNAL_CHECK_INTERVAL)
        return results

    def _announce(self, batch: Batch, answers: list[EnqueueResult]) -> None:
        if not job_enqueued.receivers:
            return
        about = {"queue": batch.queue, "options": batch.options}
        for answer in answers:
            if answer.status == "queued":
                announcer.announce(job_enqueued, batch.name, job_id=answer.id, **about)


def read_request(
    request: bytes, claimed: Claimed, permissions: Permissions, settings: Settings
) -> list[Batch]:
    """Return the batches of a request that a process sent while it ran a job.

    Raises FrameError if it is none, PermissionError with the object as `filename` if the permissions do not
    list it, and the errors of `Queue.enqueue` if a value is invalid.
    """
    entries = _unpacked(request)
    for entry in entries:
        if type(entry) is not list or len(entry) != FIELDS:
            raise FrameError("it sent a batch that is none")
    if len(entries) > MAX_BATCHES:
        raise FrameError(f"it sent more than {MAX_BATCHES:,} batches at once")
    if sum(len(checked(entry[3], list)) for entry in entries) > MAX_JOBS:
        raise FrameError(f"it sent more than {MAX_JOBS:,} jobs at once")
    for entry in entries:
        _check_queue(entry[0], permissions, settings)
    known = {(claimed.queue, claimed.id), *claimed.options.depends_on}
    return [_batch(entry, permissions, known, settings) for entry in entries]


def pack_answer(results: Iterable[EnqueueResult]) -> bytes:
    """Return the frame with the results of a request.

    The return value of a job that has already completed stays in the worker: enqueueing is no permission to
    read.
    """
    plain = [
        (
            result.id,
            result.status,
            result.queue,
            None if result.existing_state is None else result.existing_state.value,
            result.replaced,
        )
        for result in results
    ]
    return frames.pack(frames.ENQUEUED, "", "", plain)


def pack_refusal(code: str, text: str) -> bytes:
    """Return the frame that refuses a request."""
    return frames.pack(frames.ENQUEUED, code, text, [])


def largest_request(max_payload: int) -> int:
    """Return the maximum bytes of a request."""
    return max(LARGEST_REQUEST, max_payload + frames.SMALL)


def _packed(batch: Batch) -> list[Any]:
    options = batch.options.as_dict()
    return [batch.queue, batch.name, options, batch.payloads, batch.ids, batch.delay, batch.run_at]


def _unpacked(request: bytes) -> list[Any]:
    if has_more_values(request, MAX_VALUES):
        raise FrameError(f"it sent a request of more than {MAX_VALUES:,} values")
    try:
        entries = msgpack.unpackb(request, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"it sent a request that is none: {error}") from None
    if type(entries) is not list or not entries:
        raise FrameError("it sent a request without jobs")
    return entries


def _check_queue(queue: Any, permissions: Permissions, settings: Settings) -> None:
    check_text("queue", queue)
    if not permissions.allows_enqueue(queue):
        raise PermissionError(
            errno.EACCES,
            f"the permissions of this job do not list queue {queue!r}; to let it enqueue jobs there, add "
            f"Permissions(enqueue=[{queue!r}])",
            f"queue {queue}",
        )
    envelope.check_queue(queue, settings)


def _batch(entry: list[Any], permissions: Permissions, known: set[JobKey], settings: Settings) -> Batch:
    queue, name, plain_options, payloads, ids, delay, run_at = entry
    _check_name(name, permissions, settings)
    options = _options(checked(plain_options, dict))
    content_type = options.content_type
    if content_type not in SAFE_CONTENT or content_type not in settings.accept_content:
        raise OptionError(f"content_type: a job with permissions cannot enqueue {content_type!r}")
    for key in (*options.depends_on, *options.dependents):
        # Its own results, and those of the jobs before it, are known to the handler.
        if key not in known and not permissions.allows_enqueue(key[0]):
            raise PermissionError(
                errno.EACCES,
                f"a job cannot depend on one in queue {key[0]!r}, which the permissions of this job do not "
                f"list; add Permissions(enqueue=[{key[0]!r}])",
                f"queue {key[0]}",
            )
    if not payloads:
        raise FrameError("it sent a batch without jobs")
    for payload in payloads:
        checked(payload, bytes)
    if ids is not None:
        if len(checked(ids, list)) != len(payloads):
            raise FrameError("it sent a batch with a wrong number of ids")
        for job_id in ids:
            check_text("id", job_id)
    envelope.check_size(options, name, payloads)
    if delay is not None and run_at is not None:
        raise OptionError("delay and run_at can't be combined: remove one of them")
    # `fresh` stays False: only the storage knows whether an id is new.
    return Batch(
        queue,
        name,
        options,
        payloads,
        ids,
        None if delay is None else _whole("delay", delay, MAX_DURATION),
        None if run_at is None else _whole("run_at", run_at, LATEST),
    )


def _check_name(name: Any, permissions: Permissions, settings: Settings) -> None:
    """Refuse job types that belong to other queues: their handlers run wherever a worker has them.

    A name that this process has not registered is a matter of its queue alone.
    """
    check_text("name", name)
    job_type = registry.find(name)
    if job_type is None:
        return
    queue = envelope.queue_of(job_type.declared_queue, settings)
    if not permissions.allows_enqueue(queue):
        raise PermissionError(
            errno.EACCES,
            f"job {name!r} belongs to queue {queue!r}, which the permissions of this job do not list; to let "
            f"it enqueue such jobs, add Permissions(enqueue=[{queue!r}]), or give that job type another "
            "queue with @job(queue=...)",
            f"job {name}",
        )


def _options(plain_options: Mapping[str, Any]) -> JobOptions:
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in plain_options.items():
        if name in CHECKED:
            values[name] = value
        elif name in STORED_DURATIONS:
            values[name] = (
                None if value is None else timedelta(milliseconds=_whole(name, value, MAX_DURATION))
            )
        elif name == "depends_on":
            values[name] = _keys(value)
        elif name == "dependents":
            others[name] = parse_options({"depends_on": _keys(value)}, EnqueueOptions()).job.depends_on
        elif name == "backoff":
            values[name] = _backoff(value)
        elif name == "headers":
            values[name] = _headers(value)
        elif name == "backoff_given":
            others[name] = checked(value, bool)
        else:
            raise FrameError(f"it sent an option that jobs do not have: {str(name)[:100]!r}")
    return replace(parse_options(values, EnqueueOptions()).job, **others)


def _keys(value: Any) -> list[JobKey]:
    keys = []
    for key in checked(value, list):
        if len(checked(key, list)) != 2:
            raise FrameError("it sent a dependency that is none")
        keys.append((key[0], key[1]))
    return keys


def _backoff(value: Any) -> Backoff:
    try:
        return Backoff(**checked(value, dict))
    except TypeError:
        raise FrameError("it sent a backoff that is none") from None


def _headers(value: Any) -> Any:
    try:
        return json.loads(checked(value, str))
    except (ValueError, RecursionError):
        raise FrameError("it sent headers that are not JSON") from None


def _whole(name: str, value: Any, maximum: int) -> int:
    if not 0 <= checked(value, int) <= maximum:
        raise OptionError(f"{name}: must be from 0 to {maximum} milliseconds; got {value}")
    return int(value)

"""Headers: stored unchanged through every transition of a job."""

from typing import Any

import pytest

from djqueue.core.headers import NO_HEADERS
from djqueue.core.options import EnqueueOptions, parse_options
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    QUEUE,
    a_failed_job,
    a_waiting_job,
    claim,
    completing,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    retrying,
)
from .case import StorageCase

HEADERS: dict[str, Any] = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "attempt": 1,
    "largest": 2**63 - 1,
    "flag": True,
    "ratio": 1.0,
    "nothing": None,
    "größe 🦆": "\x00\n\"'",
    "timelimit": [None, 300],
    "stamps": {},
    "empty": [],
    "nested": {"a": [{"b": None}, []]},
}
"""Values that MessagePack in Lua would change: null, an empty list beside an empty dict, large integers."""
PARSED = parse_options({"headers": HEADERS}, EnqueueOptions()).job.headers


def same(found: Any) -> None:
    """Check that headers have the values and the types of `HEADERS`."""
    assert found.text == PARSED.text
    assert dict(found) == HEADERS
    assert [type(value) for value in found.values()] == [type(value) for value in HEADERS.values()]


class HeadersContract(StorageCase):
    """Cases about the option `headers`."""

    @pytest.mark.parametrize("there", sorted(State))
    def test_job_has_its_headers_in_every_state(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, headers=PARSED)
        other = JOB_IN[there](storage)

        same(job(storage, job_id).options.headers)
        assert job(storage, other).options.headers == NO_HEADERS

    def test_each_attempt_has_the_headers(self, storage: Storage) -> None:
        job_id = enqueue(storage, headers=PARSED)
        for ended in (retrying, releasing, completing):
            [claimed] = claim(storage)
            same(claimed.options.headers)
            finish(storage, ended(claimed))
        same(job(storage, job_id).options.headers)

    def test_jobs_keep_their_different_headers(self, storage: Storage) -> None:
        values = [1, True, 1.0, "1", None, [1], [True]]
        options = [parse_options({"headers": {"n": value}}, EnqueueOptions()).job.headers for value in values]
        ids = [enqueue(storage, headers=headers) for headers in options]
        ids += enqueue_many(storage, 2)

        found = {claimed.id: claimed.options.headers for claimed in claim(storage, slots=len(ids))}

        texts = [found[job_id].text for job_id in ids]
        assert texts == [headers.text for headers in options] + ["", ""]

    def test_retried_dead_letter_keeps_its_headers(self, storage: Storage) -> None:
        job_id = a_failed_job(storage, headers=PARSED)

        storage.jobs.retry(QUEUE, [job_id])

        [claimed] = claim(storage)
        same(claimed.options.headers)
        finish(storage, failing(claimed))
        same(job(storage, job_id).options.headers)

    def test_moved_job_keeps_its_headers(self, storage: Storage) -> None:
        first = enqueue(storage, id="first", queue="other")
        moved = a_waiting_job(storage, headers=PARSED)
        behind = enqueue(storage, headers=PARSED, depends_on=(("other", first),))

        storage.jobs.move(QUEUE, [moved, behind], "elsewhere")
        # Moving a dependency rewrites the options of the jobs behind it.
        storage.jobs.move("other", [first], "third")

        for job_id in (moved, behind):
            same(job(storage, job_id, queue="elsewhere").options.headers)

    def test_updated_job_keeps_its_headers(self, storage: Storage) -> None:
        job_id = a_waiting_job(storage, headers=PARSED)

        storage.jobs.update(QUEUE, [job_id], payload=b"\x01", priority=7)

        found = job(storage, job_id)
        assert (found.payload, found.options.priority) == (b"\x01", 7)
        same(found.options.headers)

    def test_unblocked_job_keeps_its_headers(self, storage: Storage) -> None:
        first = enqueue(storage)
        second = enqueue(storage, headers=PARSED, depends_on=((QUEUE, first),))
        [claimed] = claim(storage)
        finish(storage, completing(claimed))

        [claimed] = claim(storage)

        assert claimed.id == second
        same(claimed.options.headers)

"""Jobs that sandboxed handlers enqueue: through the worker, into the queues that their permissions list."""

import os

import pytest

from djqueue.core.job import JobRecord
from djqueue.core.options import JobOptions
from djqueue.core.permissions import NOTHING
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.runtime.executors.processes import enqueueing as requests
from djqueue.runtime.executors.processes import frames
from djqueue.runtime.executors.sandbox import apply
from djqueue.runtime.runs import Stop
from djqueue.signals import job_enqueued
from tests.runtime.executors import permission_jobs as jobs
from tests.runtime.executors.test_job_permissions import plain_settings, site_of
from tests.runtime.storages import RecordingStorage
from tests.support import aeventually

__all__ = ["plain_settings", "site_of"]
pytestmark = [
    pytest.mark.skipif(bool(apply.missing_layers(NOTHING)), reason="this kernel cannot enforce permissions"),
]


@pytest.fixture
def storage():
    policy = QueuePolicy(max_size=2, when_full="block", block_timeout=60_000)
    return RecordingStorage(policies={"small": policy, "full": QueuePolicy(max_size=0)})


def ids_in(storage, queue):
    return [record.id for record in storage.reads.page(queue, None, 20_000)]


def only_job(storage, queue) -> JobRecord:
    [record] = storage.reads.page(queue, None, 10)
    return record


def batch(queue="mail", name="mail", options=None, payloads=(b"\x01",), ids=None, delay=None, run_at=None):
    return [queue, name, options or {}, list(payloads), ids, delay, run_at]


# What is permitted.


async def test_handler_enqueues_into_a_listed_queue(site_of, storage):
    async with site_of(jobs.enqueues) as site:
        job_id, status, queue = await site.result(jobs.enqueues, "mail", {"to": "a"})

    record = only_job(storage, "mail")
    assert (record.id, status, queue, record.state) == (job_id, "queued", "mail", State.WAITING)


async def test_async_handlers_enqueue_and_keep_their_process(site_of, storage):
    async with site_of(jobs.enqueues_async) as site:
        assert await site.result(jobs.enqueues_async, "mail", 1_500) == 1_500

    assert len(ids_in(storage, "mail")) == 1_500
    assert {record.options.tags for record in storage.reads.page("mail", None, 10)} == {("one", "two")}


async def test_permission_true_allows_every_queue(site_of, storage):
    async with site_of(jobs.enqueues_anywhere) as site:
        assert await site.result(jobs.enqueues_anywhere, "elsewhere") == "elsewhere"


async def test_all_job_options_are_passed_through_the_worker(site_of, storage):
    async with site_of(jobs.enqueues_with_every_option) as site:
        await site.result(jobs.enqueues_with_every_option)

    record = only_job(storage, "mail")
    options = record.options
    assert (record.id, record.state) == ("one", State.DELAYED)
    assert (options.timeout, options.ttl, options.unique_ttl) == (1_500, 60_000, 7_000)
    assert (options.priority, options.concurrency_key, options.weight, options.lifo) == (-4, "g", 2, True)
    assert (options.unique_key, options.on_duplicate, options.subject) == ("u", "replace", "s")
    assert (options.backoff.kind, options.backoff.base, options.backoff_given) == ("linear", 2_000, True)
    assert (options.max_attempts, options.result_ttl, options.durable) == (9, None, False)
    assert options.headers == {"a": [None, 1]}


async def test_flow_is_enqueued_in_one_request(site_of, storage):
    async with site_of(jobs.enqueues_a_chain) as site:
        first, second = await site.result(jobs.enqueues_a_chain)

    assert storage.reads.states("mail", [first, second]) == [State.WAITING, State.BLOCKED]


async def test_large_batches_are_split(site_of, storage):
    async with site_of(jobs.enqueues_many) as site:
        assert await site.result(jobs.enqueues_many, 500_000, 20) == 20

    assert len(ids_in(storage, "mail")) == 20


async def test_duplicate_job_is_reported_as_duplicate(site_of):
    async with site_of(jobs.enqueues_twice) as site:
        assert await site.result(jobs.enqueues_twice) == ["queued", "duplicate"]


async def test_handler_enqueues_another_job_type(site_of, storage):
    async with site_of(jobs.enqueues_by_its_type) as site:
        assert await site.result(jobs.enqueues_by_its_type) == "mail"

    assert only_job(storage, "mail").name == jobs.letter.name


async def test_enqueued_signal_is_sent_once_by_the_worker(site_of):
    sent = []

    def receive(**about):
        sent.append((about["queue"], about["job_id"], os.getpid()))

    job_enqueued.connect(receive)
    try:
        async with site_of(jobs.enqueues, jobs.signals_seen) as site:
            job_id, _, _ = await site.result(jobs.enqueues, "mail", 1)
            assert await site.result(jobs.signals_seen) == 0
            await aeventually(lambda: len(sent) == 2, message="the signals are sent")
    finally:
        job_enqueued.disconnect(receive)

    assert sent[0] == ("mail", job_id, os.getpid())
    assert len(sent) == 2


# What is refused.


async def test_job_types_of_other_queues_are_rejected_in_listed_queues(site_of, storage):
    async with site_of(jobs.enqueues_another_type) as site:
        _, kind, message = await site.failure(jobs.enqueues_another_type)

    assert kind == "PermissionError"
    assert "belongs to queue 'default'" in message
    assert ids_in(storage, "mail") == []


@pytest.mark.parametrize("job_type", [jobs.enqueues, jobs.enqueues_unlisted], ids=str)
async def test_unlisted_queues_are_rejected_with_advice(site_of, storage, job_type):
    async with site_of(job_type) as site:
        record = await site.ended(site.enqueue(job_type, "secret", 1))

    assert record.error.type == "builtins.PermissionError"
    assert "Permissions(enqueue=['secret'])" in record.error.message
    assert "Denied access: queue secret" in [line for _, line in record.logs]
    assert ids_in(storage, "secret") == []


@pytest.mark.parametrize(
    "job_type", [jobs.waits_for_a_job, jobs.reads_its_job, jobs.uses_the_storage], ids=str
)
async def test_sandboxed_handler_reaches_no_storage_operation_except_enqueue(site_of, job_type):
    async with site_of(job_type) as site:
        _, kind, message = await site.failure(job_type)

    assert kind == "PermissionError"
    assert "can enqueue jobs, but not wait for them, read them or change them" in message


async def test_process_forked_by_the_handler_cannot_enqueue(site_of, storage):
    async with site_of(jobs.enqueues_from_a_fork) as site:
        assert await site.result(jobs.enqueues_from_a_fork) == 7

    assert ids_in(storage, "mail") == []


async def test_sandboxed_job_cannot_depend_on_a_job_of_an_unlisted_queue(site_of):
    async with site_of(jobs.enqueues_after, jobs.enqueues_with_every_option) as site:
        assert (await site.failure(jobs.enqueues_after, "secret", "x"))[1] == "PermissionError"
        await site.result(jobs.enqueues_with_every_option)
        assert await site.result(jobs.enqueues_after, "mail", "one")


async def test_pickled_payloads_are_rejected_although_the_settings_accept_them(site_of, storage, settings):
    settings.DJQUEUE = {"ACCEPT_CONTENT": ["application/x-djqueue-msgpack", "application/x-python-serialize"]}
    async with site_of(jobs.asks_raw) as site:
        raw = batch(options={"content_type": "application/x-python-serialize"})
        code, text, _ = await site.result(jobs.asks_raw, raw)

    assert (code, ids_in(storage, "mail")) == ("option", [])
    assert "content_type" in text


INVALID = [
    (batch("secret"), "permission"),
    (batch(options={"depends_on": [["secret", "x"]]}), "permission"),
    (batch(options={"dependents": [["secret", "x"]]}), "permission"),
    (batch(name=""), "option"),
    (batch(name=7), "option"),
    (batch(queue="x" * 256), "option"),
    (batch(ids=["\0"]), "option"),
    (batch(delay=-1), "option"),
    (batch(run_at=2**60), "option"),
    (batch(delay=1, run_at=1), "option"),
    (batch(options={"priority": 2**40}), "option"),
    (batch(options={"timeout": 0}), "option"),
    (batch(options={"on_duplicate": "explode"}), "option"),
    (batch(options={"unique_ttl": 5}), "option"),
    (batch(options={"tags": ["x"] * 1_001}), "option"),
    (batch(options={"headers": "[1]"}), "option"),
    (batch(options={"headers": '{"a": NaN}'}), "option"),
    (batch(options={"backoff": {"kind": "linear", "base": -1}}), "option"),
    (batch(payloads=[1024 * 1024 + 1]), "payload_too_large"),
    (batch("full"), "permission"),
]
"""Requests that the worker rejects, and the code of the error."""


async def test_worker_validates_enqueue_requests(site_of, storage):
    async with site_of(jobs.asks_raw) as site:
        for raw, code in INVALID:
            answer, _, results = await site.result(jobs.asks_raw, raw)
            assert (answer, results) == (code, 0), repr(raw)[:200]

    assert ids_in(storage, "mail") == []


MALFORMED = [
    b"\xc1",
    b"\x80",
    b"\x90",
    [7],
    [["mail"]],
    [batch(payloads=[])],
    [batch(payloads=["text"])],
    [batch(ids=["a", "b"])],
    [batch(options={"rejected": ["a", "b"]})],
    [batch(options={"delay": 5})],
    [batch(options={"executor": "inline"})],
    [batch(options={"timeout": True})],
    [batch(options={"depends_on": [["a"]]})],
    [batch(options={"headers": {"a": 1}})],
    [batch(options={"headers": "{"})],
    [batch(options={"headers": "[" * 100_000})],
    [batch(options={"backoff": {"kinds": 1}})],
    [batch(payloads=[b""] * 10_001)],
    b"\xdd\x00\x0f\x00\x00" + b"\x90" * 0xF0000,
    requests.LARGEST_REQUEST + 1,
]
"""Requests that break the protocol."""


async def test_malformed_enqueue_request_ends_the_process(site_of, storage):
    async with site_of(jobs.sends_requests) as site:
        for raw in MALFORMED:
            reason, _, message = await site.failure(jobs.sends_requests, raw, 1, b"")
            assert reason == "worker_crashed", repr(raw)[:200]
            assert "broke the protocol" in message, repr(raw)[:200]

    assert ids_in(storage, "mail") == []


async def test_process_that_floods_the_worker_with_requests_is_ended(site_of):
    async with site_of(jobs.sends_requests) as site:
        _, _, message = await site.failure(jobs.sends_requests, [batch()], 1_000, b"")

        assert "without reading the last answer" in message


@pytest.mark.parametrize(
    "data",
    [
        frames.pack(frames.ENQUEUE, "text", True),
        frames.pack(frames.ENQUEUE, b"\x90", 1),
        frames.pack(frames.ENQUEUE, b"", False),
        frames.pack(frames.ENQUEUE),
        frames.pack(frames.ENQUEUE, b"\x91", False) + frames.pack(frames.READ),
    ],
    ids=repr,
)
async def test_parts_of_enqueue_requests_are_validated(site_of, data):
    async with site_of(jobs.sends_frames) as site:
        assert "broke the protocol" in (await site.failure(jobs.sends_frames, data))[2]


async def test_request_after_the_result_is_ignored_and_ends_the_process(site_of, storage):
    result = frames.pack(frames.RESULT, 1, "complete", b"\xc0", 0, None, "")
    after = result + requests.frames_of(b"\x91\x97\xa4mail\xa4mail\x80\x91\xc4\x01\x01\xc0\xc0\xc0")
    async with site_of(jobs.sends_frames) as site:
        record = await site.ended(site.enqueue(jobs.sends_frames, after))
        assert record.state is State.COMPLETED
        pid = site.pids_of(jobs.sends_frames)
        await aeventually(lambda: not pid or site.pids_of(jobs.sends_frames) != pid, message="it is replaced")

    assert ids_in(storage, "mail") == []


async def test_process_that_does_not_wait_for_its_reply_gets_no_other_job(site_of):
    result = frames.pack(frames.RESULT, 1, "complete", b"\xc0", 0, None, "")
    async with site_of(jobs.sends_requests, jobs.enqueues) as site:
        first = site.enqueue(jobs.sends_requests, [batch()], 1, result)
        second = site.enqueue(jobs.sends_requests, [batch()], 1, result)

        assert (await site.ended(first)).state is State.COMPLETED
        record = await site.ended(second)
        assert (record.state, record.attempts) == (State.COMPLETED, 1)


# What goes wrong.


async def test_interrupted_job_does_not_wait_for_a_full_queue(site_of, storage):
    async with site_of(jobs.enqueues_without_end) as site:
        result = site.enqueue(jobs.enqueues_without_end)
        await aeventually(lambda: len(ids_in(storage, "small")) == 2)
        site.storage.jobs.cancel(result.queue, [result.id])

        assert (await site.ended(result)).state is State.CANCELLED
    assert len(ids_in(storage, "small")) == 2


async def test_job_with_lost_lease_enqueues_nothing(site_of, storage):
    async with site_of(jobs.enqueues_when_cancelled) as site:
        result = site.enqueue(jobs.enqueues_when_cancelled)
        process = await aeventually(site.busy_process, message="it runs")
        site.worker.parts.executor.stop(process.run, Stop.LOST)
        await aeventually(lambda: process.has_ended, message="the process has ended")
        assert site.record(result).state is State.ACTIVE

    assert ids_in(storage, "mail") == []


async def test_jobs_enqueued_before_a_crash_are_kept(site_of, storage):
    async with site_of(jobs.enqueues_and_crashes) as site:
        assert (await site.failure(jobs.enqueues_and_crashes))[0] == "worker_crashed"

    assert ids_in(storage, "mail") == ["before the crash"]


async def test_storage_error_does_not_reveal_servers_to_the_handler(site_of, storage, monkeypatch):
    async def fail(_):
        raise RuntimeError("no route to secret.internal")

    monkeypatch.setattr(storage, "aenqueue", fail)
    async with site_of(jobs.enqueues) as site:
        _, kind, message = await site.failure(jobs.enqueues, "mail", 1)

    assert kind == "StorageError"
    assert "RuntimeError" in message
    assert "secret" not in message


async def test_process_of_an_unsandboxed_job_may_not_request_enqueues(storage):
    from djqueue import Worker
    from tests.runtime.executors import process_jobs
    from tests.runtime.executors.test_processes import Site

    handlers = {process_jobs.sends.name: process_jobs.sends}
    async with Worker(storage, handlers=handlers, maintain=False) as worker:
        data = frames.pack(frames.ENQUEUE, b"\x90", True)
        _, _, message = await Site(storage, worker).failure(process_jobs.sends, data)

    assert "which it has to do itself" in message


# The format of requests.


def test_error_for_a_too_large_request_names_the_limits():
    from djqueue.core.job import Batch
    from djqueue.errors import PayloadTooLargeError

    one = Batch("mail", "mail", JobOptions(), [b"x" * 3_000_000])
    with pytest.raises(PayloadTooLargeError, match=r"2 jobs .* are too many for one step"):
        requests.requests_of([one, one], 1_000_000)


async def test_all_log_lines_before_the_end_of_a_process_are_stored(site_of):
    async with site_of(jobs.logs_and_crashes) as site:
        record = await site.ended(site.enqueue(jobs.logs_and_crashes))

    assert record.reason == "worker_crashed"
    assert str(1_499) in [line for _, line in record.logs]


async def test_payloads_and_logs_of_dependencies_are_not_sent_to_sandboxed_jobs(site_of, storage):
    async with site_of(jobs.add, jobs.reads_what_it_depends_on) as site:
        first = site.enqueue(jobs.add, 1, 2)
        found = await site.result(jobs.reads_what_it_depends_on, depends_on=[("default", first.id)])

    assert found == (3, b"", [])

"""Middleware around enqueues: what it sees, changes and withholds, and its errors."""

import logging
from dataclasses import replace

import pytest

from djqueue import Queue, Worker, current_job, flow
from djqueue.core.job import EnqueueResult
from djqueue.errors import ConfigurationError, OptionError, PayloadTooLargeError
from tests.support import PATIENCE

PATH = "tests.client.test_middleware"
seen = []


class Outer:
    def enqueue(self, batch, call_next):
        seen.append(("outer", batch.name, len(batch.payloads)))
        answers = call_next(batch)
        seen.append(("outer", answers[0].status))
        return answers

    async def aenqueue(self, batch, call_next):
        seen.append(("outer", batch.name, len(batch.payloads)))
        answers = await call_next(batch)
        seen.append(("outer", answers[0].status))
        return answers


class Urgent:
    """Gives every job another priority."""

    def enqueue(self, batch, call_next):
        seen.append(("urgent", batch.name))
        return call_next(self.changed(batch))

    async def aenqueue(self, batch, call_next):
        seen.append(("urgent", batch.name))
        return await call_next(self.changed(batch))

    @staticmethod
    def changed(batch):
        return batch._replace(options=replace(batch.options, priority=9))


class Tracing:
    """Passes the trace of the current job, or a new one, on to the jobs that are enqueued."""

    def enqueue(self, batch, call_next):
        return call_next(self.traced(batch))

    async def aenqueue(self, batch, call_next):
        return await call_next(self.traced(batch))

    def execute(self, job, call_next):
        seen.append((job.name, job.headers["traceparent"]))
        return call_next(job)

    async def aexecute(self, job, call_next):
        seen.append((job.name, job.headers["traceparent"]))
        return await call_next(job)

    @staticmethod
    def traced(batch):
        if "traceparent" in batch.headers:
            return batch
        current = current_job()
        trace = "00-1-1-01" if current is None else current.headers["traceparent"]
        return batch.with_headers({"traceparent": trace})


class Heavy:
    """Adds more headers than a job may have, or than fit beside its payload."""

    def enqueue(self, batch, call_next):
        return call_next(batch.with_headers({"size": "x" * 8_000}))

    async def aenqueue(self, batch, call_next):
        return await call_next(batch.with_headers({"size": "x" * 8_000}))


class Closed:
    """Takes nothing."""

    def enqueue(self, batch, call_next):
        return [EnqueueResult("none", "duplicate", batch.queue)] * len(batch.payloads)

    async def aenqueue(self, batch, call_next):
        return self.enqueue(batch, call_next)


class Forgetful:
    """Does not return the results."""

    def enqueue(self, batch, call_next):
        call_next(batch)

    async def aenqueue(self, batch, call_next):
        await call_next(batch)


class NoLetters:
    def enqueue(self, batch, call_next):
        if batch.queue == "letters":
            raise PermissionError("no letters")
        return call_next(batch)

    async def aenqueue(self, batch, call_next):
        if batch.queue == "letters":
            raise PermissionError("no letters")
        return await call_next(batch)


class Broken:
    def enqueue(self, batch, call_next):
        raise PermissionError("not by you")

    async def aenqueue(self, batch, call_next):
        raise PermissionError("not by you")


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()


@pytest.fixture
def use(settings):
    """Has the settings name these classes."""

    def use(*classes):
        paths = [kind if isinstance(kind, str) else f"{PATH}.{kind.__name__}" for kind in classes]
        settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": paths}

    return use


@pytest.fixture
def queue():
    return Queue("orders")


def test_first_middleware_is_the_outermost(use, queue, do):
    use(Outer, Urgent)
    do(queue, "enqueue_many", [1, 2])

    assert seen == [("outer", "orders", 2), ("urgent", "orders"), ("outer", "queued")]


def test_middleware_can_change_the_enqueued_job(use, queue, do):
    use(Urgent)
    result = do(queue, "enqueue", 1)

    assert queue.get_job(result.id).options.priority == 9


def test_middleware_sees_all_jobs_of_a_flow_before_any_is_enqueued(use, queue, do):
    use(Outer, Urgent)
    other = Queue("letters")
    first, second = queue.node(1), other.node(2)
    do(flow(second.after(first)), "enqueue")

    one, two = [("urgent", name) for name in ("orders", "letters")]
    assert seen == [
        ("outer", "orders", 1), one, ("outer", "queued"),
        ("outer", "letters", 1), two, ("outer", "queued"),
    ]  # fmt: skip
    assert queue.get_job(first.id).options.priority == other.get_job(second.id).options.priority == 9


def test_middleware_can_pass_headers_to_nested_jobs(use, queue, do):
    def parent(job):
        queue.enqueue(2, name="child")
        flow(queue.node(3, name="leaf")).enqueue()

    async def child(job):
        await queue.aenqueue(4, name="grandchild")

    use(Tracing)
    do(queue, "enqueue", 1, name="parent", headers={"traceparent": "00-7-7-01", "tenant": 5})
    do(queue, "enqueue", 1, name="leaf")
    handlers = {"parent": parent, "child": child, "grandchild": bool, "leaf": bool}
    with Worker(handlers=handlers, until_empty=True) as worker:
        assert worker.join(PATIENCE)

    assert sorted(seen) == [
        ("child", "00-7-7-01"),
        ("grandchild", "00-7-7-01"),
        ("leaf", "00-1-1-01"),
        ("leaf", "00-7-7-01"),
        ("parent", "00-7-7-01"),
    ]


def test_headers_added_by_middleware_count_toward_the_limits(use, queue, do, settings):
    use(Heavy)
    with pytest.raises(OptionError, match=r"^headers: 'size' makes the headers of the job larger than 8,192"):
        do(queue, "enqueue", 1, headers={"more": "x" * 200})
    settings.DJQUEUE = {**settings.DJQUEUE, "MAX_PAYLOAD": 9_000}
    for call in ("enqueue", "enqueue_many"):
        payload = "x" * 2_000
        with pytest.raises(PayloadTooLargeError, match=r"payload 2003, headers 80\d\d"):
            do(queue, call, payload if call == "enqueue" else [payload])
    with pytest.raises(PayloadTooLargeError, match="headers"):
        do(flow(queue.node("x" * 2_000)), "enqueue")
    assert queue.counts()["waiting"] == 0


def test_flow_withheld_by_middleware_is_not_stored(use, queue, do):
    use(Closed)
    result = do(flow(queue.node(1)), "enqueue")

    assert [answer.status for answer in result] == ["duplicate"]
    assert queue.counts()["waiting"] == 0


def test_flow_with_a_job_rejected_by_middleware_is_not_stored(use, queue, do):
    use(NoLetters)
    with pytest.raises(PermissionError):
        do(flow(Queue("letters").node(2).after(queue.node(1))), "enqueue")

    assert queue.counts()["waiting"] == 0


def test_middleware_can_withhold_jobs(use, queue, do):
    use(Outer, Closed, Urgent)

    assert do(queue, "enqueue", 1).status == "duplicate"
    assert queue.counts()["waiting"] == 0
    assert seen == [("outer", "orders", 1), ("outer", "duplicate")]


def test_middleware_that_returns_no_results_is_named(use, queue, do):
    use(Forgetful)

    with pytest.raises(TypeError, match=r"DJQUEUE\['MIDDLEWARE'\] returned None for"):
        do(queue, "enqueue", 1)


def test_middleware_error_reaches_the_caller_and_stores_nothing(use, queue, do):
    use(Outer, Broken)

    with pytest.raises(PermissionError, match="not by you"):
        do(queue, "enqueue", 1)
    assert queue.counts()["waiting"] == 0


def test_enqueue_and_wait_passes_through_middleware(use, queue, do):
    use(Outer)
    with Worker(handlers={"orders": lambda job: 7}):
        assert do(queue, "enqueue_and_wait", 1, wait=PATIENCE) == 7

    assert seen == [("outer", "orders", 1), ("outer", "queued")]


def test_wrong_middleware_setting_is_named_at_the_first_enqueue(use, queue):
    use("tests.client.test_middleware.Nobody")

    with pytest.raises(ConfigurationError, match=r"MIDDLEWARE.*test_middleware\.Nobody"):
        queue.enqueue(1)


def test_logging_middleware_logs_enqueues_and_attempts_without_payloads(use, queue, do, caplog):
    def fail(job):
        raise KeyError("price")

    use("djqueue.middleware.LoggingMiddleware")
    with caplog.at_level(logging.INFO, "djqueue.jobs"):
        do(queue, "enqueue_many", ["very secret"] * 2, ids=["a", "b"], name="good")
        do(queue, "enqueue", "very secret", id="c", name="bad", max_attempts=1)
        with Worker(handlers={"good": lambda job: 7, "bad": fail}, until_empty=True) as worker:
            assert worker.join(PATIENCE)

    lines = [record.getMessage() for record in caplog.records if record.name == "djqueue.jobs"]
    assert "Enqueued 2 of 2 jobs good in orders." in lines
    assert [line for line in lines if line.startswith("Job good [a] completed in ")]
    assert [line for line in lines if line.startswith("Job bad [c] raised KeyError after ")]
    assert "very secret" not in " ".join(lines)

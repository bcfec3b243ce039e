"""Spans of enqueues and attempts, on every storage."""

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from djqueue import Discard, Queue, Retry, Snooze, UnrecoverableError, job
from djqueue.client.storages import get_storage
from djqueue.contrib import otel
from djqueue.testing.draining import drain
from tests.everywhere.conftest import _own_registry, storage  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def spans(storage, settings, monkeypatch):  # noqa: F811
    """The spans that have ended, as an exporter."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel.trace, "get_tracer", provider.get_tracer)
    settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": ["djqueue.contrib.otel.TracingMiddleware"]}
    get_storage().connect()
    yield exporter
    provider.shutdown()


def ended(exporter, kind):
    return [span for span in exporter.get_finished_spans() if span.kind is kind]


def test_span_of_the_first_attempt_is_a_child_of_the_enqueue_span(spans):
    seen = []

    @job(queue="emails", name="send")
    def send():
        seen.append(trace.get_current_span().get_span_context())

    with otel.trace.get_tracer("test").start_as_current_span("request") as request:
        result = send.enqueue()
    drain(get_storage())

    [sent], [processed] = ended(spans, SpanKind.PRODUCER), ended(spans, SpanKind.CONSUMER)
    assert sent.parent.span_id == request.get_span_context().span_id
    assert processed.parent.span_id == sent.context.span_id
    assert processed.context.trace_id == sent.context.trace_id == request.get_span_context().trace_id
    assert processed.parent.is_remote
    assert seen[0].span_id == processed.context.span_id
    assert (sent.name, processed.name) == ("send emails", "process emails")
    assert dict(sent.attributes) == {
        "messaging.system": "djqueue",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "emails",
        "messaging.message.id": result.id,
        "djqueue.job.name": "send",
        "djqueue.job.outcome": "queued",
    }
    assert dict(processed.attributes) == {
        "messaging.system": "djqueue",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "emails",
        "messaging.message.id": result.id,
        "djqueue.job.name": "send",
        "djqueue.job.attempt": 1,
    }
    assert processed.status.status_code is StatusCode.UNSET


def test_retry_has_a_separate_trace_linked_to_the_enqueue_span(spans):
    @job(queue="emails", name="send", max_attempts=2, backoff=0)
    def send():
        raise ValueError("no route")

    send.enqueue()
    while get_storage().reads.counts("emails")["failed"] == 0:
        get_storage().sweep()
        drain(get_storage())

    [sent], [first, second] = ended(spans, SpanKind.PRODUCER), ended(spans, SpanKind.CONSUMER)
    assert first.parent.span_id == sent.context.span_id
    assert not first.links
    assert second.parent is None
    assert second.context.trace_id != sent.context.trace_id
    assert [link.context.span_id for link in second.links] == [sent.context.span_id]
    assert second.attributes["djqueue.job.attempt"] == 2
    for attempt in (first, second):
        assert attempt.status.status_code is StatusCode.ERROR
        assert attempt.status.description == "ValueError: no route"
        assert attempt.attributes["error.type"] == "ValueError"
        assert [event.name for event in attempt.events] == ["exception"]


async def test_coroutines_are_traced(spans):
    seen = []

    @job(queue="emails", name="send")
    async def send():
        seen.append(trace.get_current_span().get_span_context().span_id)

    await send.aenqueue()
    drain(get_storage())

    [sent], [processed] = ended(spans, SpanKind.PRODUCER), ended(spans, SpanKind.CONSUMER)
    assert processed.parent.span_id == sent.context.span_id
    assert seen == [processed.context.span_id]


def test_job_enqueued_by_another_job_continues_its_trace(spans):
    @job(queue="emails", name="second")
    def second(): ...

    @job(queue="emails", name="first")
    def first():
        second.enqueue()

    first.enqueue()
    drain(get_storage())

    assert len({span.context.trace_id for span in spans.get_finished_spans()}) == 1
    assert len(spans.get_finished_spans()) == 4


def test_batch_of_jobs_has_one_enqueue_span(spans):
    @job(queue="emails", name="send")
    def send(number): ...

    send.enqueue_many([((number,), {}) for number in range(3)])
    drain(get_storage())

    [sent] = ended(spans, SpanKind.PRODUCER)
    assert sent.attributes["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in sent.attributes
    assert {one.parent.span_id for one in ended(spans, SpanKind.CONSUMER)} == {sent.context.span_id}


@pytest.mark.parametrize(
    ("error", "outcome", "is_error"),
    [
        (Snooze(delay=60), "snooze", False),
        (Discard("not needed"), "discard", False),
        (Retry("later", delay=60), None, True),
        (UnrecoverableError("never"), None, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_control_flow_sets_the_error_status_only_if_the_attempt_failed(spans, error, outcome, is_error):
    @job(queue="emails", name="send")
    def send():
        raise error

    send.enqueue()
    drain(get_storage())

    [processed] = ended(spans, SpanKind.CONSUMER)
    assert processed.attributes.get("djqueue.job.outcome") == outcome
    assert (processed.status.status_code is StatusCode.ERROR) is is_error


def test_timeout_sets_the_error_status(spans):
    @job(queue="emails", name="send", timeout=0.01, max_attempts=1)
    async def send():
        import asyncio

        await asyncio.Event().wait()

    send.enqueue()
    drain(get_storage())

    [processed] = ended(spans, SpanKind.CONSUMER)
    assert processed.attributes["error.type"] == "timeout"
    assert processed.status.status_code is StatusCode.ERROR


def test_rejected_enqueue_sets_the_error_status(spans, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"emails": {"MAX_SIZE": 1}}}
    get_storage().connect()
    queue = Queue("emails")
    queue.enqueue({})

    with pytest.raises(Exception, match="full"):
        queue.enqueue({})

    first, second = ended(spans, SpanKind.PRODUCER)
    assert (first.status.status_code, second.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)


def test_headers_of_the_caller_are_kept(spans):
    Queue("emails").enqueue({}, id="one", headers={"tenant": "acme", "depth": 3})

    headers = Queue("emails").get_job("one").options.headers
    assert (headers["tenant"], headers["depth"]) == ("acme", 3)
    assert headers["traceparent"].startswith("00-")


def test_large_baggage_does_not_fail_the_enqueue(spans, caplog):
    carried = context.get_current()
    for number in range(3):
        carried = baggage.set_baggage(f"large-{number}", "x" * 2_700, carried)
    token = context.attach(carried)
    try:
        result = Queue("emails").enqueue({}, headers={"note": "y" * 2_000})
    finally:
        context.detach(token)

    assert result.status == "queued"
    assert "without a trace context" in caplog.text


def test_jobs_have_no_trace_headers_without_an_sdk(storage, settings):  # noqa: F811
    settings.DJQUEUE = {**settings.DJQUEUE, "MIDDLEWARE": ["djqueue.contrib.otel.TracingMiddleware"]}
    get_storage().connect()

    Queue("emails").enqueue({}, id="one")

    assert dict(Queue("emails").get_job("one").options.headers) == {}

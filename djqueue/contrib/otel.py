"""Traces with OpenTelemetry: a span for each enqueue and each attempt, as middleware.

    DJQUEUE = {"MIDDLEWARE": ["djqueue.contrib.otel.TracingMiddleware"]}

The trace context travels in the headers of the job (`traceparent`), so the span of the first attempt is a
child of the span of the enqueue. Later attempts begin traces of their own, with a link to it.

Only opentelemetry-api is needed, which the extra `otel` installs. Without an SDK, nothing is recorded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from djqueue import __version__
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import Discard, JobCancelledError, JobInterrupted, OptionError, Snooze
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.logs import Log
from djqueue.core.units import to_datetime

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
except ImportError as error:
    raise ImportError("Tracing needs opentelemetry-api: pip install 'djqueue[otel]'") from error

if TYPE_CHECKING:
    from djqueue.runtime.runs import JobContext

# Names of the semantic conventions for messaging, which are not stable yet.
SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
# Names of our own.
JOB_NAME = "djqueue.job.name"
ATTEMPT = "djqueue.job.attempt"
OUTCOME = "djqueue.job.outcome"

SEND, PROCESS = "send", "process"
INTERRUPTIONS = (asyncio.CancelledError, JobCancelledError, JobInterrupted)

logger = Log("djqueue.otel")


class TracingMiddleware:
    """Records a PRODUCER span for each batch that is enqueued, and a CONSUMER span for each attempt."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("djqueue", __version__)

    def enqueue(self, batch: Batch, call_next: Callable[[Batch], list[EnqueueResult]]) -> list[EnqueueResult]:
        """Record the enqueue of a batch."""
        with self._sending(batch) as span:
            answers = call_next(_with_context(batch))
            _note_answers(span, answers)
            return answers

    async def aenqueue(
        self, batch: Batch, call_next: Callable[[Batch], Awaitable[list[EnqueueResult]]]
    ) -> list[EnqueueResult]:
        """Async version of `enqueue`."""
        with self._sending(batch) as span:
            answers = await call_next(_with_context(batch))
            _note_answers(span, answers)
            return answers

    def execute(self, job: "JobContext", call_next: Callable[["JobContext"], Any]) -> Any:
        """Record an attempt."""
        with self._processing(job):
            return call_next(job)

    async def aexecute(self, job: "JobContext", call_next: Callable[["JobContext"], Awaitable[Any]]) -> Any:
        """Async version of `execute`."""
        with self._processing(job):
            return await call_next(job)

    @contextmanager
    def _sending(self, batch: Batch) -> Iterator[Span]:
        attributes: dict[str, Any] = _attributes(SEND, batch.queue, batch.name)
        if len(batch.payloads) > 1:
            attributes[MESSAGE_COUNT] = len(batch.payloads)
        name, kind = f"{SEND} {batch.queue}", SpanKind.PRODUCER
        with self._tracer.start_as_current_span(name, kind=kind, attributes=attributes) as span:
            yield span

    @contextmanager
    def _processing(self, job: "JobContext") -> Iterator[None]:
        sent = propagate.extract(_text_headers(job))
        is_first = job.attempts == 1
        # A retry may follow days later, so it has a trace of its own.
        sender = trace.get_current_span(sent).get_span_context()
        attributes = _attributes(PROCESS, job.queue, job.name)
        with self._tracer.start_as_current_span(
            f"{PROCESS} {job.queue}",
            context=sent if is_first else Context(),
            kind=SpanKind.CONSUMER,
            attributes={**attributes, MESSAGE_ID: job.id, ATTEMPT: job.attempts},
            links=[Link(sender)] if sender.is_valid and not is_first else [],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as error:
                _note_error(span, job, error)
                raise


def _attributes(operation: str, queue: str, name: str) -> dict[str, Any]:
    return {
        SYSTEM: "djqueue",
        OPERATION: operation,
        OPERATION_TYPE: operation,
        DESTINATION: queue,
        JOB_NAME: name,
    }


def _with_context(batch: Batch) -> Batch:
    """Return the batch with the current trace context in its headers."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return batch
    try:
        return batch.with_headers(carrier)
    except OptionError as error:
        # Large baggage or many headers of the job itself: jobs matter more than their traces.
        logger.warning("Enqueued jobs %s without a trace context: %s", batch.name, error)
        return batch


def _text_headers(job: "JobContext") -> dict[str, str]:
    """Return the headers that a propagator can read."""
    return {name: value for name, value in job.headers.items() if isinstance(value, str)}


def _note_answers(span: Span, answers: list[EnqueueResult]) -> None:
    if len(answers) == 1 and answers[0].id:
        span.set_attribute(MESSAGE_ID, answers[0].id)
        span.set_attribute(OUTCOME, answers[0].status)


def _note_error(span: Span, job: "JobContext", error: BaseException) -> None:
    """Add the outcome of an attempt that raised."""
    if isinstance(error, (Snooze, Discard)):
        span.set_attribute(OUTCOME, error.code)
        return
    if isinstance(error, INTERRUPTIONS) and not _is_over(job):
        span.set_attribute(OUTCOME, "interrupted")
        return
    kind = "timeout" if isinstance(error, INTERRUPTIONS) else type(error).__qualname__
    span.record_exception(error)
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {error}"))


def _is_over(job: "JobContext") -> bool:
    """Return whether the timeout of a job is over."""
    return job.deadline is not None and to_datetime(SYSTEM_CLOCK.now()) >= job.deadline

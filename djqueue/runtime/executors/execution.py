"""The steps around every handler call: decode the payload, apply the middleware, determine the outcome."""

import decimal
from asyncio import AbstractEventLoop, CancelledError
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from djqueue.codecs import MSGPACK, decode, get_encoder, msgpack
from djqueue.conf import Settings
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Outcome
from djqueue.middleware import Layers, through
from djqueue.runtime.events import RunEvents
from djqueue.runtime.handlers import Handler
from djqueue.runtime.outcomes import after_error, failure, next_delay, refusal
from djqueue.runtime.runs import JobContext, Run, run_of


class Execution:
    """Decodes payloads before the call, and turns its result or exception into an outcome."""

    def __init__(self, settings: Settings, random: Random, events: RunEvents) -> None:
        self._settings = settings
        self._random = random
        self._events = events
        self._decoders: dict[str, Callable[[bytes], Any]] = {}
        self._encoders: dict[str, Callable[[Any], bytes]] = {}

    def begin(self, run: Run) -> Outcome | None:
        """Decode the run's payload, in the context of its job; return an outcome if that is impossible."""
        isolate_context()
        claimed = run.claimed
        content_type = claimed.options.content_type
        decoder = self._decoders.get(content_type) or self._decoder(content_type)
        try:
            run.payload = decoder(claimed.payload)
        except DjqueueError as error:
            run.error = error
            return refusal(claimed, error, "invalid_payload")
        return None

    def completed(self, run: Run, value: Any) -> Outcome:
        """Return the outcome of a handler that returned; a failure if its result cannot be stored."""
        claimed = run.claimed
        content_type = claimed.options.content_type
        try:
            encoder = self._encoders.get(content_type) or self._encoder(content_type)
            result = encoder(value)
        except DjqueueError as error:
            run.error = error
            return refusal(claimed, error, "invalid_result")
        fields = (claimed.queue, claimed.id, claimed.token, "complete", result, 0, None, "")
        return tuple.__new__(Outcome, fields)

    def stopped(self, run: Run) -> Outcome:
        """Return the outcome of a run that was asked to stop before its handler was called."""
        return self.failed(run, CancelledError("stopped before the job started"))

    def failed(self, run: Run, error: BaseException) -> Outcome:
        """Return the outcome of a handler that raised."""
        run.error = error
        return after_error(run.claimed, error, run.stop, partial(self._delay, run))

    def crashed(self, run: Run, error: BaseException, reason: str) -> Outcome:
        """Return the outcome of a run whose handler neither returned nor raised, such as after a crash."""
        return failure(run.claimed, error, reason, partial(self._delay, run))

    def _delay(self, run: Run, error: BaseException) -> int:
        on_bad = partial(self._events.backoff_failed, run)
        return next_delay(run.claimed, run.handler, error, self._random, on_bad)

    def _decoder(self, content_type: str) -> Callable[[bytes], Any]:
        accept = self._settings.accept_content
        # Checks once, not for every job, that the content type is accepted.
        if content_type == MSGPACK and MSGPACK in accept:
            decoder: Callable[[bytes], Any] = msgpack.decode
        else:
            decoder = partial(decode, content_type=content_type, accept=accept)
        self._decoders[content_type] = decoder
        return decoder

    def _encoder(self, content_type: str) -> Callable[[Any], bytes]:
        encoder = get_encoder(content_type, self._settings.max_payload, "result")
        self._encoders[content_type] = encoder
        return encoder


def isolate_context() -> None:
    """Give the current context a decimal context of its own: a copied context shares the original's."""
    decimal.setcontext(decimal.getcontext().copy())


def call_on_loop(
    loop: AbstractEventLoop, events: RunEvents, purpose: str, function: Callable[..., object], *args: Any
) -> None:
    """Call a function on a worker's loop soon; log the purpose as ignored if the worker has ended."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        events.ignored(purpose)


def wrap_in_middleware(handler: Handler, layers: Layers) -> None:
    """Wrap a handler in the project's middleware; leave it unchanged if there is none."""
    middleware = layers.aexecute if handler.on_loop else layers.execute
    if not middleware:
        return
    call = handler.call

    def call_handler(job: JobContext) -> Any:
        return call(run_of(job))

    call_layers = through(middleware, call_handler)

    def call_with_context(run: Run) -> Any:
        return call_layers(run.context)

    handler.call = call_with_context

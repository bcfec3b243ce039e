"""Middleware: project code that wraps every enqueue and every attempt.

    class Tenants:
        def enqueue(self, batch, call_next):
            return call_next(batch)

        async def aenqueue(self, batch, call_next):
            return await call_next(batch)

        def execute(self, job, call_next):
            with tenant_of(job):
                return call_next(job)

        async def aexecute(self, job, call_next):
            with tenant_of(job):
                return await call_next(job)

The first entry of `DJQUEUE["MIDDLEWARE"]` is the outermost. Each class is instantiated once per process,
without arguments.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from django.utils.module_loading import import_string

from .conf import Settings
from .core.errors import ConfigurationError
from .core.job import Batch, EnqueueResult
from .core.logs import Log

PAIRS = (("enqueue", "aenqueue"), ("execute", "aexecute"))
"""Methods of a middleware. Those of a pair are required together, or some jobs would bypass it."""

Layer = Callable[[Any, Callable[[Any], Any]], Any]
"""(subject, call_next) -> the result of `call_next(subject)`, or a replacement."""

logger = Log("djqueue.jobs")


class Layers(NamedTuple):
    """The methods of the configured middleware, outermost first."""

    enqueue: tuple[Layer, ...] = ()
    aenqueue: tuple[Layer, ...] = ()
    execute: tuple[Layer, ...] = ()
    aexecute: tuple[Layer, ...] = ()


@lru_cache(maxsize=1)
def layers_of(settings: Settings) -> Layers:
    """Return the methods of the configured middleware.

    Raises:
        ConfigurationError: An entry is invalid. The message names it.
    """
    if not settings.middleware:
        return NONE
    made = [_made(path) for path in settings.middleware]
    methods = {
        name: tuple(getattr(middleware, name) for middleware in made if hasattr(middleware, name))
        for name in Layers._fields
    }
    return Layers(**methods)


def problem(path: str) -> str | None:
    """Return the problem of an entry of MIDDLEWARE; None if it is valid."""
    try:
        kind = import_string(path)
    except ImportError as error:
        return f"MIDDLEWARE: {path!r} cannot be imported: {error}"
    found = {name for name in Layers._fields if callable(getattr(kind, name, None))}
    if not isinstance(kind, type) or not found:
        return f"MIDDLEWARE: {path!r} is not a class with {' or '.join(name for name, _ in PAIRS)}"
    for one, other in PAIRS:
        if (one in found) != (other in found):
            present, missing = (one, other) if one in found else (other, one)
            return f"MIDDLEWARE: {path!r} has {present} but no {missing}, so some jobs would bypass it"
    return None


def through(layers: Iterable[Layer], core: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `core` wrapped in the layers, the first of them outermost."""
    call = core
    for layer in reversed(tuple(layers)):
        call = partial(_pass, layer, call)
    return call


def _pass(layer: Layer, call_next: Callable[[Any], Any], subject: Any) -> Any:
    return layer(subject, call_next)


def _made(path: str) -> Any:
    wrong = problem(path)
    if wrong is not None:
        raise ConfigurationError(wrong)
    return import_string(path)()


NONE = Layers()


class LoggingMiddleware:
    """Logs each enqueue and each attempt to `djqueue.jobs`, without payloads."""

    def enqueue(self, batch: Batch, call_next: Callable[[Batch], list[EnqueueResult]]) -> list[EnqueueResult]:
        """Log the number of jobs in the batch and of new jobs."""
        answers = call_next(batch)
        self._enqueued(batch, answers)
        return answers

    async def aenqueue(
        self, batch: Batch, call_next: Callable[[Batch], Awaitable[list[EnqueueResult]]]
    ) -> list[EnqueueResult]:
        """Async version of `enqueue`."""
        answers = await call_next(batch)
        self._enqueued(batch, answers)
        return answers

    def execute(self, job: Any, call_next: Callable[[Any], Any]) -> Any:
        """Log the duration of the handler and its exception."""
        start = time.perf_counter()
        try:
            result = call_next(job)
        except BaseException as error:
            self._raised(job, start, error)
            raise
        self._returned(job, start)
        return result

    async def aexecute(self, job: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        """Async version of `execute`."""
        start = time.perf_counter()
        try:
            result = await call_next(job)
        except BaseException as error:
            self._raised(job, start, error)
            raise
        self._returned(job, start)
        return result

    def _enqueued(self, batch: Batch, answers: list[EnqueueResult]) -> None:
        new = sum(answer.status == "queued" for answer in answers)
        logger.info("Enqueued %d of %d jobs %s in %s.", new, len(answers), batch.name, batch.queue)

    def _returned(self, job: Any, start: float) -> None:
        logger.info("Job %s [%s] completed in %d ms.", job.name, job.id, _since(start), extra=_extra(job))

    def _raised(self, job: Any, start: float, error: BaseException) -> None:
        kind = type(error).__name__
        text = "Job %s [%s] raised %s after %d ms."
        logger.info(text, job.name, job.id, kind, _since(start), extra=_extra(job))


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1_000


def _extra(job: Any) -> dict[str, Any]:
    return {"job_id": job.id, "queue": job.queue, "attempt": job.attempts}

"""Run Celery's messages in a worker of djqueue: `manage.py runworkers --celery proj.celery:app`.

The transport stores each message as a job with the name `kombu.message`. `CeleryTasks` is the handler of that
name: it runs the task with Celery's own request and tracer, so that retries, canvas, results and signals are
Celery's. `ControlThread` answers `celery inspect`, `revoke` and `terminate`, and `Interruptible` ends tasks
at their time limits, or because they were terminated.
"""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, ClassVar, Self

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import Celery, signals
from celery.app.task import Context
from celery.app.trace import trace_task_ret
from celery.app.utils import find_app
from celery.exceptions import Ignore, InvalidTaskError, NotRegistered, Reject, Retry, SoftTimeLimitExceeded
from celery.fixups.django import DjangoFixup
from celery.states import SUCCESS
from celery.utils.collections import AttributeDict
from celery.worker import state
from celery.worker.control import Panel
from celery.worker.request import Request
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2
from kombu.message import Message
from kombu.serialization import prepare_accept_content
from kombu.transport.virtual import Base64

from djqueue.core.errors import ConfigurationError, Snooze, UnrecoverableError
from djqueue.core.executors import INLINE
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.threads import start_daemon
from djqueue.runtime.runs import JobContext, run_of
from djqueue.storage.base import Storage

from .values import MESSAGE, read_message

logger = Log("djqueue.celery")

COMMANDS = (
    "ping",
    "registered",
    "active",
    "reserved",
    "revoked",
    "query_task",
    "clock",
    "revoke",
    "revoke_by_stamped_headers",
    "terminate",
)
"""Commands that need nothing of Celery's own worker; others are answered with an error."""
CONTROL_INTERVAL = 1.0
"""Seconds within which the control thread notices that it should end."""
RETRY_INTERVAL = 5.0
"""Seconds before the next attempt if the broker is unavailable."""
LOST_WORKER = "The worker was lost before the task ended; set acks_late to have such a task run again."


class InvalidMessageError(UnrecoverableError):
    """A message is no task of the app, and can never run."""

    reason = "invalid_payload"


class RejectedError(UnrecoverableError):
    """A task rejected its message."""


class TaskFailedError(UnrecoverableError):
    """A task failed; its result backend has the exception."""


class MessageEnd:
    """The outcome of a message, set by the callbacks of Celery's request."""

    def __init__(self) -> None:
        self.rejected = False
        self.requeued = False

    def ack(self, _logger: Any, _errors: Any) -> None:
        """Note that the message was acknowledged, which happens when the job ends."""

    def reject(self, _logger: Any, _errors: Any, requeue: bool) -> None:
        """Note that the message was rejected."""
        self.rejected, self.requeued = True, requeue


class CeleryTasks:
    """The handler of an app's messages, and the life cycle of the app in this process."""

    name: ClassVar[str] = MESSAGE
    executor: ClassVar[str] = INLINE
    """Celery's signals, remote control and time limits concern this process."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.hostname = f"djqueue-{os.getpid()}@{socket.gethostname()}"
        self.pool = TaskThreads()
        self._control: ControlThread | None = None

    def queues(self) -> list[str]:
        """Return the names of the app's queues."""
        return list(self.app.amqp.queues.consume_from)

    def start(self) -> None:
        """Prepare the app as a Celery worker does, declare its queues, and follow its remote control."""
        app = self.app
        self.hostname = f"djqueue-{os.getpid()}@{socket.gethostname()}"
        app.set_current()
        app.set_default()
        app.finalize()
        for fixup in app._fixups:
            if isinstance(fixup, DjangoFixup):
                # The worker cleans up the connections of its threads. Celery 5.7 connects with a uid.
                uid = getattr(fixup, "_worker_init_uid", None)
                signals.worker_init.disconnect(fixup.on_worker_init, dispatch_uid=uid)
        app.loader.init_worker()
        signals.celeryd_init.send(sender=self.hostname, instance=self, conf=app.conf, options={})
        signals.worker_init.send(sender=self)
        signals.worker_process_init.send(sender=None)
        with app.connection_for_write() as connection:
            for queue in app.amqp.queues.consume_from.values():
                queue(connection.default_channel).declare()
        self._control = ControlThread(app, self.hostname, self.pool)
        signals.worker_ready.send(sender=self)

    def warn_of_rates(self) -> None:
        """Warn of the rate limits of tasks, which only Celery's own worker applies."""
        limited = [
            f"{name} ({task.rate_limit})"
            for name, task in sorted(self.app.tasks.items())
            if task.rate_limit and not name.startswith("celery.")
        ]
        if limited:
            logger.warning(
                "--celery: rate limits of tasks are not applied: %s. Set RATE of their queues in "
                "DJQUEUE['QUEUES'], such as {'emails': {'RATE': '10/m'}}.",
                ", ".join(limited),
            )

    def stop(self) -> None:
        """End the remote control, and tell the app's receivers."""
        signals.worker_shutting_down.send(sender=self.hostname, sig="SIGTERM", how="Warm", exitcode=0)
        if self._control is not None:
            self._control.stop()
        signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
        signals.worker_shutdown.send(sender=self)

    def __call__(self, job: JobContext) -> None:
        """Run the task of a message.

        Raises the control flow that decides the outcome of the job: Snooze before the eta, and
        UnrecoverableError for a task that failed or rejected its message.
        """
        message = self._message(job)
        end = MessageEnd()
        request = self._request(message, end)
        if request.revoked():
            return
        if request.eta is not None and (left := _seconds_until(request.eta)) > 0:
            raise Snooze(delay=left)
        state.task_reserved(request)
        signals.task_received.send(sender=self, request=request)
        if job.stalls and not request.task.acks_late:
            if self._has_succeeded(request):
                return  # Only the report of the outcome was lost.
            request.on_failure(_info_of(WorkerLostError(LOST_WORKER)))
            raise TaskFailedError(f"{request.name}: {LOST_WORKER}")
        try:
            self._run(request)
        finally:
            state.task_ready(request)
        if end.rejected:
            if end.requeued:
                raise Snooze(delay=0)
            raise RejectedError(f"{request.name} rejected its message")

    def _has_succeeded(self, request: Request) -> bool:
        return not request.ignore_result and self.app.AsyncResult(request.id).state == SUCCESS

    def _run(self, request: Request) -> None:
        task = request.task
        hard, soft = request.time_limits or (None, None)
        hard = hard or task.time_limit or self.app.conf.task_time_limit
        soft = soft or task.soft_time_limit or self.app.conf.task_soft_time_limit
        thread = threading.get_ident()
        limits = Interruptible(soft, hard, lambda is_soft, seconds: request.on_timeout(is_soft, seconds))
        self.pool.running[thread] = limits
        try:
            with limits:
                request.on_accepted(thread, time.monotonic())
                result = trace_task_ret(
                    task.name,
                    request.id,
                    request.request_dict,
                    request.body,
                    request.content_type,
                    request.content_encoding,
                    app=self.app,
                )
        except InterruptedTask:
            if request._already_revoked:
                return
            raise TaskFailedError(f"{request.name} exceeded its time limit of {hard:g} s") from None
        finally:
            self.pool.running.pop(thread, None)
        request.on_success(result)
        failed, info, _ = result
        if failed and isinstance(info, ExceptionInfo) and _is_failure(info):
            error = getattr(info.exception, "exc", info.exception)
            raise TaskFailedError(f"{type(error).__name__}: {error}") from error

    def _message(self, job: JobContext) -> Message:
        try:
            raw = read_message(run_of(job).claimed.payload)
            properties = dict(raw["properties"])
            body = raw["body"]
            if properties.pop("body_encoding", None) == "base64":
                body = Base64().decode(body)
        except Exception as error:
            raise _invalid(error) from error
        delivery_info = {**properties.pop("delivery_info"), "redelivered": job.attempts > 1}
        return Message(
            body=body,
            delivery_tag=job.id,
            content_type=raw.get("content-type"),
            content_encoding=raw.get("content-encoding"),
            delivery_info=delivery_info,
            properties=properties,
            headers=raw["headers"],
            accept=prepare_accept_content(self.app.conf.accept_content),
        )

    def _request(self, message: Message, end: MessageEnd) -> Request:
        """Return Celery's request. Raises InvalidMessageError, as a Celery worker rejects such a message."""
        try:
            if "task" in message.headers:
                body, headers, decoded = message.body, message.headers, False
                _check_body(message.decode())  # refuses content that the app does not accept
                utc = self.app.uses_utc_timezone()
            elif "args" in message.payload and message.headers:
                body, headers, decoded, utc = hybrid_to_proto2(message, message.payload)
            else:
                body, headers, decoded, utc = proto1_to_proto2(message, message.payload)
            name, task_id = headers["task"], headers["id"]
        except Exception as error:
            raise _invalid(error) from error
        task = self.app.tasks.get(name)
        if task is None:
            unknown = NotRegistered(name)
            context = Context(headers, args=(), kwargs={})
            self.app.backend.mark_as_failure(task_id, unknown, request=context)
            signals.task_unknown.send(sender=self, message=message, exc=unknown, name=name, id=task_id)
            raise InvalidMessageError(f"the app {self.app.main!r} has no task {name!r}")
        try:
            request = Request(
                message,
                on_ack=end.ack,
                on_reject=end.reject,
                app=self.app,
                hostname=self.hostname,
                task=task,
                body=body,
                headers=headers,
                decoded=decoded,
                utc=utc,
            )
            _check_limits(request.time_limits)
            return request
        except Exception as error:
            raise _invalid(error) from error


def load(path: str, storage: Storage) -> CeleryTasks:
    """Return the handler for an app by its path, as `celery --app` takes it.

    Raises ConfigurationError if there is no app, or if its broker is not this storage.
    """
    try:
        app = find_app(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"--celery {path}: no Celery app was found ({in_one_line(error)}); write MODULE:ATTRIBUTE, such "
            "as proj.celery:app"
        ) from error
    if not isinstance(app, Celery):
        raise ConfigurationError(f"--celery {path}: expected a Celery app, got {type(app).__name__}")
    with app.connection_for_write() as connection:
        transport = connection.transport
        if transport.driver_type != "djqueue":
            raise ConfigurationError(
                f"--celery {path}: the broker of the app is {connection.as_uri()}, and runworkers executes "
                'the messages of djqueue\'s transport only: set broker_url = "djqueue://"'
            )
        if transport.broker.storage is not storage:
            raise ConfigurationError(
                f"--celery {path}: the broker of the app is {connection.as_uri()}, but this worker uses "
                f'{storage.describe()}: set broker_url = "djqueue://", which is the project\'s storage'
            )
    return CeleryTasks(app)


class TaskThreads:
    """The threads of the worker, for Celery's remote control: a revoked task may be terminated."""

    def __init__(self) -> None:
        self.running: dict[int, Interruptible] = {}

    def terminate_job(self, thread: int, signal: Any = None) -> None:
        """Interrupt the task of a thread."""
        running = self.running.get(thread)
        if running is not None:
            running.interrupt()


def _invalid(error: Exception) -> InvalidMessageError:
    """Return the error of a message whose parts, which anyone may have written, are no task."""
    return InvalidMessageError(f"the message is not a task: {type(error).__name__}: {in_one_line(error)}")


def _check_body(body: Any) -> None:
    """Raise InvalidTaskError or ValueError unless a decoded body has the arguments of a task."""
    args, kwargs, embed = body
    if (
        not isinstance(args, (list, tuple))
        or not isinstance(kwargs, dict)
        or not (embed is None or isinstance(embed, dict))
    ):
        raise InvalidTaskError(f"expected [args, kwargs, embed] in the body, got {body!r:.200}")


def _check_limits(limits: Any) -> None:
    """Raise InvalidTaskError unless the time limits of a message are two numbers, or missing."""
    if limits is None:
        return
    if not isinstance(limits, (list, tuple)) or len(limits) != 2:
        raise InvalidTaskError(f"timelimit: expected [hard, soft], got {limits!r:.200}")
    for limit in limits:
        if limit is not None and not isinstance(limit, (int, float)):
            raise InvalidTaskError(f"timelimit: expected seconds, got {limit!r:.200}")


def _is_failure(info: ExceptionInfo) -> bool:
    """Return whether a task failed, rather than having asked for a retry or to be ignored."""
    error = getattr(info.exception, "exc", info.exception)
    return not isinstance(error, (Ignore, Reject, Retry))


def _info_of(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except BaseException:
        return ExceptionInfo()


def _seconds_until(eta: datetime) -> float:
    now = datetime.now(UTC) if eta.tzinfo is not None else datetime.now()  # noqa: DTZ005
    return (eta - now).total_seconds()


class ControlThread:
    """Receives commands of `app.control`, Celery's remote control, and answers them."""

    def __init__(self, app: Celery, hostname: str, pool: Any) -> None:
        self._app = app
        self._stop = threading.Event()
        consumer = AttributeDict(app=app, hostname=hostname, pool=pool)
        self._node = app.control.mailbox.Node(
            hostname,
            handlers={name: Panel.data[name] for name in COMMANDS if name in Panel.data},
            state=AttributeDict(app=app, hostname=hostname, consumer=consumer, tset=set),
        )
        self._thread = start_daemon("djqueue-celery-control", self._run)

    def stop(self) -> None:
        """End, and wait until the thread has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:
                logger.warning(
                    "Celery's remote control is unavailable, retrying in %g s: %s",
                    RETRY_INTERVAL,
                    in_one_line(error),
                )
                self._stop.wait(RETRY_INTERVAL)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            self._node.channel = connection.channel()
            consumer = self._node.listen(callback=self._on_message)
            try:
                while not self._stop.is_set():
                    try:
                        connection.drain_events(timeout=CONTROL_INTERVAL)
                    except TimeoutError:
                        continue
            finally:
                consumer.cancel()

    def _on_message(self, body: Any, message: Any) -> None:
        self._app.clock.forward()
        try:
            self._node.handle_message(body, message)
        except KeyError as error:
            logger.warning("Celery's remote control: unknown command %s.", error)
        except Exception as error:
            # A command that fails must not keep later ones from being answered.
            logger.error("Celery's remote control: a command failed: %s", in_one_line(error))


class InterruptedTask(BaseException):
    """Ends a task that has exceeded its hard time limit, or was terminated.

    Not an Exception, so that a task that handles errors does not go on.
    """


class Interruptible:
    """A block of code on this thread that other threads may interrupt.

    The exception is raised between two bytecodes of Python. A call that blocks outside of Python, such as a
    query or `time.sleep`, ends first.

    Leaving the block waits for an interruption that has begun, and drops one that comes too late.

    Args:
        soft: Seconds after which SoftTimeLimitExceeded is raised; None: never.
        hard: Seconds after which InterruptedTask is raised; None: never.
        on_limit: Called from another thread before either, with True for the soft limit, and the seconds.
    """

    def __init__(
        self, soft: float | None, hard: float | None, on_limit: Callable[[bool, float], object]
    ) -> None:
        self._on_limit = on_limit
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.get_ident()
        self._timers = [
            threading.Timer(seconds, self._reach, (is_soft, seconds))
            for is_soft, seconds in ((True, soft), (False, hard))
            if seconds
        ]

    def __enter__(self) -> Self:
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        while not self._is_over:
            try:
                with self._lock:
                    self._is_over = True
                    _raise_in(self._thread, None)
            except (SoftTimeLimitExceeded, InterruptedTask):
                continue  # arrived after the task had ended
        for timer in self._timers:
            timer.cancel()

    def interrupt(self) -> bool:
        """Raise InterruptedTask in the block; return False if it is over."""
        with self._lock:
            if not self._is_over:
                _raise_in(self._thread, InterruptedTask)
            return not self._is_over

    def _reach(self, is_soft: bool, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self._on_limit(is_soft, seconds)
            _raise_in(self._thread, SoftTimeLimitExceeded if is_soft else InterruptedTask)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread; None removes one that has not been raised yet."""
    value = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)

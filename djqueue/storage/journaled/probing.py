"""Probe a scheduler that does not respond, on one thread for all callers."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from djqueue.core.breaker import CircuitBreaker
from djqueue.core.errors import StorageUnavailableError

PROBE_TIMEOUT = 2.0
"""Seconds within which a scheduler must connect and answer a ping."""


class SchedulerProbe:
    """Sends a ping to a scheduler that is unavailable; all callers wait for the same one.

    Args:
        breaker: The circuit breaker of the connection.
        ping: Sends a ping with a timeout in seconds, and waits for the answer.
        start_thread: Starts a named thread.
    """

    def __init__(
        self,
        breaker: CircuitBreaker,
        ping: Callable[[float], object],
        start_thread: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._breaker = breaker
        self._ping = ping
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._probe: Future[None] | None = None

    def start(self, *, at_once: bool) -> "Future[None] | None":
        """Return the running probe, or start one if it is due or `at_once` is true; None otherwise."""
        with self._lock:
            if self._probe is not None and not self._probe.done():
                return self._probe
            if not self._breaker.enter(at_once=at_once):
                return None
            probe: Future[None] = Future()
            self._probe = probe
        try:
            self._start_thread("djqueue-probe", lambda: self._run(probe))
        except RuntimeError as error:
            # No thread can be started; without this call there would never be another probe.
            self._breaker.gave_up()
            unavailable = StorageUnavailableError(f"no request was sent to the scheduler: {error}")
            settle(probe, error=unavailable)
            raise unavailable from error
        return probe

    def _run(self, probe: "Future[None]") -> None:
        try:
            self._ping(PROBE_TIMEOUT)
        except BaseException as error:
            if self._breaker.outage is not None:
                if isinstance(error, NoSchedulerError):
                    # Every call learns at once that no scheduler is running.
                    self._breaker.succeeded()
                else:
                    self._breaker.failed(str(error))
            settle(probe, error=error)
        else:
            settle(probe)

    def wait(self, timeout: float) -> None:
        """Wait for a probe. Raises StorageUnavailableError if the scheduler does not respond in time."""
        probe = self.start(at_once=True)
        if probe is not None:
            try:
                probe.result(timeout)
            except TimeoutError:
                raise StorageUnavailableError(
                    f"the scheduler did not answer a ping within {timeout:.3g} s"
                ) from None


class NoSchedulerError(StorageUnavailableError):
    """No scheduler is running for this database."""


class LoopAnswer:
    """An answer that a coroutine awaits; another thread sets it."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def set_result(self, value: Any) -> None:
        """Set the value."""
        self._soon(self.future.set_result, value)

    def set_exception(self, error: BaseException) -> None:
        """Set the error."""
        self._soon(self.future.set_exception, error)

    def _soon(self, method: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended, and with it the caller.
            self._loop.call_soon_threadsafe(self._once, method, value)

    def _once(self, method: Callable[[Any], None], value: Any) -> None:
        if not self.future.done():
            method(value)


Answer = Future[Any] | LoopAnswer


def settle(answer: Answer, value: Any = None, error: BaseException | None = None) -> None:
    """Set the result or the error of an answer, unless it has one."""
    with contextlib.suppress(InvalidStateError):  # Its caller already has an answer.
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

"""Failed calls: how long they are repeated, and the errors that callers get."""

import time
from collections.abc import Sequence
from typing import Any

import redis
from redis import exceptions as errors

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import CircuitBreaker, GrowingPause, Outage
from djqueue.core.errors import RestoreInProgressError, StorageError, StorageUnavailableError
from djqueue.core.messages import in_one_line

from .client import is_refusal, refused
from .connections import Connections

TRANSIENT_ERRORS = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ReadOnlyError,
    errors.ClusterDownError,
    errors.MasterDownError,
    errors.TryAgainError,
    errors.SlotNotCoveredError,
)
"""Errors that may pass in a moment: a failover, a restart, a slot that is moving."""
UNAVAILABLE_ERRORS = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ClusterDownError,
    errors.MasterDownError,
)
"""Errors of an unavailable server, after which other calls fail at once."""
WITHOUT_REPLICAS = "NOREPLICAS"
TRANSIENT_PREFIXES = ("BUSY ", "LOADING", "UNKILLABLE", WITHOUT_REPLICAS)
"""Prefixes of errors that may pass in a moment."""
FIRST_WAIT, LAST_WAIT = 0.02, 0.5
"""Seconds between attempts: the first wait, which doubles, and the longest."""


class RetryWindow:
    """The time in which a call may be repeated, and what its end says about the server."""

    def __init__(
        self,
        timeout: float,
        connections: Connections,
        breakers: dict[str, CircuitBreaker],
        name: str,
        *,
        counts: bool,
    ) -> None:
        self._counts = counts
        self._until = time.monotonic() + timeout
        self._pause = GrowingPause(FIRST_WAIT, LAST_WAIT)
        self._connections = connections
        self._breakers = breakers
        self._name = name
        self._is_settled = False

    @property
    def remaining(self) -> float:
        """Seconds left for the call."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, error: redis.RedisError) -> float:
        """Return the seconds until the next attempt. Raises the error for callers if there is none."""
        if is_refusal(error) or not (
            isinstance(error, TRANSIENT_ERRORS) or str(error).startswith(TRANSIENT_PREFIXES)
        ):
            self.succeeded()  # the server has replied
            raise rejection(error, self._connections) from error
        if self._connections.is_single and is_refused(error):
            # Nothing listens there, and no other server takes over: the next call may try at once.
            self.succeeded()
            raise no_answer(error, self._connections) from error
        wait = self._pause.failed()
        if time.monotonic() + wait > self._until:
            outage = no_answer(error, self._connections)
            if isinstance(error, UNAVAILABLE_ERRORS):
                self._failed(str(outage))
            else:
                self.succeeded()
            raise outage from error
        return wait

    def succeeded(self) -> None:
        """Note that the server replies."""
        self._is_settled = True
        if self._breakers and (breaker := self._breakers.get(self._name)) is not None:
            breaker.succeeded()

    def gave_up(self, error: BaseException) -> None:
        """Note that the call has ended without a reply."""
        if self._is_settled:
            return
        if isinstance(error, StorageUnavailableError):
            self._failed(str(error))  # the nodes of a cluster could not be read
        elif (breaker := self._breakers.get(self._name)) is not None:
            breaker.gave_up()

    def judge(self, replies: Sequence[Any]) -> None:
        """Note what replies say about the server. Raises the error for callers if none can be repeated."""
        for reply in replies:
            if isinstance(reply, redis.RedisError) and not isinstance(reply, errors.NoScriptError):
                time.sleep(self.wait(reply))
                self.gave_up(reply)
                return
        self.succeeded()

    def _failed(self, reason: str) -> None:
        if self._counts:
            self._is_settled = True
            self._breakers.setdefault(self._name, CircuitBreaker()).failed(reason)


def is_refused(error: BaseException) -> bool:
    """Return whether nothing listens at the address of a failed connection."""
    return isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)


def unavailable_for(outage: Outage) -> str:
    """Return the error message for calls during an outage."""
    seconds = max(0, SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"{outage.reason} The server has been unavailable for {seconds:.1f} s; retrying soon."


def no_answer(error: Exception, connections: Connections) -> StorageUnavailableError:
    """Return the error for a server that cannot be reached or accepts no writes."""
    reason = in_one_line(error)
    if reason.startswith(WITHOUT_REPLICAS):
        return StorageUnavailableError(
            f"{connections.describe()} accepts no writes: {reason} The server has fewer replicas than its "
            "min-replicas-to-write requires."
        )
    return StorageUnavailableError(
        f"{connections.describe()} does not answer: {reason.rstrip('.')}. Is it running?"
    )


def rejection(error: redis.RedisError, connections: Connections) -> StorageError:
    """Return the error for a command that Redis rejects."""
    reason = in_one_line(error)
    if reason.startswith("RESTORING"):  # see `request.lua`
        return RestoreInProgressError()
    if isinstance(error, errors.OutOfMemoryError):
        return StorageUnavailableError(
            f"{connections.describe()} is out of memory: {reason}. Increase maxmemory or free memory."
        )
    if is_refusal(error):
        return refused(connections.describe(), error)
    return StorageError(f"{connections.describe()}: {reason}")

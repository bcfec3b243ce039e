"""Failed calls: how long they are repeated, and the errors that callers get."""

from time import monotonic
from typing import NamedTuple

import redis
from redis import exceptions as errors

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import CircuitBreaker, GrowingPause, Outage
from djqueue.core.errors import RestoreInProgressError, StorageError, StorageUnavailableError
from djqueue.core.messages import in_one_line

from .client import is_refusal, remedy_of_refusal
from .connections import Connections


class Condition(NamedTuple):
    """A condition in which a server replies, but does not do what it is asked to."""

    text: str
    """Text of the error after the address of the server."""
    remedy: str
    passes: bool = True
    """True if it may pass in a moment, so that the call is repeated."""


CONDITIONS = {
    "MISCONF": Condition(
        "accepts no writes",
        "Redis could not save its data to disk: see its log, and free disk space.",
        passes=False,
    ),
    "OOM": Condition("is out of memory", "Increase maxmemory or free memory.", passes=False),
    "READONLY": Condition(
        "accepts no writes",
        "It is a replica: use the address of its master, or SENTINELS to follow failovers.",
    ),
    "NOREPLICAS": Condition(
        "accepts no writes", "The server has fewer replicas than its min-replicas-to-write requires."
    ),
    "UNBLOCKED": Condition("stopped waiting for its replicas", "It has become a replica of another server."),
    "MASTERDOWN": Condition("serves no data", "It is a replica that has lost its master: check the master."),
    "LOADING": Condition("is loading its data", "It answers when it has finished."),
    "BUSY": Condition(
        "is busy with a script or function",
        "Wait for its end, or see busy-reply-threshold and SCRIPT KILL if it is not one of djqueue's.",
    ),
    "CLUSTERDOWN": Condition(
        "does not serve these keys", "Check the masters with redis-cli --cluster check."
    ),
    "TRYAGAIN": Condition("is moving these keys", "Try again when the slot has been moved."),
    "max number of clients": Condition(
        "accepts no more connections",
        "Increase maxclients, or lower max_connections in CONNECTION and the number of processes.",
    ),
}
"""Conditions by the code at the beginning of the error. None of them is a fault of a command."""
CODES: dict[type[Exception], str] = {
    errors.OutOfMemoryError: "OOM",
    errors.ReadOnlyError: "READONLY",
    errors.BusyLoadingError: "LOADING",
    errors.MasterDownError: "MASTERDOWN",
    errors.ClusterDownError: "CLUSTERDOWN",
    errors.TryAgainError: "TRYAGAIN",
    errors.SlotNotCoveredError: "CLUSTERDOWN",
}
"""The codes that redis-py removes from its errors."""
UNAVAILABLE_ERRORS = (errors.ConnectionError, errors.TimeoutError)
"""Errors of an unavailable server, after which other calls fail at once."""
FIRST_WAIT, LAST_WAIT = 0.02, 0.5
"""Seconds between attempts: the first wait, which doubles, and the longest."""


class RetryWindow:
    """The time in which a call may be repeated, and what its end says about the server.

    Args:
        name: The name of the server's circuit breaker.
        keys: The name of the one for these keys, if a Cluster does not serve their slot.
    """

    def __init__(
        self,
        timeout: float,
        connections: Connections,
        breakers: dict[str, CircuitBreaker],
        name: str,
        keys: str,
        *,
        counts: bool,
    ) -> None:
        self._counts = counts
        self._until = monotonic() + timeout
        self._pause: GrowingPause | None = None
        self._connections = connections
        self._breakers = breakers
        self._name = name
        self._keys = keys
        self._is_settled = False

    @property
    def remaining(self) -> float:
        """Seconds left for the call."""
        return max(0.0, self._until - monotonic())

    def wait(self, error: redis.RedisError) -> float:
        """Return the seconds until the next attempt. Raises the error for callers if there is none."""
        if is_refusal(error) or not _may_pass(error):
            self.succeeded()  # the server has replied
            raise rejection(error, self._connections) from error
        if self._connections.is_single and is_refused(error):
            # Nothing listens there, and no other server takes over: the next call may try at once.
            self.succeeded()
            raise no_answer(error, self._connections) from error
        self._pause = self._pause or GrowingPause(FIRST_WAIT, LAST_WAIT)
        wait = self._pause.failed()
        if monotonic() + wait > self._until:
            outage = no_answer(error, self._connections)
            if isinstance(error, UNAVAILABLE_ERRORS):
                self._failed(str(outage), self._name)
            else:
                self.succeeded()
                if isinstance(error, errors.ClusterDownError):
                    self._failed(str(outage), self._keys if self._name else "")
            raise outage from error
        return wait

    def succeeded(self) -> None:
        """Note that the server replies."""
        self._is_settled = True
        if self._breakers and (breaker := self._breakers.pop(self._name, None)) is not None:
            breaker.succeeded()

    def gave_up(self, error: BaseException) -> None:
        """Note that the call has ended without a reply."""
        if self._is_settled:
            return
        if isinstance(error, StorageUnavailableError):
            self._failed(str(error), self._name)  # the nodes of a cluster could not be read
        # A call with little time left says nothing about the server, but another one may probe it now.
        if not self._is_settled and (breaker := self._breakers.get(self._name)) is not None:
            breaker.gave_up()

    def _failed(self, reason: str, name: str) -> None:
        if self._counts:
            self._is_settled = True
            self._breakers.setdefault(name, CircuitBreaker()).failed(reason)


def is_refused(error: BaseException) -> bool:
    """Return whether nothing listens at the address of a failed connection."""
    return isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)


def unavailable_for(outage: Outage) -> str:
    """Return the error message for calls during an outage."""
    seconds = max(0, SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"{outage.reason} The server has been unavailable for {seconds:.1f} s; retrying soon."


def no_answer(error: Exception, connections: Connections) -> StorageUnavailableError:
    """Return the error for a server that cannot be reached, or does not do what it is asked to."""
    known = condition(error)
    text = "refuses access" if is_refusal(error) else "does not answer" if known is None else known.text
    raised = StorageUnavailableError(f"{connections.describe()} {text}: {with_remedy(error)}")
    raised.remedy = remedy(error)
    return raised


def with_remedy(error: BaseException) -> str:
    """Return the reason of a failure and what to do about it."""
    return f"{in_one_line(error).rstrip('.')}. {remedy(error)}"


def remedy(error: BaseException) -> str:
    """Return what to do about a failure."""
    if is_refusal(error):
        return remedy_of_refusal(error)
    known = condition(error)
    return "Is it running?" if known is None else known.remedy


def rejection(error: redis.RedisError, connections: Connections) -> StorageError:
    """Return the error for a command that Redis rejects."""
    reason = in_one_line(error)
    if reason.startswith("RESTORING"):  # see `request.lua`
        return RestoreInProgressError()
    if is_refusal(error) or condition(error) is not None:
        return no_answer(error, connections)
    return StorageError(f"{connections.describe()}: {reason}")


def condition(error: BaseException) -> Condition | None:
    """Return the condition of a server that an error reports."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CONDITIONS[CODES[kind]]
    text = str(error)
    return next((known for code, known in CONDITIONS.items() if text.startswith(f"{code} ")), None)


def _may_pass(error: redis.RedisError) -> bool:
    """Return whether an error may pass in a moment: a failover, a restart, a slot that is moving."""
    known = condition(error)
    if known is not None:
        return known.passes
    return isinstance(error, (errors.ConnectionError, errors.TimeoutError))

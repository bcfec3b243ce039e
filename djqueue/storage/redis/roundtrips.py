"""Calls of scripts: sent by hash, repeated if the reply was lost, and finished within the time limit.

Each operation of the storage is written once, as a generator that yields lists of calls and receives their
replies; `Roundtrips` runs it on a thread or on an event loop.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeGuard, TypeVar

import redis
from redis import exceptions as errors

from djqueue.core.clock import Clock
from djqueue.core.deadlines import CircuitBreaker, Outage, remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Incident
from djqueue.core.logs import Log
from djqueue.core.threads import after_fork, on_thread

from .connections import Connections
from .exchange import Exchange, Pipeline
from .keys import QueueKeys
from .records import NUMBER, incident
from .retries import RetryWindow, unavailable_for
from .scripts import Script

READS = frozenset({b"GET", b"HGET", b"HMGET"})
"""Read commands that are sent together; the key is their first argument."""
NAMED_IDS = 20
"""Maximum number of job ids that an error names."""
T = TypeVar("T")
COUNTED = 0.9
"""Minimum share of TIMEOUT that a failed call must have had to count against the server."""
REPLICATION_SHARE = 0.8
"""Share of a call's time limit in which replicas must confirm it; the rest is for the reply."""
IN_FLIGHT = 2
"""Calls of one bulk operation that are sent before their replies are read."""
READS_IN_FLIGHT = 16
"""Concurrent reading calls of one operation in a cluster."""
REPEATABLE = 45.0
"""Seconds after a request in which it may be repeated: scripts remember replies for a minute."""
logger = Log("djqueue.redis")


class ScriptCall(NamedTuple):
    """A call of a script. A script without a request sequence only reads, or may be repeated."""

    script: Script
    queue: QueueKeys
    arguments: Sequence[Any]
    """The script's own arguments."""
    keys: Sequence[bytes] = ()
    """Keys after those that the script declares."""
    sequence: bool = True
    replicas: int = 0
    """Number of replicas that must confirm its changes."""
    ids: Sequence[str] = ()
    """Ids of the enqueued jobs, if replicas must confirm them: the ids may be generated."""
    is_optional: bool = False
    """True if the reply is a StorageUnavailableError, instead of raising it, while the server is away."""


class RedisCommand(NamedTuple):
    """A Redis command that only reads, or may be repeated."""

    words: tuple[Any, ...]


Steps = Generator[list[ScriptCall | RedisCommand], list[Any], T]
"""An operation."""


class RequestSequence:
    """Numbers the requests of one caller at a time, so that scripts recognize a repeated request."""

    __slots__ = ("name", "number")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.number = 0


class SentCall(NamedTuple):
    """A call of a pipeline whose reply was not received yet."""

    call: ScriptCall | RedisCommand
    sequence: RequestSequence | None
    words: list[Any]
    at: float
    """Monotonic time at which it was sent."""


class Roundtrips:
    """Runs operations.

    timeout: seconds after which a call fails.
    stream: approximate length of a queue's stream of changes; 0 disables it.
    report: receives incidents: see `Storage.on_incidents`.
    clock: replaces Redis's time, for tests.
    """

    def __init__(
        self,
        connections: Connections,
        timeout: float,
        stream: int,
        report: Callable[[list[Incident]], None],
        clock: Clock | None = None,
    ) -> None:
        self._report = report
        self._connections = connections
        self._exchange = Exchange(connections, timeout)
        self._timeout = timeout
        self._clock = clock
        self._stream = b"%d" % stream
        self._is_cluster = connections.is_cluster
        self.has_several_servers = self._is_cluster
        self.publish = b"SPUBLISH" if self._is_cluster else b"PUBLISH"
        self._sequences: deque[RequestSequence] = deque()
        self._prefix = os.urandom(8).hex().encode()
        self._made = count(1)
        self._sent: set[Any] = set()
        """Hashes of the scripts whose text has been sent."""
        self._breakers: dict[str, CircuitBreaker] = {}
        """Circuit breakers of servers that missed a deadline: in a Cluster by node, and by the prefix of keys
        that no node serves; otherwise under ""."""
        after_fork(self._after_fork)

    def close(self) -> None:
        """Close all connections."""
        self._exchange.forget()
        self._connections.close()

    @property
    def outage(self) -> Outage | None:
        """The longest current outage of a server; None if all respond."""
        outages = [breaker.outage for breaker in list(self._breakers.values())]
        return min((outage for outage in outages if outage is not None), default=None)

    def is_away(self, prefix: str) -> bool:
        """Return whether the server of keys has missed a deadline, so that only single calls ask it."""
        breaker = self._breakers.get(self._server_of(prefix))
        return breaker is not None and breaker.outage is not None

    def run(self, steps: Steps[T]) -> T:
        """Run an operation on this thread."""
        try:
            calls = next(steps)
            while True:
                try:
                    answers = self._answers(calls)
                except Exception as error:
                    calls = steps.throw(error)
                else:
                    self._report_incidents(calls, answers)
                    calls = steps.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result

    async def arun(self, steps: Steps[T]) -> T:
        """Async version of `run`."""
        try:
            calls = next(steps)
            while True:
                try:
                    if len(calls) == 1:
                        answers = [await self._aone(calls[0])]
                    else:
                        answers = await self._aanswers(calls)
                except Exception as error:
                    calls = steps.throw(error)
                else:
                    self._report_incidents(calls, answers)
                    calls = steps.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result

    def call(self, call: ScriptCall) -> Any:
        """Make one call that needs no replicas, and return its reply."""
        answer = self._one(call)
        if call.sequence and len(answer) > 2:
            self._report_incidents([call], [answer])
        return answer

    async def acall(self, call: ScriptCall) -> Any:
        """Async version of `call`."""
        answer = await self._aone(call)
        if call.sequence and len(answer) > 2:
            self._report_incidents([call], [answer])
        return answer

    def _report_incidents(self, calls: list[ScriptCall | RedisCommand], answers: list[Any]) -> None:
        """Report the incidents that scripts add to their replies."""
        for call, answer in zip(calls, answers, strict=True):
            if type(call) is ScriptCall and call.sequence and type(answer) is list and len(answer) > 2:
                self._report([incident(call.queue.queue, found) for found in answer.pop()])

    def _answers(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        if len(calls) < 2 or any(map(_is_replicated, calls)):
            return [self._one(call) for call in calls]
        only_read = all(map(_only_reads, calls))
        if isinstance(calls[0], RedisCommand) and (not self._is_cluster or (only_read and len(calls) > 2)):
            return self._together(calls)
        if len(calls) < 3 or (self._is_cluster and not only_read):
            return [self._one(call) for call in calls]
        # The first one is sent alone, so that the server then knows the script.
        first = self._one(calls[0])
        return [first, *(self._together(calls[1:]) if only_read else self.stream(calls[1:]))]

    def _one(self, call: ScriptCall | RedisCommand) -> Any:
        if _is_replicated(call):
            return self._replicated(call)
        sequence = self._sequence(call)
        words = self._words(call, sequence)
        try:
            answer = self._until_answered(call, words, self._window(call), self._exchange.ask)
        except StorageUnavailableError as error:
            return _instead(call, error)
        self._free(sequence)
        return answer

    def _replicated(self, call: ScriptCall) -> Any:
        """Make one call, and wait until enough replicas have confirmed its changes."""
        sequence = self._sequence(call)
        words, window = self._words(call, sequence), self._window(call)
        patience = 0.0

        def send(words: list[Any]) -> tuple[Any, int]:
            # Computed for each attempt, since earlier ones have used up some of the call's time.
            nonlocal patience
            patience = window.remaining * REPLICATION_SHARE
            return self._exchange.ask_replicated(words, call.queue.replicated, call.replicas, patience)

        answer, confirmed = self._until_answered(call, words, window, send)
        if confirmed < call.replicas:
            raise StorageUnavailableError(
                f"{self._connections.describe()}: {confirmed} of {call.replicas} replicas confirmed a "
                f"durable enqueue to queue {call.queue.queue!r} within {patience:.2g} s. The jobs may be "
                "lost in a failover; enqueue them again with the same ids to have them confirmed."
                f"{_named(call.ids)}"
            )
        self._free(sequence)
        return answer

    def _together(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Send all calls at once, each to the server with its keys, in order; repeat those that failed."""
        sequences = [self._sequence(call) for call in calls]
        requests = [self._words(call, sequence) for call, sequence in zip(calls, sequences, strict=True)]
        windows = self._windows(calls)
        asked = [at for at, window in enumerate(windows) if isinstance(window, RetryWindow)]
        answers: list[Any] = list(windows)
        try:
            replies = self._exchange.ask_many([requests[at] for at in asked])
        except BaseException as error:
            _give_up(windows, error)
            raise
        for at, reply in zip(asked, replies, strict=True):
            answers[at], window = reply, windows[at]
            if isinstance(window, RetryWindow) and not isinstance(reply, redis.RedisError):
                window.succeeded()
        try:
            for at, (call, words, window) in enumerate(zip(calls, requests, windows, strict=True)):
                if not isinstance(window, RetryWindow):
                    answers[at] = _instead(call, window)
                elif isinstance(answers[at], redis.RedisError):
                    answers[at] = self._repeated(call, words, window, answers[at])
        except BaseException:
            _give_up(windows, redis.RedisError())  # what failed is no fault of the other servers
            raise
        for sequence in sequences:
            self._free(sequence)
        return answers

    def _windows(
        self, calls: Iterable[ScriptCall | RedisCommand]
    ) -> list[RetryWindow | StorageUnavailableError]:
        """Begin calls that are sent together; those to one server share its window, or its error."""
        by_server: dict[str, RetryWindow | StorageUnavailableError] = {}
        windows = []
        for call in calls:
            name = self._server_of(_prefix_of(call))
            if name not in by_server:
                try:
                    by_server[name] = self._window(call)
                except StorageUnavailableError as error:
                    by_server[name] = error
            windows.append(by_server[name])
        return windows

    def _repeated(
        self,
        call: ScriptCall | RedisCommand,
        words: list[Any],
        window: RetryWindow,
        failure: redis.RedisError,
    ) -> Any:
        """Return the reply to a call whose first attempt has failed."""

        def first(_: list[Any]) -> Any:
            raise failure

        try:
            return self._until_answered(call, words, window, self._exchange.ask, first)
        except StorageUnavailableError as error:
            return _instead(call, error)

    def _until_answered(
        self,
        call: ScriptCall | RedisCommand,
        words: list[Any],
        window: RetryWindow,
        send: Callable[[list[Any]], T],
        first: Callable[[list[Any]], T] | None = None,
        until: float = math.inf,
    ) -> T:
        """Return the reply of `send`, which takes the call's words; repeat it after temporary errors.

        first: takes the place of `send` in the first attempt.
        until: the monotonic time after which a call that changes something is not repeated.
        """
        attempt = first or send
        try:
            while True:
                try:
                    answer = attempt(words)
                    break
                except errors.NoScriptError:
                    words = _with_text(call, words)
                except redis.RedisError as error:
                    sleep(window.wait(error))
                if _has_sequence(call) and monotonic() > until:
                    raise StorageUnavailableError(
                        f"{self._connections.describe()}: the reply to a request was lost, and its caller "
                        "came back to it too late to repeat it. Its changes may have been made."
                    )
                attempt = send
        except BaseException as error:
            window.gave_up(error)
            raise
        window.succeeded()
        return answer

    def stream(self, calls: Iterable[ScriptCall | RedisCommand]) -> Iterator[Any]:
        """Make calls on one connection of the single server, and yield their replies in order.

        The next call is taken and sent while earlier ones are in flight. Calls whose replies are lost are
        repeated before another one is sent. If `calls` raises an exception, the replies of the calls that
        were sent are yielded first.
        """
        source, failure = iter(calls), None
        pipeline = Pipeline(self._exchange)
        sent: deque[SentCall] = deque()
        try:
            while True:
                try:
                    call = None if failure is not None else next(source, None)
                except Exception as error:
                    call, failure = None, error
                is_unavailable = self.outage is not None
                while sent and (
                    call is None or is_unavailable or not pipeline.is_open or len(sent) == IN_FLIGHT
                ):
                    yield self._received(pipeline, sent.popleft())
                if call is None:
                    break
                if is_unavailable:
                    yield self._one(call)  # fails at once during an outage
                    continue
                sequence = self._sequence(call)
                words = self._words(call, sequence)
                pipeline.send(words)
                sent.append(SentCall(call, sequence, words, monotonic()))
            if failure is not None:
                raise failure
        finally:
            pipeline.close(is_clean=not sent)

    def _received(self, pipeline: Pipeline, sent: SentCall) -> Any:
        """Return the reply of the oldest call of a pipeline; repeat the call if its reply was lost."""
        answer = self._until_answered(
            sent.call,
            sent.words,
            self._window(sent.call),
            self._exchange.ask,
            first=lambda _: pipeline.receive(),
            until=sent.at + REPEATABLE,
        )
        self._free(sent.sequence)
        return answer

    async def _aanswers(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Make several calls."""
        if self._is_cluster and all(map(_only_reads, calls)):
            limit = asyncio.Semaphore(READS_IN_FLIGHT)

            async def one(call: ScriptCall | RedisCommand) -> Any:
                async with limit:
                    return await self._aone(call)

            return await asyncio.gather(*map(one, calls))
        if self._is_cluster or any(map(_is_replicated, calls)):
            # In order: a later call must not overtake an earlier one.
            return [await self._aone(call) for call in calls]
        answers: list[Any] = []
        size = IN_FLIGHT if any(map(_has_sequence, calls)) else len(calls)
        for start in range(0, len(calls), size):
            answers += await self._atogether(calls[start : start + size])
        return answers

    async def _atogether(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Make calls in one round trip to the single server, in order; repeat those that failed, in order."""
        window = self._window(calls[0])
        sequences = [self._sequence(call) for call in calls]
        requests = [self._words(call, sequence) for call, sequence in zip(calls, sequences, strict=True)]
        try:
            answers = await self._exchange.aask_many(requests)
        except redis.RedisError as error:
            answers = [error] * len(calls)
        except BaseException as error:
            window.gave_up(error)
            raise
        for at, (call, words) in enumerate(zip(calls, requests, strict=True)):
            failure = answers[at]
            if isinstance(failure, redis.RedisError):
                answers[at] = await self._auntil_answered(call, words, window, failure)
        window.succeeded()
        for sequence in sequences:
            self._free(sequence)
        return answers

    async def _aone(self, call: ScriptCall | RedisCommand) -> Any:
        if _is_replicated(call):
            return await on_thread(self._replicated, call)
        sequence = self._sequence(call)
        words = self._words(call, sequence)
        try:
            answer = await self._auntil_answered(call, words, self._window(call))
        except StorageUnavailableError as error:
            return _instead(call, error)
        self._free(sequence)
        return answer

    async def _auntil_answered(
        self,
        call: ScriptCall | RedisCommand,
        words: list[Any],
        window: RetryWindow,
        failure: redis.RedisError | None = None,
    ) -> Any:
        """Return the reply; repeat the call after temporary errors.

        failure: the error of the first attempt, if it was made already.
        """
        try:
            while True:
                try:
                    if failure is not None:
                        raise failure
                    answer = await self._exchange.aask(words)
                    break
                except errors.NoScriptError:
                    words = _with_text(call, words)
                except redis.RedisError as error:
                    await asyncio.sleep(window.wait(error))
                failure = None
        except BaseException as error:
            window.gave_up(error)
            raise
        window.succeeded()
        return answer

    def _window(self, call: ScriptCall | RedisCommand) -> RetryWindow:
        """Begin a call. Raises StorageUnavailableError at once if its server is known to be unavailable."""
        keys = name = ""
        if self._is_cluster:
            keys = _prefix_of(call)
            name = self._server_of(keys)
        breaker = self._breakers.get(name)
        if breaker is not None and not breaker.enter():
            outage = breaker.outage
            if outage is not None:  # otherwise it has just come back
                raise StorageUnavailableError(unavailable_for(outage))
        left = remaining(self._timeout)
        if not left:
            if breaker is not None:
                breaker.gave_up()
            raise StorageUnavailableError(
                f"no request was sent to {self._connections.describe()}: the time limit has passed"
            )
        counts = left >= COUNTED * self._timeout
        return RetryWindow(left, self._connections, self._breakers, name, keys, counts=counts)

    def _server_of(self, keys: str) -> str:
        """Return the name of the circuit breaker for keys."""
        if not self._is_cluster:
            return ""
        return keys if keys in self._breakers else self._connections.node_of(keys) or keys

    # The words of a call.

    def _words(self, call: ScriptCall | RedisCommand, sequence: RequestSequence | None) -> list[Any]:
        if isinstance(call, RedisCommand):
            return list(call.words)
        script, queue = call.script, call.queue
        keys = queue.of(script.keys)
        now = b"" if self._clock is None else self._clock.now()
        if sequence is None:
            return [
                *self._command(script),
                len(keys) + len(call.keys),
                *keys,
                *call.keys,
                now,
                *call.arguments,
            ]
        # The sequence's key is the first one of every script that has it.
        return [
            *self._command(script),
            len(keys) + len(call.keys),
            queue.sequence(sequence.name),
            *keys[1:],
            *call.keys,
            now,
            NUMBER.pack(sequence.number),
            *((queue.prefix.encode(), self.publish) if script.publishes else ()),
            self._stream,
            *call.arguments,
        ]

    def _command(self, script: Script) -> tuple[bytes, bytes]:
        """Call a script by its hash, or by its text the first time.

        A hash that the server does not know would cost another round trip.
        """
        if script.sha in self._sent:
            return b"EVALSHA", script.sha
        self._sent.add(script.sha)
        return b"EVAL", script.text

    def _sequence(self, call: ScriptCall | RedisCommand) -> RequestSequence | None:
        if type(call) is not ScriptCall or not call.sequence:
            return None
        try:
            sequence = self._sequences.pop()
        except IndexError:
            sequence = RequestSequence(b"%s%x" % (self._prefix, next(self._made)))
        sequence.number += 1
        return sequence

    def _free(self, sequence: RequestSequence | None) -> None:
        # A sequence without a reply is not reused: its request may still arrive.
        if sequence is not None:
            self._sequences.append(sequence)

    def _after_fork(self) -> None:
        self._sequences.clear()
        self._breakers = {}
        self._prefix = os.urandom(8).hex().encode()


def _only_reads(call: ScriptCall | RedisCommand) -> bool:
    return not call.sequence if isinstance(call, ScriptCall) else call.words[0] in READS


def _is_replicated(call: ScriptCall | RedisCommand) -> TypeGuard[ScriptCall]:
    return isinstance(call, ScriptCall) and call.replicas > 0


def _has_sequence(call: ScriptCall | RedisCommand) -> bool:
    return isinstance(call, ScriptCall) and call.sequence


def _prefix_of(call: ScriptCall | RedisCommand) -> str:
    """Return the part of a call's keys that determines the node of a cluster."""
    if isinstance(call, ScriptCall):
        return call.queue.prefix
    key = next((word for word in call.words[1:] if isinstance(word, bytes) and b"}" in word), b"")
    return key[: key.find(b"}") + 1].decode()


def _instead(call: ScriptCall | RedisCommand, error: StorageUnavailableError) -> StorageUnavailableError:
    """Return the reply to a call that could not be made. Raises the error unless the call is optional."""
    if isinstance(call, ScriptCall) and call.is_optional:
        return error
    raise error


def _give_up(windows: Iterable[RetryWindow | StorageUnavailableError], error: BaseException) -> None:
    for window in windows:
        if isinstance(window, RetryWindow):
            window.gave_up(error)


def _named(ids: Sequence[str]) -> str:
    """Return the ids for the end of a message; only the first ones if there are many."""
    if not ids:
        return ""
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return f" Ids: {', '.join(ids[:NAMED_IDS])}{more}."


def _with_text(call: ScriptCall | RedisCommand, words: list[Any]) -> list[Any]:
    """Return the call with the script's text: the server has restarted and does not know it."""
    assert isinstance(call, ScriptCall)
    return [b"EVAL", call.script.text, *words[2:]]

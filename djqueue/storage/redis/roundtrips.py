"""Calls of scripts: sent by their hashes, sent again if an answer was lost, and in time or not at all.

What a storage does is written once, as a generator that yields lists of calls and is given their
answers; `Roundtrips` runs it on a thread or on a loop.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeGuard, TypeVar

import redis
from hiredis import pack_command
from redis import exceptions as errors

from djqueue.core import deadline
from djqueue.core.breaker import CircuitBreaker, Outage
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.forks import after_fork
from djqueue.core.job import Incident
from djqueue.core.shown import in_one_line

from .connections import Connections
from .exchange import Exchange
from .keys import QueueKeys
from .records import NUMBER, incident
from .scripts import Script

T = TypeVar("T")

AWAY = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ReadOnlyError,
    errors.ClusterDownError,
    errors.MasterDownError,
    errors.TryAgainError,
    errors.SlotNotCoveredError,
)
"""Errors that may be over in a moment: a failover, a restart, a slot on its way."""
ABSENT = (errors.ConnectionError, errors.TimeoutError, errors.ClusterDownError, errors.MasterDownError)
"""Those of them after which others need not wait as long: nobody does the work at all."""
WITHOUT_REPLICAS = "NOREPLICAS"
REFUSALS = ("WRONGPASS", "NOAUTH", "NOPERM")
"""What a server says to a wrong password, to none, and to a user who may not; a cluster's errors quote it."""
PASSING = ("BUSY ", "LOADING", "UNKILLABLE", WITHOUT_REPLICAS)
"""How answers begin that may be others in a moment."""
FIRST_WAIT, LAST_WAIT = 0.02, 0.5
"""Seconds between tries, doubled."""
READS = frozenset({b"GET", b"HGET", b"HMGET"})
"""Commands of which many go at once, each with its key behind it."""
COUNTED = 0.9
"""Part of TIMEOUT that a call must have had; one that had less says nothing about the server by failing."""
REPLICATION_SHARE = 0.8
"""Share of a call's time limit in which replicas have to confirm it; the answer needs the rest."""
NAMED_IDS = 20
"""Ids of jobs that an error names at most."""
IN_FLIGHT = 2
"""Calls of one bulk operation that are on their way at once."""

logger = logging.getLogger("djqueue.redis")


class ScriptCall(NamedTuple):
    """A call of a script. Without a lane it changes nothing, or nothing more when it is sent again."""

    script: Script
    queue: QueueKeys
    arguments: Sequence[Any]
    """Behind those that every script has."""
    keys: Sequence[bytes] = ()
    """Behind the script's own."""
    sequence: bool = True
    replicas: int = 0
    """How many replicas have to have what it changes before it counts as answered."""
    ids: Sequence[str] = ()
    """Of the jobs that it enqueues, where replicas have to have them: they may be generated."""


class RedisCommand(NamedTuple):
    """A command of Redis's own that only reads, or may be repeated."""

    words: tuple[Any, ...]


Steps = Generator[list[ScriptCall | RedisCommand], list[Any], T]
"""What an operation is written as."""


class RequestSequence:
    """Numbers the requests of one caller at a time, so that one that is sent again is known again."""

    __slots__ = ("name", "number")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.number = 0


class Roundtrips:
    """Runs operations.

    timeout: seconds within which a call is answered or fails.
    clock: whose time counts instead of Redis's; for tests.
    stream: about how many entries a queue's stream of changes keeps; 0: there is none.
    told: told of incidents: see `Storage.on_incidents`.
    """

    def __init__(
        self,
        connections: Connections,
        timeout: float,
        stream: int,
        told: Callable[[list[Incident]], None],
        clock: Clock | None = None,
    ) -> None:
        self._told = told
        self._connections = connections
        self._exchange = Exchange(connections, timeout)
        self._timeout = timeout
        self._clock = clock
        self._stream = b"%d" % stream
        self.publish = b"SPUBLISH" if connections.is_cluster else b"PUBLISH"
        self._sequences: deque[RequestSequence] = deque()
        self._prefix = os.urandom(8).hex().encode()
        self._made = count(1)
        self._sent: set[Any] = set()
        """Hashes of the scripts whose text has been sent."""
        self._breakers: dict[str, CircuitBreaker] = {}
        """Of servers that have missed a deadline: of the only one, by no name; in a Cluster by queue, since a
        queue is on one of them."""
        after_fork(self._after_fork)

    def close(self) -> None:
        """Let the connections go."""
        self._exchange.forget()
        self._connections.close()

    @property
    def outage(self) -> Outage | None:
        """The longest time that a server has been away for by now; None if all answer."""
        found = [breaker.outage for breaker in list(self._breakers.values())]
        return min((outage for outage in found if outage is not None), default=None)

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
                    self._hear(calls, answers)
                    calls = steps.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result

    async def arun(self, steps: Steps[T]) -> T:
        """Run an operation on this loop."""
        try:
            calls = next(steps)
            while True:
                try:
                    answers = await self._aanswers(calls)
                except Exception as error:
                    calls = steps.throw(error)
                else:
                    self._hear(calls, answers)
                    calls = steps.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result

    def _hear(self, calls: list[ScriptCall | RedisCommand], answers: list[Any]) -> None:
        """Take out of the answers what scripts tell beside them."""
        for call, answer in zip(calls, answers, strict=True):
            if type(call) is ScriptCall and call.sequence and len(answer) > 2:
                self._told([incident(call.queue.queue, found) for found in answer.pop()])

    def _answers(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        if any(map(_is_replicated, calls)):
            return [self._replicated(call) if _is_replicated(call) else self._one(call) for call in calls]
        if len(calls) < 2:
            return [self._one(call) for call in calls]
        is_cluster = self._connections.is_cluster
        only_read = all(map(_only_reads, calls))
        if isinstance(calls[0], RedisCommand) and (not is_cluster or (only_read and len(calls) > 2)):
            return self._together(calls)
        if len(calls) < 3 or (is_cluster and not only_read):
            return [self._one(call) for call in calls]
        # The first alone: it makes the script known.
        first = self._one(calls[0])
        return [first, *(self._together(calls[1:]) if only_read else self._pipelined(calls[1:]))]

    def _together(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Send each server all calls that it has the keys of at once, in order; repeat those that failed."""
        trying = None if self._connections.is_cluster else self._trying(calls[0])
        sequences = [self._sequence(call) for call in calls]
        requests = [self._words(call, sequence) for call, sequence in zip(calls, sequences, strict=True)]
        try:
            answers = self._exchange.ask_many(requests)
            if trying is not None:
                _judge(trying, answers)
        except BaseException as error:
            if trying is not None:
                trying.gave_up(error)
            raise
        answers = [
            self._asked(call, sequence) if isinstance(answer, Exception) else answer
            for call, sequence, answer in zip(calls, sequences, answers, strict=True)
        ]
        for sequence in sequences:
            self._free(sequence)
        return answers

    def _one(self, call: ScriptCall | RedisCommand) -> Any:
        sequence = self._sequence(call)
        answer = self._asked(call, sequence)
        self._free(sequence)
        return answer

    def _replicated(self, call: ScriptCall) -> Any:
        """One call, answered when enough replicas have what it has changed."""
        sequence = self._sequence(call)
        key = call.queue.replicated
        patience = 0.0

        def ask(words: list[Any], remaining: float) -> tuple[Any, int]:
            # Anew for each attempt: those before it have used up some of the call's time.
            nonlocal patience
            patience = remaining * REPLICATION_SHARE
            return self._exchange.ask_replicated(words, key, call.replicas, patience)

        answer, confirmed = self._until_answered(call, sequence, ask)
        if confirmed < call.replicas:
            raise StorageUnavailableError(
                f"{self._connections.describe()}: {confirmed} of {call.replicas} replicas confirmed a "
                f"durable enqueue to queue {call.queue.queue!r} within {patience:.2g} s. The jobs may be "
                "lost in a failover; enqueue them again with the same ids to have them confirmed."
                f"{_named(call.ids)}"
            )
        self._free(sequence)
        return answer

    def _asked(self, call: ScriptCall | RedisCommand, sequence: RequestSequence | None) -> Any:
        return self._until_answered(call, sequence, lambda words, _: self._exchange.ask(words))

    def _until_answered(
        self,
        call: ScriptCall | RedisCommand,
        sequence: RequestSequence | None,
        ask: Callable[[list[Any], float], T],
    ) -> T:
        """Call `ask` with the call's words and the seconds left, and again after errors that may pass."""
        words = self._words(call, sequence)
        trying = self._trying(call)
        try:
            while True:
                try:
                    answer = ask(words, trying.remaining)
                    break
                except errors.NoScriptError:
                    words = _whole(call, words)
                except redis.RedisError as error:
                    time.sleep(trying.wait(error))
        except BaseException as error:
            trying.gave_up(error)
            raise
        trying.succeeded()
        return answer

    def _pipelined(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Some at once on one connection, so that the server is never idle; what fails is asked again."""
        sequences = [self._sequence(call) for call in calls]
        answers: list[Any] = [None] * len(calls)
        left = set(range(len(calls)))
        with suppress(redis.RedisError, OSError), self._exchange.connection() as connection:
            for sent in range(len(calls) + IN_FLIGHT):
                if sent < len(calls):
                    words = tuple(self._words(calls[sent], sequences[sent]))
                    connection.send_packed_command([pack_command(words)], check_health=False)
                answered = sent - IN_FLIGHT + 1
                if 0 <= answered < len(calls):
                    with suppress(redis.ResponseError):
                        answers[answered] = connection.read_response()
                        left.discard(answered)
        for place in sorted(left):
            answers[place] = self._asked(calls[place], sequences[place])
        for sequence in sequences:
            self._free(sequence)
        return answers

    async def _aanswers(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        if len(calls) == 1:
            return [await self._aone(calls[0])]
        if not self._connections.is_cluster and not any(map(_has_sequence, calls)):
            return await self._aread(calls)
        room = asyncio.Semaphore(IN_FLIGHT)

        async def one(call: ScriptCall | RedisCommand) -> Any:
            async with room:
                return await self._aone(call)

        return await asyncio.gather(*map(one, calls))

    async def _aread(self, calls: list[ScriptCall | RedisCommand]) -> list[Any]:
        """Calls that change nothing, all in one round trip."""
        try:
            answers = await self._exchange.aask_many([self._words(call, None) for call in calls])
        except redis.RedisError:
            return [await self._aone(call) for call in calls]
        return [
            await self._aone(call) if isinstance(answer, redis.ResponseError) else answer
            for call, answer in zip(calls, answers, strict=True)
        ]

    async def _aone(self, call: ScriptCall | RedisCommand) -> Any:
        if _is_replicated(call):
            return await asyncio.to_thread(self._replicated, call)
        sequence = self._sequence(call)
        words = self._words(call, sequence)
        trying = self._trying(call)
        try:
            while True:
                try:
                    answer = await self._exchange.aask(words)
                    break
                except errors.NoScriptError:
                    words = _whole(call, words)
                except redis.RedisError as error:
                    await asyncio.sleep(trying.wait(error))
        except BaseException as error:
            trying.gave_up(error)
            raise
        trying.succeeded()
        self._free(sequence)
        return answer

    def _trying(self, call: ScriptCall | RedisCommand) -> "RetryWindow":
        """Begin a call. Raises StorageUnavailableError at once if its server is known to be away."""
        name = call.queue.queue if self._connections.is_cluster and isinstance(call, ScriptCall) else ""
        breaker = self._breakers.get(name)
        if breaker is not None and not breaker.enter():
            outage = breaker.outage
            if outage is not None:  # else it has just come back
                raise StorageUnavailableError(_away_for(outage))
        left = deadline.remaining(self._timeout)
        if not left:
            if breaker is not None:
                breaker.gave_up()
            raise StorageUnavailableError(
                f"no request was sent to {self._connections.describe()}: the time limit has passed"
            )
        counts = left >= COUNTED * self._timeout
        return RetryWindow(left, self._connections, self._breakers, name, counts=counts)

    # A call's words.

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
            queue.prefix.encode(),
            self.publish,
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
        if not _has_sequence(call):
            return None
        try:
            sequence = self._sequences.pop()
        except IndexError:
            sequence = RequestSequence(b"%s%x" % (self._prefix, next(self._made)))
        sequence.number += 1
        return sequence

    def _free(self, sequence: RequestSequence | None) -> None:
        # One whose answer never came is not used again: its request may still be on its way.
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


def _named(ids: Sequence[str]) -> str:
    """Name the ids at the end of a message: the first of them if there are many."""
    if not ids:
        return ""
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return f" Ids: {', '.join(ids[:NAMED_IDS])}{more}."


def _has_sequence(call: ScriptCall | RedisCommand) -> bool:
    return isinstance(call, ScriptCall) and call.sequence


def _whole(call: ScriptCall | RedisCommand, words: list[Any]) -> list[Any]:
    """The same with the script's text: the server does not know it, having restarted say."""
    assert isinstance(call, ScriptCall)
    return [b"EVAL", call.script.text, *words[2:]]


class RetryWindow:
    """For how long a call is tried, and what that says about the server."""

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
        self._wait = FIRST_WAIT
        self._connections = connections
        self._breakers = breakers
        self._name = name
        self._is_settled = False

    @property
    def remaining(self) -> float:
        """Seconds that are left of the call's time."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, error: redis.RedisError) -> float:
        """Seconds until the next try. Raises what a user gets if there is none."""
        if is_refusal(error) or not (isinstance(error, AWAY) or str(error).startswith(PASSING)):
            self.succeeded()  # it has answered
            raise failure(error, self._connections) from error
        if self._connections.is_single and is_refused(error):
            # Nothing listens there, and nobody takes its place: the next call may try for itself.
            self.succeeded()
            raise away(error, self._connections) from error
        if time.monotonic() + self._wait > self._until:
            unavailable = away(error, self._connections)
            if isinstance(error, ABSENT):
                self._failed(str(unavailable))
            else:
                self.succeeded()
            raise unavailable from error
        wait, self._wait = self._wait, min(2 * self._wait, LAST_WAIT)
        return wait

    def succeeded(self) -> None:
        """Note that the server answers."""
        self._is_settled = True
        if self._breakers and (breaker := self._breakers.get(self._name)) is not None:
            breaker.succeeded()

    def gave_up(self, error: BaseException) -> None:
        """Note that the call has ended without an answer."""
        if self._is_settled:
            return
        if isinstance(error, StorageUnavailableError):
            self._failed(str(error))  # the nodes of a cluster cannot be asked for
        elif (breaker := self._breakers.get(self._name)) is not None:
            breaker.gave_up()

    def _failed(self, reason: str) -> None:
        if self._counts:
            self._is_settled = True
            self._breakers.setdefault(self._name, CircuitBreaker()).failed(reason)


def _judge(trying: RetryWindow, answers: Sequence[Any]) -> None:
    """Note what answers say about their server. Raises what a user gets if none can be asked for again."""
    for answer in answers:
        if isinstance(answer, redis.RedisError) and not isinstance(answer, errors.NoScriptError):
            time.sleep(trying.wait(answer))
            trying.gave_up(answer)
            return
    trying.succeeded()


def is_refused(error: BaseException) -> bool:
    """Whether nothing listens at the address that a connection was to be made to."""
    return isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)


def _away_for(outage: Outage) -> str:
    seconds = max(0, SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"{outage.reason} The server has been unavailable for {seconds:.1f} s; retrying soon."


def is_refusal(error: Exception) -> bool:
    """Whether the server is there, but does not accept the user or the password."""
    # They are connection errors to the client, which would try again.
    kinds = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)
    return isinstance(error, kinds) or any(word in str(error) for word in REFUSALS)


def away(error: Exception, connections: Connections) -> StorageUnavailableError:
    """What a user gets when Redis cannot be reached, or takes no changes."""
    reason = in_one_line(error)
    if reason.startswith(WITHOUT_REPLICAS):
        return StorageUnavailableError(
            f"{connections.describe()} accepts no writes: {reason} The server has fewer replicas than its "
            "min-replicas-to-write requires."
        )
    return StorageUnavailableError(
        f"{connections.describe()} does not answer: {reason.rstrip('.')}. Is it running?"
    )


def failure(error: redis.RedisError, connections: Connections) -> StorageError:
    """What a user gets when Redis refuses."""
    reason = in_one_line(error)
    if isinstance(error, errors.OutOfMemoryError):
        return StorageUnavailableError(
            f"{connections.describe()} is out of memory: {reason}. Increase maxmemory or free memory."
        )
    if is_refusal(error):
        return StorageUnavailableError(
            f"{connections.describe()} refuses access: {reason.rstrip('.')}. Check the user name and the "
            "password in DJQUEUE['STORAGE'] or the cache that it names, and what that user may do (ACL)."
        )
    return StorageError(f"{connections.describe()}: {reason}")

"""The Celery result backend `djqueue`: results are values in the storage, and waiters get its events."""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin, BaseResultConsumer
from celery.backends.base import BaseKeyValueStoreBackend
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from celery.utils.functional import _regen
from kombu.utils.encoding import bytes_to_str, ensure_bytes
from kombu.utils.functional import retry_over_time

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.units import milliseconds
from djqueue.storage.base import Unsubscribe

from .storages import Location, location, storage_at
from .values import REMOVED_AT_ONCE, RESULT, RESULTS, Values

logger = Log("djqueue.celery")

CLEANING = 10_000
"""Milliseconds between two removals of expired results by a process that stores results."""
READ_INTERVAL = 5_000
"""Milliseconds after which waiters read their results although no event has arrived."""
BODY_CLAIM = 60_000
"""Milliseconds after which a part of a chord that is delivered again may call the body, if the process that
was about to call it died."""
ENDED_CHORD_TTL = 300_000
"""Milliseconds for which an ended chord is remembered: a late copy of a part must not begin it again."""
LAST = float("inf")
"""Position of a part without an index in the results of its chord."""


class ResultConsumer(BaseResultConsumer):
    """Waits for results with subscriptions to the events of their keys."""

    backend: "DjqueueResultBackend"
    _connection_errors = (StorageUnavailableError, ConnectionError)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._subscriptions: dict[str, Unsubscribe] = {}
        self._changed: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Ids of tasks whose results may have changed."""
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Ids of tasks whose subscriptions must end."""
        self._looked_at = SYSTEM_CLOCK.monotonic()

    def start(self, initial_task_id: str, **kwargs: Any) -> None:
        self.consume_from(initial_task_id)

    def on_wait_for_pending(self, result: Any, **kwargs: Any) -> None:
        # One look without a pause: events tell of later changes.
        for meta in result._iter_meta(**{**kwargs, "interval": 0}):
            if meta is not None:
                self.on_state_change(meta, None)

    def consume_from(self, task_id: str) -> None:
        self._end_cancelled()
        with self._lock:
            if task_id in self._subscriptions:
                return
            changed = self._changed
            self._subscriptions[task_id] = self.backend.values.subscribe(
                bytes_to_str(self.backend.get_key_for_task(task_id)), lambda: changed.put(task_id)
            )
        # The result may have been stored before the subscription.
        changed.put(task_id)

    def cancel_for(self, task_id: str) -> None:
        # The garbage collector calls this, in any thread: also in one for which the owner of a lock waits.
        self._cancelled.put(task_id)

    def _end_cancelled(self) -> None:
        while True:
            try:
                task_id = self._cancelled.get_nowait()
            except queue.Empty:
                return
            with self._lock:
                unsubscribe = self._subscriptions.pop(task_id, None)
            if unsubscribe is not None:
                unsubscribe()

    def drain_events(self, timeout: float | None = None) -> None:
        try:
            self._drain(timeout)
        finally:
            self._end_cancelled()

    def _drain(self, timeout: float | None) -> None:
        changed = self._take(timeout)
        now = SYSTEM_CLOCK.monotonic()
        if not changed:
            if now - self._looked_at < READ_INTERVAL:
                raise TimeoutError
            self._looked_at = now
            with self._lock:
                changed = list(self._subscriptions)
        if not changed:
            raise TimeoutError
        for value in self.backend.mget([self.backend.get_key_for_task(task_id) for task_id in changed]):
            if value:
                self.on_state_change(self.backend.decode_result(value), None)

    def _take(self, timeout: float | None) -> list[str]:
        """Wait for a change, and return the tasks that have changed."""
        changed: set[str] = set()
        try:
            changed.add(self._changed.get(timeout=timeout))
            while True:
                changed.add(self._changed.get_nowait())
        except queue.Empty:
            pass
        return [task_id for task_id in changed if task_id in self._subscriptions]

    def on_state_change(self, meta: Any, message: Any) -> None:
        super().on_state_change(meta, message)
        if meta["status"] in states.READY_STATES:
            self.cancel_for(meta["task_id"])

    def stop(self) -> None:
        with self._lock:
            subscriptions, self._subscriptions = self._subscriptions, {}
        for unsubscribe in subscriptions.values():
            unsubscribe()

    def on_after_fork(self) -> None:
        # The subscriptions are the parent's.
        self._begin()
        super().on_after_fork()


class DjqueueResultBackend(AsyncBackendMixin, BaseKeyValueStoreBackend):
    """Results in the storage of a `djqueue://` URL: see `djqueue.contrib.celery.storages`.

    A chord has one value with its size and the parts that have returned, which is changed atomically. The
    result of each part is a value of its own, added before it is counted, so that the parts of a header are
    counted exactly once, and the last calls the body.
    """

    ResultConsumer = ResultConsumer
    supports_autoexpire = True
    supports_native_join = True
    persistent = True

    def __init__(self, url: str | None = None, expires: Any = None, **kwargs: Any) -> None:
        kwargs.pop("host", None)
        super().__init__(expires_type=int, expires=expires, url=url, **kwargs)
        self.expires = self.prepare_expires(expires, type=int)
        options = self.app.conf.get("result_backend_transport_options", {})
        self._location = _location(url or "djqueue://", options)
        self._cleaned_at = SYSTEM_CLOCK.monotonic() - CLEANING
        self._policy = {**self.retry_policy, **options.get("retry_policy", {})}
        self.result_consumer = self.ResultConsumer(
            self, self.app, self.accept, self._pending_results, self._pending_messages
        )

    @property
    def values(self) -> Values:
        """The values of the storage. A forked process has a storage of its own."""
        return Values(storage_at(self._location), RESULTS, RESULT, call=self._ensure)

    def _ensure(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function again while the storage is unavailable, as `retry_policy` says.

        A task that has run must not fail because its result could not be stored for a moment.
        """
        return retry_over_time(function, StorageUnavailableError, args, kwargs, **self._policy)

    # Values.

    def get(self, key: str | bytes) -> bytes | None:
        return self.values.get([bytes_to_str(key)])[0]

    def mget(self, keys: Sequence[str | bytes]) -> list[bytes | None]:
        return self.values.get([bytes_to_str(key) for key in keys])

    def set(self, key: str | bytes, value: str | bytes) -> None:
        self.values.set(bytes_to_str(key), ensure_bytes(value), self._milliseconds(self.expires))
        self._remove_expired()

    def _remove_expired(self) -> None:
        """Remove expired results now and then: nothing else does where only results are in the storage."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._cleaned_at < CLEANING:
            return
        self._cleaned_at = now
        try:
            while self.values.remove_expired() >= REMOVED_AT_ONCE:
                pass
        except StorageError as error:
            # The result is stored: its task must not fail.
            logger.warning("Could not remove expired results, which is tried again: %s", error)

    def delete(self, key: str | bytes) -> None:
        self.values.remove([bytes_to_str(key)])

    def incr(self, key: str | bytes) -> int:
        def increased(value: bytes | None) -> bytes:
            return str(int(value or 0) + 1).encode()

        new = self.values.change(bytes_to_str(key), increased, self._milliseconds(self.expires))
        return int(new)

    def expire(self, key: str | bytes, value: Any) -> bool:
        return self.values.expire(bytes_to_str(key), self._milliseconds(value))

    def forget(self, task_id: str) -> None:
        super().forget(task_id)
        self.result_consumer.cancel_for(task_id)

    # Chords.

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Record the number of parts. A chord that is applied again begins anew."""

        def sized(state: dict[str, Any]) -> dict[str, Any]:
            if state.get("done"):
                state = {}
            return {**state, "size": chord_size}

        self._change_chord(group_id, sized)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Expect another part, with which a task replaced itself."""
        self._change_chord(chord_id, lambda state: {**state, "more": state.get("more", 0) + 1})

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Save the structure of a header that contains groups: its results are nested as it is."""
        self._forget_ended_chord(header_result_args[0])
        # A generator is consumed while its tasks are sent, and contains no groups.
        if isinstance(header_result_args[1], _regen):
            return
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(part, GroupResult) for part in header.results):
            header.save(backend=self)
            seconds = self._chord_seconds()
            # Callers read it, too: it must not end before the results.
            is_lasting = not seconds or not self.expires
            self.expire(self.get_key_for_group(header.id), 0 if is_lasting else max(seconds, self.expires))

    def _forget_ended_chord(self, group_id: str) -> None:
        """Let a chord that is applied again begin anew, before its parts are sent."""
        key = self._chord_key(group_id)
        value = self.values.get([key])[0]
        chord = json.loads(value) if value else {}
        # The body may apply the chord again before the process that sent the body has noted the end.
        if chord.get("done") or "claimed" in chord:
            self.values.remove([key, *(self._part_key(group_id, part) for part in chord.get("parts", ()))])

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a part; call the body with the results if it was the last one."""
        task_id, group_id, index = request.id, request.group, request.group_index
        if not group_id or not task_id:
            return
        # A part that is delivered again counts once.
        member = json.dumps([LAST if index is None else index, task_id])
        part = self.encode([1, task_id, state, self.encode_result(result, state)])
        self.values.add(self._part_key(group_id, member), ensure_bytes(part), self._chord_lifetime())
        now, is_mine = SYSTEM_CLOCK.now(), False

        def counted(chord: dict[str, Any]) -> dict[str, Any]:
            nonlocal is_mine
            is_mine = False
            if chord.get("done"):
                return chord
            parts = chord.get("parts", [])
            if member not in parts:
                chord = {**chord, "parts": [*parts, member]}
            size = chord.get("size")
            is_complete = size is not None and len(chord["parts"]) == size + chord.get("more", 0)
            if is_complete and now - chord.get("claimed", 0) >= BODY_CLAIM:
                is_mine = True
                chord = {**chord, "claimed": now}
            return chord

        chord = self._change_chord(group_id, counted)
        if chord.get("done"):
            self.values.remove([self._part_key(group_id, member)])
        if is_mine:
            self._call_body(request, group_id, chord["parts"], now)

    def _call_body(self, request: Any, group_id: str, parts: Sequence[str], claimed: int) -> None:
        callback = maybe_signature(request.chord, app=self.app)
        try:
            try:
                results = self._header_results(group_id, parts)
            except ChordError:
                raise
            except Exception as error:
                raise ChordError(f"Join error: {error!r}") from error
            try:
                callback.delay(results)
            except Exception as error:
                raise ChordError(f"Callback error: {error!r}") from error
        except ChordError as error:
            logger.exception("Chord %r failed: %r", group_id, error)
            self.chord_error_from_stack(callback, error)
        ended = self._change_chord(
            group_id, lambda chord: {"done": True} if chord.get("claimed") == claimed else chord
        )
        if ended.get("done"):
            self.values.expire(self._chord_key(group_id), ENDED_CHORD_TTL)
            self.values.remove([self._part_key(group_id, part) for part in parts])

    def _header_results(self, group_id: str, parts: Sequence[str]) -> list[Any]:
        header = GroupResult.restore(group_id, backend=self, app=self.app)
        if header is not None:
            # All its parts have returned: there is nothing to wait for.
            header.on_ready()
            with allow_join_result():
                nested: list[Any] = header.join_native(
                    timeout=self.app.conf.result_chord_join_timeout, propagate=True
                )
            return nested
        in_order = sorted(parts, key=json.loads)
        results = self.values.get([self._part_key(group_id, part) for part in in_order])
        return [self._part_result(value) for value in results]

    def _part_result(self, value: bytes | None) -> Any:
        if value is None:
            raise ChordError("The result of a part has expired.")
        _, task_id, state, result = self.decode(value)
        if state in states.EXCEPTION_STATES:
            result = self.exception_to_python(result)
        if state in states.PROPAGATE_STATES:
            raise ChordError(f"Dependency {task_id} raised {result!r}") from result
        return result

    def _change_chord(self, group_id: str, changed: Any) -> dict[str, Any]:
        def change(value: bytes | None) -> bytes:
            return json.dumps(changed(json.loads(value) if value else {})).encode()

        new = self.values.change(self._chord_key(group_id), change, self._chord_lifetime())
        chord: dict[str, Any] = json.loads(new)
        return chord

    def _chord_key(self, group_id: str) -> str:
        return str(bytes_to_str(self.get_key_for_group(group_id, ".chord")))

    def _part_key(self, group_id: str, member: str) -> str:
        return str(bytes_to_str(self.get_key_for_group(group_id, f".part.{member}")))

    def _chord_lifetime(self) -> int | None:
        return self._milliseconds(self._chord_seconds())

    def _chord_seconds(self) -> float | None:
        """Return `result_chord_expires`, which Celery 5.5 does not have, or how long results are kept."""
        expires = self.app.conf.get("result_chord_expires")
        if expires is None:
            return cast("float | None", self.expires)
        return cast("float", self.prepare_expires(expires, type=int))

    @staticmethod
    def _milliseconds(expires: Any) -> int | None:
        """Return an expiry as milliseconds; None for none, and for 0, with which results do not expire."""
        return milliseconds("expires", expires) or None if expires else None


def _location(url: str, options: Any) -> Location:
    parts = urlsplit(url)
    return location(
        parts.hostname,
        parts.port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        parts.path,
        dict(options),
    )

"""Chords of the result backend: the parts of a header are counted exactly once, and the last calls the body.

A chord has one value with its size and the parts that have returned, which is changed atomically. The result
of each part is a value of its own, added before it is counted.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any, cast

from celery import states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from kombu.utils.encoding import bytes_to_str

from djqueue.core.clock import SYSTEM_CLOCK

logger = logging.getLogger("djqueue.celery")

CLAIMED = 60_000
"""Milliseconds after which a part that is delivered again may call the body, if the process that was about to
call it died."""
DONE = 300_000
"""Milliseconds for which an ended chord is remembered: a late copy of a part must not begin it again."""
LAST = float("inf")


class ChordsMixin:
    """The operations of Celery's backends for chords."""

    def set_chord_size(self: Any, group_id: str, chord_size: int) -> None:
        """Record the number of parts. A chord that is applied again begins anew."""

        def sized(state: dict[str, Any]) -> dict[str, Any]:
            if state.get("done"):
                state = {}
            return {**state, "size": chord_size}

        self._change_chord(group_id, sized)

    def add_to_chord(self: Any, chord_id: str, result: Any) -> None:
        """Expect another part, with which a task replaced itself."""
        self._change_chord(chord_id, lambda state: {**state, "more": state.get("more", 0) + 1})

    def apply_chord(self: Any, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Save the structure of a header that contains groups: its results are nested as it is."""
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(part, GroupResult) for part in header.results):
            header.save(backend=self)
            seconds = self._chord_seconds()
            # Callers read it, too: it must not end before the results.
            is_lasting = not seconds or not self.expires
            self.expire(self.get_key_for_group(header.id), 0 if is_lasting else max(seconds, self.expires))

    def on_chord_part_return(self: Any, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a part; call the body with the results if it was the last one."""
        task_id, group_id, index = request.id, request.group, request.group_index
        if not group_id or not task_id:
            return
        # A part that is delivered again counts once.
        member = json.dumps([LAST if index is None else index, task_id])
        part = self.encode([1, task_id, state, self.encode_result(result, state)])
        self.values.add(self._part_key(group_id, member), _bytes(part), self._chord_lifetime())
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
            if is_complete and now - chord.get("claimed", 0) >= CLAIMED:
                is_mine = True
                chord = {**chord, "claimed": now}
            return chord

        chord = self._change_chord(group_id, counted)
        if chord.get("done"):
            self.values.remove([self._part_key(group_id, member)])
        if is_mine:
            self._call_body(request, group_id, chord["parts"])

    def _call_body(self: Any, request: Any, group_id: str, parts: Sequence[str]) -> None:
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
        self.values.set(self._chord_key(group_id), b'{"done": true}', DONE)
        self.values.remove([self._part_key(group_id, part) for part in parts])

    def _header_results(self: Any, group_id: str, parts: Sequence[str]) -> list[Any]:
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
        found = self.values.get([self._part_key(group_id, part) for part in in_order])
        return [self._part_result(value) for value in found]

    def _part_result(self: Any, value: bytes | None) -> Any:
        if value is None:
            raise ChordError("The result of a part has expired.")
        _, task_id, state, result = self.decode(value)
        if state in states.EXCEPTION_STATES:
            result = self.exception_to_python(result)
        if state in states.PROPAGATE_STATES:
            raise ChordError(f"Dependency {task_id} raised {result!r}") from result
        return result

    def _change_chord(self: Any, group_id: str, changed: Any) -> dict[str, Any]:
        def change(value: bytes | None) -> bytes:
            return json.dumps(changed(json.loads(value) if value else {})).encode()

        new = self.values.change(self._chord_key(group_id), change, self._chord_lifetime())
        found: dict[str, Any] = json.loads(new)
        return found

    def _chord_key(self: Any, group_id: str) -> str:
        return str(bytes_to_str(self.get_key_for_group(group_id, ".chord")))

    def _part_key(self: Any, group_id: str, member: str) -> str:
        return str(bytes_to_str(self.get_key_for_group(group_id, f".part.{member}")))

    def _chord_lifetime(self: Any) -> int | None:
        expires = self._chord_seconds()
        return int(expires * 1_000) if expires else None

    def _chord_seconds(self: Any) -> float | None:
        """Return `result_chord_expires`, which Celery 5.5 does not have, or how long results are kept."""
        expires = self.app.conf.get("result_chord_expires")
        if expires is None:
            return cast("float | None", self.expires)
        return cast("float", self.prepare_expires(expires, type=int))


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text

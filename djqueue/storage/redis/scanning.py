"""Scans of all jobs of a queue, a part at a time so that no other client waits long."""

from djqueue.core.states import State

from . import records
from .keys import QueueKeys
from .keyspace import PAGE, Keyspace
from .records import text
from .roundtrips import ScriptCall, Steps
from .scripts import script


class Scanning:
    """Finds the jobs of a queue that are in some states."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace

    def jobs(
        self, keys: QueueKeys, states: frozenset[State], before: int | None = None
    ) -> Steps[list[tuple[int, str]]]:
        """Return enqueue time and id of the jobs in some states, scanned a part at a time."""
        found: dict[str, int] = {}
        cursor = b"0"
        while True:
            cursor, some = yield from self.part(keys, states, before, cursor)
            found.update((job_id, created) for created, job_id in some)
            if cursor == b"0":
                return [(created, job_id) for job_id, created in found.items()]

    def part(
        self, keys: QueueKeys, states: frozenset[State], before: int | None, cursor: bytes
    ) -> Steps[tuple[bytes, list[tuple[int, str]]]]:
        """Return the next cursor (`0` at the end) and some jobs, some of them perhaps again."""
        codes = b"".join(records.STATE_CODES[state] for state in states)
        arguments = [cursor, PAGE, codes, before if before is not None else b""]
        [[cursor, entries]] = yield [ScriptCall(script("scan"), keys, arguments, sequence=False)]
        return cursor, [(int(entries[at]), text(entries[at + 1])) for at in range(0, len(entries), 2)]

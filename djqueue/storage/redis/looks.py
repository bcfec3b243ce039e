"""Which queues had jobs a moment ago, remembered to save a round trip before each claim.

That hides no job: a claim that finds fewer jobs than it may take looks again.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from .keyspace import Keyspace
from .roundtrips import ScriptCall, Steps
from .scripts import script

LOOK_FRESH = 0.02
"""Seconds for which a queue that had no jobs is not looked at while another one has enough."""


class QueueLook(NamedTuple):
    """Which queues had jobs."""

    found: list[str]
    """Queues with jobs, in rotation."""
    waits: list[int]
    """Milliseconds until others may have some."""
    is_fresh: bool = True
    """Whether it was made for this claim."""


class Looks:
    """Looks for queues with jobs, all in one round trip; a look is used again for a moment."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._rotation = count()
        self._last: QueueLook | None = None
        self._of: Sequence[str] = ()
        """The queues of the last look."""
        self._at = 0.0
        """Monotonic time of the last look."""

    def recent(self, queues: Sequence[str]) -> QueueLook | None:
        """Return the last look, in the next rotation, if it is recent and found jobs."""
        passed = time.monotonic() - self._at
        last = self._last
        if last is None or not last.found or passed > LOOK_FRESH or self._of != queues:
            return None
        waits = [max(0, wait - int(passed * 1_000)) for wait in last.waits]
        return QueueLook(self._rotated(last.found), waits, is_fresh=False)

    def steps(self, queues: Sequence[str]) -> Steps[QueueLook]:
        """Look at queues. Most of them are empty most of the time."""
        order = self._rotated(queues)
        looks = yield [
            ScriptCall(script("peek"), self._keyspace.keys(queue), (), sequence=False) for queue in order
        ]
        found = [queue for queue, look in zip(order, looks, strict=True) if look[0]]
        return QueueLook(found, [look[1] for look in looks if not look[0] and look[1] >= 0])

    def keep(self, queues: Sequence[str], look: QueueLook) -> None:
        """Use a look again for the next claims."""
        # The claim adds to the waits of its own.
        self._last = look._replace(waits=[*look.waits])
        self._of, self._at = queues, time.monotonic()

    def forget(self) -> None:
        """Look again before the next claim."""
        self._last = None

    def _rotated(self, queues: Sequence[str]) -> list[str]:
        first = next(self._rotation) % len(queues)
        return [*queues[first:], *queues[:first]]

"""Which queues had jobs a moment ago, remembered to save a round trip before each claim.

That hides no job: a claim that finds fewer jobs than it may take looks again.

While there are fewer jobs than free slots, a claim goes to the queues where a job has just arrived or ended,
and only then looks at the others: the round trip of a look would delay the job, or the report of its end.
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

LOOK_SOON = 1
"""Milliseconds until a claim from queues with wake-ups is followed by a look at all queues."""


class QueueLook(NamedTuple):
    """Which queues had jobs."""

    found: list[str]
    """Queues with jobs, in rotation."""
    waits: list[int]
    """Milliseconds until others may have some."""
    is_fresh: bool = True
    """Whether it was made for this claim, so that the other queues need no look after it."""
    is_complete: bool = True
    """Whether it leaves no queue to the next claim."""


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
        self._woken: set[str] = set()
        """Queues whose wake-ups came after the last look."""
        self._is_idle = False
        """Whether the last claim found fewer jobs than it might have taken, in all queues. Otherwise, queues
        with new jobs must not be preferred to those with older ones."""

    def note_wake(self, queue: str) -> None:
        """Note that jobs of a queue may have become claimable. From any thread."""
        self._woken.add(queue)

    def learn(self, look: QueueLook, *, is_short: bool) -> None:
        """Note the end of a claim, and whether it found fewer jobs than it might have taken."""
        self._is_idle = is_short and look.is_complete

    def likely(self, queues: Sequence[str], ended: Sequence[str]) -> QueueLook | None:
        """Return the queues that are likely to have jobs without a look; None if a look is needed.

        ended: the queues of the outcomes that are reported with the claim.
        """
        if not self._is_idle:
            return None
        if ended:
            found = [queue for queue in ended if queue in queues]
            return QueueLook(found, [], is_fresh=False) if found else None
        found = [queue for queue in queues if queue in self._woken]
        # The next claim looks at all queues.
        self._woken.clear()
        return QueueLook(found, [LOOK_SOON], is_complete=False) if found else None

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
        self._woken.clear()
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

"""What can be done to the limiters that queues share."""

from .limiter import UNSET, SetConcurrency, SetRate
from .queue import JobQueue
from .reads import Reads
from .shard import PendingChanges
from .sharing import LimiterState


class LimiterControls(Reads):
    """Verbs on limiters."""

    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Change what a limiter allows while its queues run."""
        changes = PendingChanges()
        self.limiter(name).change(rate, concurrency, changes.woken)
        self.settle(changes)

    def pass_turns_on(self) -> None:
        """See that nobody waits for a turn that others let go by."""
        changes = PendingChanges()
        for limiter in list(self._limiters.values()):
            limiter.pass_on(changes.woken)
        if changes.woken:
            self.settle(changes)

    def limiter_state(self, name: str) -> LimiterState:
        """How a limiter stands."""
        return self.limiter(name).state()

    def _share(self, queue: JobQueue, name: str | None, changes: PendingChanges) -> None:
        """Have a queue take from another limiter. The caller has the lock of its shard."""
        before = queue.shared
        for place in self.processing:
            place.lock.acquire()
        try:
            taken = self.taken_in(queue.name)
            queue.shared = None if name is None else self.limiter(name)
            if queue.shared is not None:
                queue.shared.take(taken)
        finally:
            for place in self.processing:
                place.lock.release()
        if before is not None:
            before.forget(queue.name, changes.woken)
            before.release(taken, changes.woken)

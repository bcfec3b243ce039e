"""Memory storages that note what is asked of them, or fail for a while."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence

from djqueue import StorageUnavailableError
from djqueue.core.engine import EngineEvents
from djqueue.core.job import ClaimRequest, Emission, Finished, Lease, Outcome, ProgressReport, Renewal
from djqueue.storage.base import EventHandler, Unsubscribe
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.memory import MemoryStorage


class RecordingStorage(MemoryStorage):
    """Notes the round trips of its workers."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.trips: list[tuple[int, int | None, int]] = []
        """(outcomes told, slots asked for, jobs given)."""
        self.renewals: list[int] = []
        """Leases in each renewal."""
        self.reports: list[list[ProgressReport]] = []
        self.subscribed: list[str] = []
        """Queues that are listened to."""
        self.listening = 0
        """Workers that are woken."""
        self.events = RecordingEvents(self)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        finished = super().finish(outcomes, then)
        slots = None if then is None else then.slots
        self.trips.append((len(outcomes), slots, len(finished.claims.jobs)))
        return finished

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        self.renewals.append(len(leases))
        return super().renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        self.reports.append(list(reports))
        return super().report(reports)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        unlisten = super().listen(queues, wake)
        self.listening += 1

        def ended() -> None:
            unlisten()
            self.listening -= 1

        return ended


class RecordingEvents(EngineEvents):
    """Notes which queues are subscribed to."""

    def __init__(self, storage: RecordingStorage) -> None:
        super().__init__(storage.engine.context)
        self._subscribed = storage.subscribed

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        unsubscribe = super().subscribe(queue, handler, job_id)
        self._subscribed.append(queue)

        def ended() -> None:
            unsubscribe()
            self._subscribed.remove(queue)

        return ended


class LockedStorage(RecordingStorage):
    """Leaves out what is reported of some jobs, as if another transaction had locked these."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.locked: set[str] = set()
        self.emitted = 0
        """Number of calls of `emit`."""

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        free = [outcome for outcome in outcomes if outcome.id not in self.locked]
        finished = await super().afinish(free, then)
        accepted = iter(finished.accepted)
        answers = [None if outcome.id in self.locked else next(accepted) for outcome in outcomes]
        return finished._replace(accepted=answers)

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        accepted = iter(super().report([one for one in reports if one.id not in self.locked]))
        return [None if one.id in self.locked else next(accepted) for one in reports]

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        self.emitted += 1
        accepted = iter(super().emit([one for one in emissions if one.id not in self.locked]))
        return [None if one.id in self.locked else next(accepted) for one in emissions]


class DistantStorage(RecordingStorage):
    """Takes two calls at once, and answers some turns of the loop later."""

    capabilities = Capabilities(in_process=True, max_in_flight=2)

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.under_way = 0
        self.most = 0
        """Calls that were under way at once."""

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.under_way -= 1
        return self.finish(outcomes, then)


class FailingStorage(MemoryStorage):
    """Is away while `away` is set: nothing that a worker asks for is done."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.away = threading.Event()
        self.refused: list[str] = []

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        self._check("finish")
        return super().finish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        self._check("renew")
        return super().renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        self._check("report")
        return super().report(reports)

    def sweep(self):
        self._check("sweep")
        return super().sweep()

    def _check(self, verb: str) -> None:
        if self.away.is_set():
            self.refused.append(verb)
            raise StorageUnavailableError("the storage has been switched off")

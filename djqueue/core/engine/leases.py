"""Leases of active jobs."""

from collections.abc import Container, Sequence

from ..job import Lease, Renewal
from .context import EngineContext


class EngineLeases:
    """Leases of the engine's active jobs, by monotonic time."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims to a full lease from now: see `Engine.renew`."""
        context = self._context
        tick = context.clock.monotonic()
        renewals = []
        for lease in leases:
            processing = context.processing_shard(lease.id)
            with processing.lock:
                job = processing.active.get(lease.token)
                if job is None or job.id != lease.id or job.queue != lease.queue:
                    renewals.append(Renewal(False))
                    continue
                job.lease_until = tick + self._context.policy(job.queue).lease
                if context.journal is not None and job.process:
                    context.journal.renewed(job)
                renewals.append(Renewal(True, job.cancel_requested))
        return renewals

    def renew_all(self) -> None:
        """Extend all claims to a full lease from now."""
        tick = self._context.clock.monotonic()
        for processing in self._context.processing:
            with processing.lock:
                for job in processing.active.values():
                    job.lease_until = tick + self._context.policy(job.queue).lease

    def postpone(self, by: int) -> None:
        """Extend all claims by the milliseconds for which they could not be renewed."""
        for processing in self._context.processing:
            with processing.lock:
                for job in processing.active.values():
                    job.lease_until += by

    def processes(self) -> set[str]:
        """Return the processes that hold claims, without the engine's own process."""
        found: set[str] = set()
        for processing in self._context.processing:
            with processing.lock:
                found.update(job.process for job in processing.active.values())
        found.discard("")
        return found

    def expire(self, processes: Container[str], tick: int) -> None:
        """Let the claims of some processes expire by a monotonic time; the next sweep takes them back."""
        for processing in self._context.processing:
            with processing.lock:
                for job in processing.active.values():
                    if job.process in processes:
                        job.lease_until = min(job.lease_until, tick)

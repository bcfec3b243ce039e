"""Jobs, engines and short verbs for the tests of the engine."""

from itertools import count
from typing import Any

from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import (
    Batch,
    Claimed,
    ClaimRequest,
    EnqueueResult,
    Event,
    JobFailure,
    Outcome,
    Swept,
)
from djqueue.core.options import JobOptions
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.testing.clock import FakeClock

ERROR = JobFailure("ValueError", "no", "Traceback …")
_numbers = count(1)


def make_job(
    id: str | None = None,
    *,
    queue: str = "q",
    name: str = "send",
    created_at: int = 1_000,
    run_at: int = 1_000,
    **options: Any,
) -> EngineJob:
    job_id = id or f"job-{next(_numbers)}"
    return EngineJob(job_id, queue, name, b"", JobOptions(**options), State.WAITING, created_at, run_at)


class Bench:
    """An engine on a fake clock, with verbs for one job in one queue."""

    def __init__(
        self,
        *,
        cores: int = 1,
        journal: Any = None,
        clock: FakeClock | None = None,
        **policy: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.policy = QueuePolicy(**policy)
        self.engine = Engine(
            clock=self.clock,
            default_policy=self.policy,
            cores=cores,
            journal=journal,
        )

    def enqueue(
        self,
        id: str | None = None,
        *,
        queue: str = "q",
        name: str = "send",
        payload: bytes = b"",
        delay: int | None = None,
        **options: Any,
    ) -> EnqueueResult:
        ids = None if id is None else [id]
        batch = Batch(queue, name, JobOptions(**options), [payload], ids, delay)
        [result] = self.engine.enqueue([batch])
        return result

    def claim(self, slots: int = 100, *names: str, queue: str = "q", worker: str = "w") -> list[Claimed]:
        request = ClaimRequest(worker, slots, frozenset(names or ("send",)), (queue,))
        return self.engine.claim(request).jobs

    def claim_one(self, *names: str, queue: str = "q", worker: str = "w") -> Claimed:
        [claimed] = self.claim(1, *names, queue=queue, worker=worker)
        return claimed

    def ids(self, slots: int = 100, *names: str, queue: str = "q") -> list[str]:
        return [claimed.id for claimed in self.claim(slots, *names, queue=queue)]

    def finish(self, claimed: Claimed, kind: str = "complete", **said: Any) -> bool:
        outcome = Outcome(claimed.queue, claimed.id, claimed.token, kind, **said)
        [accepted] = self.engine.finish([outcome]).accepted
        return accepted

    def fail(self, id: str, *, queue: str = "q", reason: str = "explicit_fail", **options: Any) -> None:
        """A job with a dead letter."""
        self.enqueue(id, queue=queue, **options)
        claimed = next(one for one in self.claim(queue=queue) if one.id == id)
        assert self.finish(claimed, "fail", reason=reason, error=ERROR)

    def record(self, id: str, queue: str = "q") -> Any:
        [record] = self.engine.reads.jobs(queue, [id])
        return record

    def state(self, id: str, queue: str = "q") -> State | None:
        [state] = self.engine.reads.states(queue, [id])
        return state

    def counts(self, queue: str = "q") -> dict[str, int]:
        return {state.value: n for state, n in self.engine.reads.counts(queue).items() if n}

    def sweep(self, milliseconds: int = 0) -> Swept:
        self.clock.advance(milliseconds)
        return self.engine.sweep(60_000)

    def events(self, queue: str = "q") -> list[Event]:
        """A list that grows with the queue's events."""
        heard: list[Event] = []
        self.engine.events.subscribe(queue, heard.append)
        return heard

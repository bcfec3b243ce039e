"""Incidents: the process whose call changes a job without its worker is notified, once."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Incident, Outcome
from djqueue.storage.base import Storage

from ..factories import (
    NAME,
    QUEUE,
    UPSTREAM,
    a_blocked_job,
    a_waiting_job,
    an_active_job,
    cancelling,
    claim,
    completing,
    enqueue,
    failing,
    finish,
    releasing,
    retrying,
)
from .case import SOON, StorageCase


class IncidentsContract(StorageCase):
    """Signals are made of this: `job_stalled`, `job_dead`, `job_cancelled`."""

    @pytest.fixture
    def told(self, storage: Storage) -> list[Incident]:
        """Return the incidents that the storage has reported."""
        found: list[Incident] = []
        storage.on_incidents = found.extend
        return found

    def test_a_lost_run_is_told_once(self, storage: Storage, told: list[Incident]) -> None:
        claimed = an_active_job(storage)
        self.lose_lease(storage, claimed.lease)
        storage.sweep()

        assert told == [Incident(QUEUE, claimed.id, NAME, "stalled")]

    def test_a_run_lost_too_often_is_a_stall_and_a_death(
        self, storage: Storage, told: list[Incident]
    ) -> None:
        claimed = an_active_job(storage, max_stalls=0)
        self.lose_lease(storage, claimed.lease)

        assert [incident.event for incident in told] == ["stalled", "failed"]
        assert (told[1].id, told[1].reason) == (claimed.id, "worker_lost")
        assert told[1].error is not None

    def test_a_lost_run_of_a_job_that_was_to_stop_is_a_cancellation(
        self, storage: Storage, told: list[Incident]
    ) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])
        self.lose_lease(storage, claimed.lease)

        assert told == [Incident(QUEUE, claimed.id, NAME, "cancelled", "cancelled")]

    def test_a_job_whose_ttl_is_over_is_a_death(self, storage: Storage, told: list[Incident]) -> None:
        job_id = enqueue(storage, ttl=SOON)
        self.pass_time(storage, SOON + 1)

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, "failed", "ttl_expired")]
        assert told[0].error is not None

    def test_a_ttl_that_is_over_at_the_claim_is_a_death(self, storage: Storage, told: list[Incident]) -> None:
        job_id = enqueue(storage, ttl=SOON)
        self.advance(SOON + 1)
        assert claim(storage) == []

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, "failed", "ttl_expired")]

    def test_a_cancelled_job_is_told_with_its_reason(self, storage: Storage, told: list[Incident]) -> None:
        job_id = a_waiting_job(storage)
        storage.jobs.cancel(QUEUE, [job_id], "not wanted")
        storage.jobs.cancel(QUEUE, [job_id], "not wanted")

        assert told == [Incident(QUEUE, job_id, NAME, "cancelled", "not wanted")]

    @pytest.mark.parametrize(("rule", "event"), [("fail", "failed"), ("cancel", "cancelled")])
    def test_a_job_whose_dependency_failed_is_told(
        self, storage: Storage, told: list[Incident], rule: str, event: str
    ) -> None:
        job_id = a_blocked_job(storage, on_dependency_failure=rule)
        [upstream] = claim(storage, queues=[UPSTREAM])
        finish(storage, failing(upstream))

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, event, "dependency_failed")]

    @pytest.mark.parametrize("end", [completing, retrying, releasing, failing, cancelling])
    def test_what_a_worker_tells_is_none(
        self, storage: Storage, told: list[Incident], end: Callable[..., Outcome]
    ) -> None:
        finish(storage, end(an_active_job(storage)))
        storage.sweep()
        fence = a_waiting_job(storage)
        storage.jobs.cancel(QUEUE, [fence])

        assert [incident.id for incident in told] == [fence]

    @pytest.mark.parametrize("end", [retrying, releasing])
    def test_a_cancellation_that_its_worker_has_not_heard_of_is_one(
        self, storage: Storage, told: list[Incident], end: Callable[..., Outcome]
    ) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])
        finish(storage, end(claimed))

        assert told == [Incident(QUEUE, claimed.id, NAME, "cancelled", "cancelled")]

    def test_a_listener_that_fails_harms_nobody(self, storage: Storage) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("no ears")

        storage.on_incidents = fail
        job_id = a_waiting_job(storage)

        assert storage.jobs.cancel(QUEUE, [job_id])[0].status == "cancelled"

"""Incidents: the process that changes a job without its worker is notified once."""

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
    """Signals are made of this: `job_stalled`, `job_failed`, `job_cancelled`."""

    @pytest.fixture
    def told(self, storage: Storage) -> list[Incident]:
        """Return the incidents that the storage has reported."""
        found: list[Incident] = []
        storage.on_incidents = found.extend
        return found

    def test_stalled_job_is_reported_once(self, storage: Storage, told: list[Incident]) -> None:
        claimed = an_active_job(storage)
        self.lose_lease(storage, claimed.lease)
        storage.sweep()

        assert told == [Incident(QUEUE, claimed.id, NAME, "stalled")]

    def test_last_allowed_stall_is_reported_as_stalled_and_failed(
        self, storage: Storage, told: list[Incident]
    ) -> None:
        claimed = an_active_job(storage, max_stalls=0)
        self.lose_lease(storage, claimed.lease)

        assert [incident.event for incident in told] == ["stalled", "failed"]
        assert (told[1].id, told[1].reason) == (claimed.id, "worker_lost")
        assert told[1].error is not None

    def test_stalled_job_with_requested_cancel_is_reported_as_cancelled(
        self, storage: Storage, told: list[Incident]
    ) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])
        self.lose_lease(storage, claimed.lease)

        assert told == [Incident(QUEUE, claimed.id, NAME, "cancelled", "cancelled")]

    def test_expired_job_is_reported_as_failed(self, storage: Storage, told: list[Incident]) -> None:
        job_id = enqueue(storage, ttl=SOON)
        self.pass_time(storage, SOON + 1)

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, "failed", "ttl_expired")]
        assert told[0].error is not None

    def test_job_that_expires_at_a_claim_is_reported_as_failed(
        self, storage: Storage, told: list[Incident]
    ) -> None:
        job_id = enqueue(storage, ttl=SOON)
        self.advance(SOON + 1)
        assert claim(storage) == []

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, "failed", "ttl_expired")]

    def test_cancelled_job_is_reported_with_its_reason(self, storage: Storage, told: list[Incident]) -> None:
        job_id = a_waiting_job(storage)
        storage.jobs.cancel(QUEUE, [job_id], "not wanted")
        storage.jobs.cancel(QUEUE, [job_id], "not wanted")

        assert told == [Incident(QUEUE, job_id, NAME, "cancelled", "not wanted")]

    @pytest.mark.parametrize(("rule", "event"), [("fail", "failed"), ("cancel", "cancelled")])
    def test_dependent_of_failed_job_is_reported(
        self, storage: Storage, told: list[Incident], rule: str, event: str
    ) -> None:
        job_id = a_blocked_job(storage, on_dependency_failure=rule)
        [upstream] = claim(storage, queues=[UPSTREAM])
        finish(storage, failing(upstream))

        assert [(one.id, one.event, one.reason) for one in told] == [(job_id, event, "dependency_failed")]

    @pytest.mark.parametrize("end", [completing, retrying, releasing, failing, cancelling])
    def test_outcomes_from_workers_are_not_incidents(
        self, storage: Storage, told: list[Incident], end: Callable[..., Outcome]
    ) -> None:
        finish(storage, end(an_active_job(storage)))
        storage.sweep()
        fence = a_waiting_job(storage)
        storage.jobs.cancel(QUEUE, [fence])

        assert [incident.id for incident in told] == [fence]

    @pytest.mark.parametrize("end", [retrying, releasing])
    def test_cancel_decided_by_the_storage_is_an_incident(
        self, storage: Storage, told: list[Incident], end: Callable[..., Outcome]
    ) -> None:
        claimed = an_active_job(storage)
        storage.jobs.cancel(QUEUE, [claimed.id])
        finish(storage, end(claimed))

        assert told == [Incident(QUEUE, claimed.id, NAME, "cancelled", "cancelled")]

    def test_failing_incident_callback_does_not_affect_operations(self, storage: Storage) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("no ears")

        storage.on_incidents = fail
        job_id = a_waiting_job(storage)

        assert storage.jobs.cancel(QUEUE, [job_id])[0].status == "cancelled"

"""The database storage keeps the contract.

`make test` runs it as most processes of a project use the storage: as a client that reads and writes the
tables and asks the scheduler through its socket. The other classes repeat it inside the scheduler's process,
with statements of the ORM alone, and through the socket alone.
"""

from contextlib import closing

import pytest

from djqueue.storage.facets import Queues, Workers
from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.reads import Reads
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.reference import Choices
from tests.storage.clockplans import StagingOnAClock
from tests.storage.thorough import ManyExamples


class SchedulerCase(contract.StorageCase):
    """The scheduler's storage, with a clock that the tests move."""

    sql: str

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        # Time limits are real time: a busy machine needs long for thousands of rows.
        options = {"clock": self.clock, "policies": contract.POLICIES, "sql": self.sql, "timeout": 60}
        with closing(JournaledStorage(**options)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class SnapshotsCase(contract.SnapshotsContract):
    """Snapshots are written while no scheduler is running."""

    def written(self, storage, parts, *, replace=False):
        scheduler = getattr(storage, "scheduler", storage)
        scheduler.close()
        scheduler._closing.clear()
        try:
            with closing(JournaledStorage(clock=self.clock, policies=contract.POLICIES)) as client:
                return client.snapshots.write(parts, replace=replace)
        finally:
            scheduler.connect()


@pytest.mark.thorough
class TestWithItsOwnStatements(SchedulerCase, SnapshotsCase, ManyExamples, contract.StorageContract):
    sql = "auto"
    examples = 10


@pytest.mark.thorough
class TestWithTheOrmAlone(
    SchedulerCase,
    contract.EnqueueContract,
    contract.ClaimsContract,
    contract.OutcomesContract,
    contract.ResultsContract,
    contract.CancellingContract,
    contract.DeadLettersContract,
    contract.RejectedContract,
    contract.UniqueKeysContract,
    contract.UpdatesContract,
    contract.DependenciesContract,
    contract.FlowsContract,
    contract.QueueControlsContract,
    contract.InsightContract,
    contract.SubjectsContract,
    contract.ReadsContract,
    contract.StreamingContract,
    contract.WorkersContract,
    SnapshotsCase,
):
    """What writes and reads tables."""

    sql = "orm"


LATER = (Reads.page, Reads.counts, Reads.waiting_names, Reads.dead_letters)
"""What other processes see a moment later."""


class Distant(JournaledStorage):
    """A client that leaves enqueues, sweeps and reads of the tables to the scheduler's process."""

    scheduler: JournaledStorage

    def enqueue(self, batches):
        return self.scheduler.enqueue(batches)

    def sweep(self):
        return self.scheduler.sweep()

    def ask(self, method, *args, **kwargs):
        if method in LATER:
            return self.scheduler.ask(method, *args, **kwargs)
        return super().ask(method, *args, **kwargs)


@pytest.mark.thorough
class TestThroughTheSocket(SchedulerCase, contract.StreamingContract):
    """What workers and readers of other processes send and read."""

    sql = "auto"

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES}
        with closing(JournaledStorage(**options)) as scheduler, closing(Distant(**options)) as client:
            scheduler.connect()
            client.scheduler = scheduler
            yield client


class Client(JournaledStorage):
    """A client whose scheduler has seen what is in the inbox; the tables are behind it all the same, except
    for operations that read nothing else.
    """

    scheduler: JournaledStorage

    def enqueue(self, batches):
        answers = super().enqueue(batches)
        self.scheduler.active.inbox.take_in_all()
        return answers

    def sweep(self):
        return self.scheduler.sweep()

    def finish(self, outcomes, then=None):
        self.scheduler.active.inbox.take_in_all()
        return super().finish(outcomes, then)

    def renew(self, leases):
        self.scheduler.active.inbox.take_in_all()
        return super().renew(leases)

    def report(self, reports):
        self.scheduler.active.inbox.take_in_all()
        return super().report(reports)

    def emit(self, emissions):
        self.scheduler.active.inbox.take_in_all()
        return super().emit(emissions)

    def ask(self, method, *args, **kwargs):
        self.scheduler.active.inbox.take_in_all()
        if method in READING_TABLES:
            self.scheduler.active.gate.flush()
        return super().ask(method, *args, **kwargs)


READING_TABLES = (
    *(Reads.counts, Reads.page, Reads.dead_letters, Reads.dead_letter_page, Reads.waiting_names),
    *(Reads.jobs_about, Reads.cursor_page, Reads.series, Reads.cumulative, Reads.overview, Reads.groups),
    *(Workers.all, Queues.names),
)


class ClientCase(contract.StorageCase):
    choices = Choices(replaces_later=True)
    examples = 5

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES}
        with closing(JournaledStorage(**options)) as scheduler, closing(Client(**options)) as storage:
            scheduler.connect()
            storage.scheduler = scheduler
            # What no worker has told is told by the process that did it: the scheduler's.
            scheduler.on_incidents = storage.notify_incidents
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestForAClient(ClientCase, SnapshotsCase, ManyExamples, contract.StorageContract):
    """The whole contract through the socket: what another process sends, reads and is told."""


class StagingCase(SchedulerCase, StagingOnAClock):
    """What the scheduler itself publishes comes through its inbox, as what other processes do."""

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES, "sql": self.sql}
        with closing(Client(**options)) as storage:
            storage.connect()
            storage.scheduler = storage
            yield storage


@pytest.mark.thorough
class TestStaging(StagingCase):
    sql = "auto"


@pytest.mark.thorough
class TestStagingWithTheOrmAlone(StagingCase):
    sql = "orm"


class TestStagingForAClient(ClientCase, StagingOnAClock):
    """Jobs that another process puts aside."""

"""The database storage keeps the contract: with its own statements, with the ORM's alone, and for clients."""

from contextlib import closing

import pytest

from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock


class SchedulerCase(contract.StorageCase):
    """The scheduler's storage, with a clock that the tests move."""

    sql: str

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES, "sql": self.sql}
        with closing(DatabaseStorage(**options)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestWithItsOwnStatements(SchedulerCase, contract.StorageContract):
    sql = "auto"


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
):
    """What writes and reads tables."""

    sql = "orm"


LATER = ("enqueue", "maintain", "page", "counts", "waiting_names", "dead_letters")
"""What other processes leave to the scheduler, or see a moment later."""


class TestThroughTheSocket(SchedulerCase, contract.StreamingContract):
    """What workers and readers of other processes send and read."""

    sql = "auto"

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES}
        with closing(DatabaseStorage(**options)) as scheduler, closing(DatabaseStorage(**options)) as client:
            scheduler.connect()
            for operation in LATER:
                vars(client)[operation] = getattr(scheduler, operation)
            yield client


class Client(DatabaseStorage):
    """A client whose scheduler has seen what is in the inbox; the tables are behind it all the same, but for
    those verbs that read nothing else.
    """

    scheduler: DatabaseStorage

    def enqueue(self, batches):
        answers = super().enqueue(batches)
        self.scheduler.active.inbox.take_in_all()
        return answers

    def maintain(self):
        return self.scheduler.sweep()


READING_TABLES = (
    *("counts", "page", "dead_letters", "dead_letter_page", "waiting_names", "workers", "queues"),
    *("about", "cursor_page", "series", "overview", "groups"),
)


def _with_the_scheduler_awake(name):
    def method(self, *args, **kwargs):
        self.scheduler.active.inbox.take_in_all()
        if name in READING_TABLES:
            self.scheduler.active.gate.flush()
        return getattr(DatabaseStorage, name)(self, *args, **kwargs)

    return method


for _name in sorted(Storage.__abstractmethods__ - {"enqueue", "maintain", "describe"} | {"claim"}):
    setattr(Client, _name, _with_the_scheduler_awake(_name))


class ClientCase(contract.StorageCase):
    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES}
        with closing(DatabaseStorage(**options)) as scheduler, closing(Client(**options)) as storage:
            scheduler.connect()
            storage.scheduler = scheduler
            # What no worker has told is told by the process that did it: the scheduler's.
            scheduler.on_incidents = storage.notify_incidents
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestForAClient(ClientCase, contract.StorageContract):
    """The whole contract through the socket: what another process sends, reads and is told."""


class StagingCase(SchedulerCase, contract.StagingContract):
    """What the scheduler itself publishes comes through its inbox, as what other processes do."""

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES, "sql": self.sql}
        with closing(Client(**options)) as storage:
            storage.connect()
            storage.scheduler = storage
            yield storage


class TestStaging(StagingCase):
    sql = "auto"


class TestStagingWithTheOrmAlone(StagingCase):
    sql = "orm"


class TestStagingForAClient(ClientCase, contract.StagingContract):
    """Jobs that another process puts aside."""


class TestWorkersOfOtherProcesses(ClientCase, contract.WorkersContract):
    """What they say and hear through the socket; who they are is read from the tables."""

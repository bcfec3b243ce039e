"""The scheduler storage keeps the contract: through its socket, and in the scheduler's process."""

import pytest

from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from tests.storage.thorough import ManyExamples

from .recovered import check_recovery

pytestmark = pytest.mark.scheduler


class SchedulerCase(contract.StorageCase):
    """A storage with a clock that the tests move."""

    examples = 5

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestForAClient(SchedulerCase, ManyExamples, contract.StorageContract):
    """The whole contract from another process's point of view."""

    @pytest.fixture
    def storage(self, make_storage):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES}
        scheduler = make_storage(here=True, **options)
        storage = make_storage(**options)
        # Only the scheduler's process hears of what no worker has reported.
        scheduler.on_incidents = storage.notify_incidents
        return storage


class TestRecovered(SchedulerCase, ManyExamples, contract.StorageContract):
    """After each case, an engine that is loaded from the tables has the same jobs."""

    @pytest.fixture
    def storage(self, make_storage):
        self.clock = FakeClock()
        storage = make_storage(here=True, clock=self.clock, policies=contract.POLICIES)
        yield storage
        check_recovery(storage)

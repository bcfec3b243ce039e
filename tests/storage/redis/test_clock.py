"""The clock of the server, for which the injected clock stands."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from tests.storage.setclocks import SET_CLOCK_POLICIES, SetClocksCase
from tests.support import PATIENCE


class TestSetClocks(SetClocksCase):
    @pytest.fixture
    def storage(self, redis_url):
        self.clock = FakeClock()
        with closing(
            RedisStorage(url=redis_url, timeout=PATIENCE, clock=self.clock, policies=SET_CLOCK_POLICIES)
        ) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)

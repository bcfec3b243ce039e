"""kombu's common tests of transports, for `djqueue://`."""

import os

import kombu
import kombu.serialization  # loads the entry points, one of which adds the transport
import pytest
from t.integration import common
from t.integration.test_redis import test_RedisPriority as PriorityOfVirtualTransports

DEAD = "djqueue://127.0.0.1:1/0"
"""A server that refuses connections."""
REDIS = f"djqueue://127.0.0.1:{os.environ['REDIS_PORT']}/0"


@pytest.fixture(params=["djqueue://", REDIS], ids=["database", "redis"])
def connection(request: pytest.FixtureRequest) -> kombu.Connection:
    return kombu.Connection(request.param)


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection(DEAD)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return kombu.Connection(f"{DEAD};{REDIS}")


class TestBasicFunctionality(common.BasicFunctionality):
    pass


class TestExchangeTypes(common.BaseExchangeTypes):
    pass


class TestTimeToLive(common.BaseTimeToLive):
    pass


class TestPriority(PriorityOfVirtualTransports):
    """Like the common tests, but `drain_events` delivers one message, and 0 is the highest priority."""


class TestFailover(common.BaseFailover):
    pass


class TestMessage(common.BaseMessage):
    pass


class TestEventLoop(common.BaseEventLoop):
    pass

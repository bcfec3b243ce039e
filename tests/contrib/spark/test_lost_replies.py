"""Lost requests and responses at every step of a write: each row becomes exactly one job."""

from contextlib import closing
from copy import deepcopy

import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.cluster.checks import QUEUE, are_once, goes_by_itself
from tests.proxies import ANSWERS, REQUESTS, LossyProxy

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough

PARTS, EACH = 2, 60


def load(proxy):
    given = {"url": proxy.url, "queue": QUEUE, "job": "shop.send", "batchSize": "20"}
    made = Write(WriteOptions.read(given), ["n"])
    told = []
    for part in range(PARTS):
        rows = pyarrow.table({"n": range(part * EACH, part * EACH + EACH)}).to_batches(max_chunksize=25)
        told.append(deepcopy(made).run_task(f"{part}.{part}", rows))
    return made.commit(told)


@pytest.fixture
def storage(redis_server):
    with closing(RedisStorage(url=redis_server.url)) as storage:
        yield storage


@pytest.mark.parametrize("direction", [ANSWERS, REQUESTS])
@pytest.mark.parametrize("cuts", [6, pytest.param(24, marks=pytest.mark.thorough)])
def test_write_succeeds_wherever_a_connection_ends(storage, redis_server, direction, cuts):
    """Cut the connection at many positions of a write, each time in a new write."""
    for _ in range(2):  # Load the scripts into the server.
        redis_server.clean()
        with LossyProxy(redis_server.port) as proxy:
            load(proxy)
        whole = proxy.passed[direction]
    made = 0

    for place in range(0, whole, whole // cuts):
        redis_server.clean()
        with LossyProxy(redis_server.port, **{direction: [place]}) as proxy:
            report = load(proxy)
            made += proxy.made

        are_once(storage, range(PARTS * EACH))
        goes_by_itself(storage)
        assert report.inserted == PARTS * EACH, f"cut after {place} bytes"
    assert made >= cuts - 2


def test_write_succeeds_when_its_connection_ends_repeatedly(storage, redis_server):
    redis_server.clean()
    with LossyProxy(
        redis_server.port, answers=range(300, 4_000, 900), requests=range(2_000, 60_000, 3_500)
    ) as proxy:
        report = load(proxy)
        assert proxy.made >= 6

    are_once(storage, range(PARTS * EACH))
    assert report.inserted == PARTS * EACH

"""A worker with process jobs."""

import pytest

from djqueue import Worker
from tests.runtime.executors.site import HANDLERS, Site


@pytest.fixture
async def site(storage):
    async with Worker(storage, handlers=HANDLERS, shutdown_timeout=0, maintain=False) as worker:
        yield Site(storage, worker)

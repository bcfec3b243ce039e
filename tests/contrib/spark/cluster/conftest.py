"""Fixtures of the tests that kill parts of Spark."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.sessions import ROOT, environment


@pytest.fixture
def storage(redis_server: Any) -> Iterator[RedisStorage]:
    """Return a storage on an empty server."""
    redis_server.clean()
    with closing(RedisStorage(url=redis_server.url)) as storage:
        yield storage


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs a driver to its end, and returns its exit code; see `driver`."""

    def run(*loads: dict[str, Any]) -> int:
        command = [sys.executable, "-m", "tests.contrib.spark.cluster.driver"]
        driver = subprocess.Popen(
            [*command, str(tmp_path), json.dumps(loads)],
            cwd=ROOT,
            env={**os.environ, **environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = driver.communicate(timeout=600)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.communicate()
        assert driver.returncode in (0, -signal.SIGKILL), said[-4_000:]
        return driver.returncode

    return run

"""Celery workers for the tests: unmodified, in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import PATIENCE, eventually

READY = " ready."
START_TIMEOUT = 5 * PATIENCE
"""Seconds for a start, which needs seconds of CPU time: a minute if ten processes share each core."""


@contextmanager
def celery_worker(
    environment: dict[str, str], log: Path, *options: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker until the block ends."""
    command = [sys.executable, "-m", "celery", "-A", "tests.contrib.celery.app", "worker", "-l", "info"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--pool", "solo", "--without-mingle", "--without-gossip", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        eventually(
            lambda: READY in log.read_text() or process.poll() is not None,
            START_TIMEOUT,
            "the worker is ready",
        )
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

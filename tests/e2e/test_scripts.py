"""Short scripts of a project, which end without closing anything."""

import subprocess
import sys

import pytest

from tests.runtime.project import Project
from tests.support import PATIENCE

pytestmark = pytest.mark.slow

ON_SQLITE = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
DJQUEUE = {}
"""
EMBEDDED_WORKER = """
async with Worker(storage, [queue.name], {"double": lambda job: 2 * job.payload}):
    print(await queue.aenqueue_and_wait(21, name="double", wait=60))
"""
ASYNC_CALL = """
await asyncio.to_thread(storage.connect)
await queue.aenqueue(21, name="double")
print(42)
"""


@pytest.mark.parametrize("body", [EMBEDDED_WORKER, ASYNC_CALL], ids=["embedded worker", "async call"])
def test_script_ends_without_complaint_after_async_calls_of_the_storage(tmp_path, body):
    project = Project(tmp_path, "", ON_SQLITE)
    project.migrate()
    lines = body.strip().replace("\n", "\n    ")
    script = f"""
import asyncio, django
django.setup()
from djqueue import Queue, Worker
from djqueue.client import get_storage

async def main():
    storage, queue = get_storage(), Queue("work")
    {lines}

asyncio.run(main())
"""

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=project.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )

    assert (done.stdout, done.stderr) == ("42\n", "")

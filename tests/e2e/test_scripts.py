"""Scripts and test cases of a project, which end without closing anything."""

import subprocess
import sys

import pytest

from tests.runtime.project import Project
from tests.support import PATIENCE

from .load import postgresql

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


TEST_CASE = """
from django.test import TransactionTestCase
from djqueue import Worker
from shop.jobs import double

class DoubleTests(TransactionTestCase):
    def test_sync(self):
        with Worker():
            self.assertEqual(double.enqueue_and_wait(21, wait=60), 42)

    def test_sync_again(self):
        self.test_sync()

    async def test_async(self):
        async with Worker():
            self.assertEqual(await double.aenqueue_and_wait(21, wait=60), 42)

    async def test_async_again(self):
        await self.test_async()
"""
JOB = """
from djqueue import job

@job
def double(number):
    return 2 * number
"""


def run_tests_twice(project: Project) -> None:
    (project.folder / "test_double.py").write_text(TEST_CASE)
    for _ in range(2):
        done = project.manage("test", "test_double", "--noinput")

        assert done.returncode == 0, done.stderr
        assert "Ran 4 tests" in done.stderr


def test_transaction_test_case_with_an_embedded_worker_works_twice(tmp_path):
    project = Project(tmp_path, JOB, ON_SQLITE + 'DATABASES["default"]["TEST"] = {"NAME": "test.sqlite3"}')

    run_tests_twice(project)


@pytest.mark.thorough
def test_transaction_test_case_with_an_embedded_worker_works_twice_on_postgresql(tmp_path, postgres_server):
    database = postgresql(postgres_server.create_database())

    run_tests_twice(Project(tmp_path, JOB, f'DATABASES["default"] = {database!r}\nDJQUEUE = {{}}\n'))


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

"""A worker with process jobs, for tests."""

from pathlib import Path

from djqueue import Worker
from djqueue.client import JobType
from djqueue.core.job import JobRecord
from djqueue.core.states import State
from tests.runtime.executors import process_jobs as jobs
from tests.runtime.storages import RecordingStorage
from tests.support import aeventually

HANDLERS = {value.name: value for value in vars(jobs).values() if isinstance(value, JobType)}
ENDED = (State.COMPLETED, State.FAILED, State.CANCELLED)


class Site:
    """A worker with process jobs, and what its jobs came to."""

    def __init__(self, storage: RecordingStorage, worker: Worker) -> None:
        self.storage = storage
        self.worker = worker

    def enqueue(self, job_type, *args, **options):
        chosen = job_type.using(**options) if options else job_type
        return self.storage.enqueue([chosen._one(args, {})])[0]

    def record(self, result) -> JobRecord:
        found = self.storage.reads.jobs(result.queue, [result.id])[0]
        assert found is not None
        return found

    async def reached(self, result, *states) -> JobRecord:
        await aeventually(lambda: self.record(result).state in states, message=f"job is {states}")
        return self.record(result)

    async def ended(self, result) -> JobRecord:
        return await self.reached(result, *ENDED)

    async def result(self, job_type, *args, **options):
        """What a job returned."""
        record = await self.ended(self.enqueue(job_type, *args, **options))
        assert record.state is State.COMPLETED, record.error
        return decoded(record.result)

    async def failure(self, job_type, *args, **options):
        """Reason, type and message of a failed job, and its record."""
        record = await self.ended(self.enqueue(job_type, *args, **options))
        assert record.state is State.FAILED
        assert record.error is not None
        return record.reason, record.error.type.rpartition(".")[2], record.error.message

    async def record_of_failure(self, job_type, *args) -> JobRecord:
        return await self.reached(self.enqueue(job_type, *args), State.FAILED)

    async def running(self, job_type, *args, **options):
        """A job that has been given to its process."""
        result = self.enqueue(job_type, *args, **options)
        await aeventually(
            lambda: any(p.run and p.run.claimed.id == result.id for p in self.processes()), message="it runs"
        )
        return result

    def processes(self):
        return [p for group in self.worker.parts.executor.groups.values() for p in group.processes]

    def pids_of(self, job_type):
        return {process.pid for process in self.processes() if process.name == job_type.name}

    def busy_process(self):
        return next((process for process in self.processes() if process.run), None)


def decoded(data):
    from djqueue.codecs import MSGPACK, decode

    return decode(data, MSGPACK)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def pid_in(path: Path) -> int:
    return int(await aeventually(lambda: path.exists() and path.read_text(), message="the pid is written"))

"""Isolated and subprocess jobs: features, limits, endings, and leftovers."""

import errno
import os
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from djqueue import Worker
from djqueue.client import JobType
from djqueue.conf import get_settings
from djqueue.core import procfs
from djqueue.core.job import ItemMark, JobRecord
from djqueue.core.states import State
from djqueue.errors import ConfigurationError
from djqueue.runtime.executors.processes import frames, jobprocess, kernel
from djqueue.runtime.executors.processes import template as templates
from djqueue.runtime.runs import Stop
from tests.runtime.executors import process_jobs as jobs
from tests.runtime.storages import RecordingStorage
from tests.support import PATIENCE, aeventually

pytestmark = pytest.mark.skipif(kernel.missing() is not None, reason=f"{kernel.missing()}")
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


@pytest.fixture
async def site(storage):
    async with Worker(storage, handlers=HANDLERS, shutdown_timeout=0, maintain=False) as worker:
        yield Site(storage, worker)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def pid_in(path: Path) -> int:
    return int(await aeventually(lambda: path.exists() and path.read_text(), message="the pid is written"))


# What a job can do.


async def test_job_in_a_process_returns_its_result(site):
    for job_type in (jobs.add, jobs.aadd, jobs.add_fresh, jobs.gives_awaitable):
        assert await site.result(job_type, 20, 22) == 42, job_type.name


async def test_isolated_jobs_of_one_type_reuse_a_process_outside_the_worker(site):
    first, second = await site.result(jobs.pid), await site.result(jobs.pid)

    assert first == second != os.getpid()


async def test_each_subprocess_job_runs_in_a_new_process(site):
    first, second = await site.result(jobs.fresh_pid), await site.result(jobs.fresh_pid)

    assert len({first, second, os.getpid()}) == 3


async def test_process_is_replaced_after_its_maximum_number_of_jobs(site):
    pids = [await site.result(jobs.pid_of_two) for _ in range(4)]

    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_jobs_of_two_types_never_share_a_process(site):
    await site.result(jobs.pid)

    assert await site.result(jobs.remembers, 1) == (0, 1)


async def test_context_variables_end_with_the_job_and_globals_stay_in_the_process(site):
    assert await site.result(jobs.remembers, 7) == (0, 1)
    assert await site.result(jobs.remembers, 8) == (0, 2)


async def test_isolated_jobs_run_concurrently(site):
    for _ in range(3):
        await site.running(jobs.sleeps, 600)

    assert sum(process.run is not None for process in site.processes()) == 3


async def test_current_job_is_available_in_a_process(site):
    result = site.enqueue(jobs.describes, timeout=60)

    record = await site.ended(result)

    assert decoded(record.result) == [result.id, result.queue, jobs.describes.name, [], 1, True]


async def test_progress_and_log_lines_reach_the_storage(site):
    record = await site.ended(site.enqueue(jobs.reports))

    assert record.progress == {"half": True}
    assert [line for _, line in record.logs] == ["on its way"]


async def test_output_of_a_job_and_its_programs_is_logged_with_control_characters_escaped(site):
    record = await site.ended(site.enqueue(jobs.prints))

    lines = sorted(line for _, line in record.logs)
    assert lines == ["an error line", "from a program", "hello from \\x1b[31mred\\x1b[0m"]


async def test_excessive_output_is_truncated_in_the_middle(site):
    record = await site.ended(site.enqueue(jobs.floods))

    lines = [line for _, line in record.logs]
    assert record.state is State.COMPLETED
    assert lines[0] == "line 0"
    assert lines[-1] == "line 199999"
    assert any("bytes left out" in line for line in lines)
    assert sum(map(len, lines)) < 25_000


@pytest.mark.parametrize("job_type", [jobs.reads_children, jobs.areads_children], ids=str)
async def test_isolated_job_reads_results_of_its_dependencies(site, job_type):
    one, two = site.enqueue(jobs.add, 1, 2), site.enqueue(jobs.add, 3, 4)

    assert await site.result(job_type, depends_on=[(one.queue, one.id), (two.queue, two.id)]) == [3, 7]


@pytest.mark.parametrize("job_type", [jobs.yields, jobs.ayields], ids=str)
async def test_isolated_generator_streams_its_items_in_order(site, job_type):
    result = site.enqueue(job_type, 5_000)
    await site.ended(result)

    [page] = site.storage.reads.items(result.queue, [ItemMark(result.id, 0, 0)])

    assert page.sent == 5_000
    assert [decoded(item) for item in page.items] == list(range(len(page.items)))


async def test_isolated_job_with_pickled_payload_is_rejected(storage, settings):
    settings.DJQUEUE = {"ACCEPT_CONTENT": ["application/x-python-serialize", "application/x-djqueue-msgpack"]}
    async with Worker(storage, handlers=HANDLERS) as worker:
        reason, _, message = await Site(storage, worker).failure(
            jobs.add, 1, 2, content_type="application/x-python-serialize"
        )

    assert reason == "explicit_fail"
    assert "cannot run isolated" in message


# How a handler ends.


async def test_exception_in_a_process_fails_the_job_with_its_type_and_message(site):
    assert await site.failure(jobs.raises, "broken") == ("max_attempts_exceeded", "ValueError", "broken")


async def test_retry_snooze_and_unrecoverable_error_work_in_a_process(site):
    assert await site.result(jobs.fails_once) == "worked"
    assert await site.result(jobs.snoozes) == "awake"
    assert (await site.failure(jobs.refuses))[0] == "explicit_fail"


async def test_result_that_cannot_be_stored_fails_the_isolated_job(site):
    assert (await site.failure(jobs.returns_what_cannot_be_stored))[0] == "invalid_result"
    assert (await site.failure(jobs.returns_too_much))[0] == "invalid_result"


async def test_sys_exit_fails_the_job_and_not_the_process(site):
    assert await site.failure(jobs.exits, 3) == ("max_attempts_exceeded", "SystemExit", "3")


@pytest.mark.parametrize(
    ("job_type", "words"),
    [
        (jobs.leaves_at_once, "exit code 0"),
        (jobs.kills_itself, "SIGKILL; the system may have run out of memory"),
        (jobs.segfaults, "SIGSEGV"),
    ],
    ids=str,
)
async def test_death_of_a_process_fails_only_its_own_job(site, job_type, words):
    other = await site.running(jobs.sleeps, 1)

    reason, kind, message = await site.failure(job_type)

    assert (reason, kind) == ("worker_crashed", "WorkerCrashedError")
    assert words in message
    assert decoded((await site.ended(other)).result) == "slept"


async def test_crash_traceback_contains_the_stack_of_the_handler(site):
    record = await site.ended(site.enqueue(jobs.segfaults))

    assert "Segmentation fault" in record.error.traceback
    assert "in segfaults" in record.error.traceback


async def test_repeated_crashes_use_up_the_attempts_and_fail_the_job(site):
    record = await site.ended(site.enqueue(jobs.segfaults_twice))

    assert (record.attempts, record.reason) == (2, "worker_crashed")


# Limits.


@pytest.mark.parametrize(
    "job_type",
    [
        jobs.fills_memory,
        jobs.fills_memory_of_a_program,
        jobs.fills_shared_memory,
        jobs.fills_a_file_in_memory,
        jobs.fills_memory_without_its_main_thread,
    ],
    ids=str,
)
async def test_job_above_its_memory_limit_is_killed(site, job_type):
    reason, kind, message = await site.failure(job_type)

    assert (reason, kind) == ("memory_limit", "JobMemoryLimitError")
    assert "its limit is 128 MiB" in message


async def test_memory_that_processes_of_a_job_share_counts_once(site):
    assert await site.result(jobs.shares_mapped_memory) is None


@pytest.mark.parametrize("job_type", [jobs.starts_many, jobs.starts_many_threads], ids=str)
async def test_job_with_too_many_processes_or_threads_is_killed_with_all_of_them(site, tmp_path, job_type):
    started = tmp_path / "pids"
    started.touch()

    reason, kind, message = await site.failure(job_type, str(started))

    assert (reason, kind) == ("process_limit", "JobLimitError")
    assert "its limit is 20" in message
    assert not any(lives(int(pid)) for pid in started.read_text().split())


async def test_programs_left_behind_are_reaped_while_the_job_runs(site):
    assert await site.result(jobs.leaves_programs_that_end, 100) == 0


async def test_handler_that_waits_for_any_program_gets_its_own(site):
    assert await site.result(jobs.waits_for_any_program) is True


async def test_address_space_of_a_process_is_limited(site):
    assert (await site.failure(jobs.asks_for_much_at_once))[1] == "MemoryError"


async def test_processor_time_of_a_process_is_limited(site):
    reason, kind, message = await site.failure(jobs.burns)

    assert (reason, kind) == ("cpu_limit", "JobLimitError")
    assert "1 s of processor time" in message


async def test_open_files_and_file_sizes_of_a_process_are_limited(site, tmp_path):
    assert (await site.failure(jobs.opens_files))[1] == "OSError"
    assert (await site.failure(jobs.writes_much, str(tmp_path / "file")))[1] == "OSError"


async def test_process_of_a_job_writes_no_core_dump(site):
    assert await site.result(jobs.limits) == [0, 1_024]


# Timeouts and stopping.


@pytest.mark.parametrize("job_type", [jobs.sleeps, jobs.asleeps], ids=str)
async def test_isolated_job_is_interrupted_at_its_timeout(site, job_type):
    reason, kind, message = await site.failure(job_type, 60, timeout=0.2)

    assert (reason, kind) == ("timeout", "JobTimeoutError")
    assert message == "ran longer than its timeout of 0.2 s"


async def test_isolated_job_that_returns_after_its_cancellation_completes(site):
    assert await site.result(jobs.waits_until_cancelled, timeout=0.2) == "stopped by itself"


async def test_interrupted_job_can_clean_up(site, tmp_path):
    await site.failure(jobs.cleans_up, str(tmp_path / "note"), timeout=0.2)

    assert (tmp_path / "note").read_text() == "cleaned"


async def test_job_that_ignores_all_signals_is_killed(site, tmp_path):
    result = site.enqueue(jobs.ignores_everything, str(tmp_path / "pid"))
    pid = await pid_in(tmp_path / "pid")

    site.storage.jobs.cancel(result.queue, [result.id])

    assert (await site.ended(result)).state is State.CANCELLED
    await aeventually(lambda: not lives(pid), message="the process is gone")


async def test_job_that_suspends_itself_is_killed_at_its_timeout(site):
    assert (await site.failure(jobs.stops_itself, timeout=0.2))[0] == "timeout"


async def test_cancelled_isolated_job_is_interrupted(site):
    result = await site.running(jobs.sleeps, 60)

    site.storage.jobs.cancel(result.queue, [result.id])

    assert (await site.ended(result)).state is State.CANCELLED


async def test_process_of_a_cancelled_job_runs_no_other_job(site):
    before = await site.result(jobs.pid)
    result = await site.running(jobs.waits_until_cancelled)
    asked = next(process.pid for process in site.processes() if process.run)
    site.storage.jobs.cancel(result.queue, [result.id])
    await site.ended(result)

    await aeventually(lambda: not lives(asked), message="the process is gone")
    assert await site.result(jobs.pid) == before


async def test_isolated_jobs_interrupted_by_shutdown_use_no_attempt(storage):
    async with Worker(storage, handlers=HANDLERS, shutdown_timeout=0) as worker:
        site = Site(storage, worker)
        results = [await site.running(jobs.sleeps, 60), await site.running(jobs.stops_itself)]
        pids = [process.pid for process in site.processes()]

    for result in results:
        record = site.record(result)
        assert (record.state, record.failures) == (State.WAITING, 0)
    assert not any(map(lives, pids))


async def test_lost_lease_ends_the_process_of_the_job(site):
    result = await site.running(jobs.sleeps, 60)
    process = next(process for process in site.processes() if process.run)

    site.worker.parts.executor.stop(process.run, Stop.LOST)

    await aeventually(lambda: not lives(process.pid), message="the process is gone")
    assert site.record(result).state is State.ACTIVE


async def test_stopped_worker_leaves_no_processes(storage):
    async with Worker(storage, handlers=HANDLERS, shutdown_timeout=5, maintain=False) as worker:
        site = Site(storage, worker)
        await site.result(jobs.pid)
        pids = [
            *(process.pid for process in site.processes()),
            worker.parts.executor.groups[None].templates.template.pid,
        ]

    assert len(pids) == 2
    assert not any(map(lives, pids))


# What jobs leave behind.


async def test_process_with_a_remaining_thread_is_replaced(site):
    pid = await site.result(jobs.leaves_a_thread)

    await aeventually(lambda: not lives(pid), message="the process is gone")
    assert await site.result(jobs.leaves_a_thread) != pid


@pytest.mark.parametrize("job_type", [jobs.leaves_a_program, jobs.leaves_a_daemon], ids=str)
async def test_program_left_by_a_job_is_killed(site, tmp_path, job_type):
    pid = await site.result(job_type, str(tmp_path / "pid"))

    left = await pid_in(tmp_path / "pid")
    await aeventually(lambda: not lives(left) and not lives(pid), message="both are gone")


async def test_daemon_left_by_a_crashed_job_is_killed(site, tmp_path):
    await site.failure(jobs.leaves_a_daemon_and_crashes, str(tmp_path / "pid"))

    left = await pid_in(tmp_path / "pid")
    await aeventually(lambda: not lives(left), message="it is gone")


async def test_programs_of_a_job_end_with_a_killed_template(site, tmp_path):
    await site.failure(jobs.leaves_a_daemon_and_kills_the_template, str(tmp_path / "pid"))

    left = await pid_in(tmp_path / "pid")
    await aeventually(lambda: not lives(left), message="it is gone")


async def test_process_inherits_only_its_socket_and_its_output(site):
    found = await site.result(jobs.descriptors)

    assert found[0] == "/dev/null"
    assert [name.partition(":")[0] for name in found[1:]] == ["pipe", "pipe", "socket"]


# What a process may not do.


VIOLATIONS = [
    struct.pack(">I", 2**31),
    b"\x00\x00\x00\x01\xc1",
    frames.pack(99, "x"),
    frames.pack(frames.RESULT, 1, "wins", b"", 0, None, ""),
    frames.pack(frames.RESULT, 1, "complete", "text", 0, None, ""),
    frames.pack(frames.RESULT, 1, "complete", b"", -1, None, ""),
    frames.pack(frames.RESULT, 1, "fail", None, 0, ["one"], ""),
    frames.pack(frames.RESULT),
    frames.pack(frames.RESULT, 2, "complete", b"", 0, None, ""),
    frames.pack(frames.RESULT, 1, "retry", None, 2**52, None, ""),
    frames.pack(frames.PROGRESS, b"\xc1"),
    frames.pack(frames.LOG, 7),
    frames.pack(frames.ITEM, "text"),
    frames.pack({"kind": 1}),
]
"""Data that no process of a job may send."""


async def test_process_that_violates_the_protocol_is_killed(site):
    for data in VIOLATIONS:
        reason, kind, message = await site.failure(jobs.sends, data)

        assert (reason, kind) == ("worker_crashed", "WorkerCrashedError"), data
        assert "broke the protocol" in message, data
    assert await site.result(jobs.add, 1, 1) == 2


async def test_process_that_reports_a_result_of_another_job_is_ended(site):
    first = await site.ended(site.enqueue(jobs.answers_twice))
    second = site.enqueue(jobs.answers_twice)

    assert first.state is State.COMPLETED
    assert (await site.ended(second)).attempts == 1
    assert await site.result(jobs.add, 1, 1) == 2


async def test_many_messages_of_one_job_do_not_delay_other_jobs(site):
    result = site.enqueue(jobs.chatters, 20_000)

    assert await site.result(jobs.add, 1, 1) == 2
    assert decoded((await site.ended(result)).result) == 20_000


async def test_endless_generator_fails_at_the_item_limit(site):
    assert (await site.failure(jobs.yields_for_ever))[0] == "invalid_result"


async def test_killed_template_process_is_replaced(site):
    reason, _, message = await site.failure(jobs.kills_the_template)

    assert reason == "worker_crashed"
    assert "template process" in message
    assert await site.result(jobs.add, 1, 1) == 2


async def test_worker_registration_lists_its_job_processes(site):
    result = await site.running(jobs.sleeps, 60)
    [process] = site.processes()
    site.worker.parts.heartbeat.hasten()

    found = await aeventually(lambda: site.storage.workers.all()[0].processes, message="it is listed")

    [info] = found
    assert info[:4] == (process.pid, jobs.sleeps.name, "isolated", 1)
    assert info.rss > 1_000_000
    assert (info.queue, info.job) == (result.queue, result.id)


# Processes that die at the start of a job.


@pytest.fixture
def dying(monkeypatch):
    """Let the next processes die after they have been given a job, and before they read it."""

    def die(times):
        left = [times]
        assign = jobprocess.JobProcess.assign

        def assign_and_die(process, run, deadline):
            if left[0]:
                os.kill(process.pid, signal.SIGSTOP)
            assign(process, run, deadline)
            if left[0]:
                left[0] -= 1
                os.kill(process.pid, signal.SIGKILL)

        monkeypatch.setattr(jobprocess.JobProcess, "assign", assign_and_die)

    return die


@pytest.mark.parametrize("job_type", [jobs.add, jobs.add_fresh], ids=str)
async def test_process_that_dies_before_it_starts_its_job_uses_no_attempt(site, dying, job_type):
    dying(3)

    record = await site.ended(site.enqueue(job_type, 1, 1, max_attempts=1))

    assert (record.state, record.attempts, record.failures) == (State.COMPLETED, 1, 0)


async def test_idle_process_that_died_before_assignment_uses_no_attempt(site, monkeypatch):
    await site.result(jobs.add, 1, 1)
    [process] = site.processes()
    assign = jobprocess.JobProcess.assign

    def assign_to_a_dead_one(one, run, deadline):
        if one is process:
            os.kill(one.pid, signal.SIGKILL)
            one.wait(PATIENCE)
        return assign(one, run, deadline)

    monkeypatch.setattr(jobprocess.JobProcess, "assign", assign_to_a_dead_one)
    record = await site.ended(site.enqueue(jobs.add, 1, 1, max_attempts=1))

    assert (record.state, record.attempts) == (State.COMPLETED, 1)


async def test_job_fails_after_its_processes_repeatedly_died_before_the_start(site, dying):
    dying(4)

    record = await site.ended(site.enqueue(jobs.add, 1, 1, max_attempts=1))

    assert (record.reason, record.attempts) == ("worker_crashed", 1)


async def test_crash_after_the_start_of_the_job_uses_an_attempt(site):
    record = await site.ended(site.enqueue(jobs.leaves_at_once, max_attempts=1))

    assert (record.reason, record.attempts) == ("worker_crashed", 1)


# The choice.


async def test_executor_defaults_to_the_queue_and_then_to_the_settings(storage, settings):
    settings.DJQUEUE = {"EXECUTOR": "isolated", "QUEUES": {"near": {"EXECUTOR": "inline"}, "default": {}}}
    async with Worker(storage, handlers={jobs.plain_pid.name: jobs.plain_pid}) as worker:
        site = Site(storage, worker)

        assert await site.result(jobs.plain_pid) != os.getpid()
        assert await site.result(jobs.plain_pid, queue="near") == os.getpid()


async def test_worker_without_isolated_jobs_starts_no_template_process(storage):
    async with Worker(storage, handlers={jobs.plain_pid.name: jobs.plain_pid}) as worker:
        assert not hasattr(worker.parts.executor, "groups")


async def test_inline_option_runs_isolated_jobs_in_the_worker(storage):
    async with Worker(storage, handlers=HANDLERS, inline=True) as worker:
        assert await Site(storage, worker).result(jobs.pid) == os.getpid()


def test_handler_that_is_not_a_job_function_is_rejected_for_processes(storage, settings):
    settings.DJQUEUE = {"EXECUTOR": "isolated"}
    get_settings.cache_clear()

    with pytest.raises(ConfigurationError, match="only @job functions can"):
        Worker(storage, handlers={"plain": lambda job: None})


async def test_jobs_of_a_module_that_cannot_be_imported_are_delayed(storage, caplog, monkeypatch):
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if "site-packages" in path])
    async with Worker(storage, handlers=HANDLERS) as worker:
        site = Site(storage, worker)
        result = site.enqueue(jobs.add, 1, 2)
        await aeventually(lambda: site.record(result).state is State.DELAYED, message="it is put back")

        assert site.record(result).failures == 0
    assert "cannot start" in caplog.text


async def test_hundred_isolated_jobs_complete(site):
    results = [site.enqueue(jobs.add, number, 1) for number in range(100)]

    for number, result in enumerate(results):
        assert decoded((await site.ended(result)).result) == number + 1
    assert len(site.processes()) <= 10


async def test_hanging_template_process_is_replaced(site, monkeypatch):
    monkeypatch.setattr(templates, "SLOW_FORK", 1.0)
    await site.result(jobs.add, 1, 1)
    template = site.worker.parts.executor.groups[None].templates.template
    os.kill(template.pid, signal.SIGSTOP)

    assert await site.result(jobs.add_fresh, 1, 1) == 2
    assert site.worker.parts.executor.groups[None].templates.template is not template


async def test_shutdown_releases_jobs_that_wait_for_a_process(storage):
    async with Worker(storage, handlers=HANDLERS, shutdown_timeout=60, maintain=False) as worker:
        site = Site(storage, worker)
        os.kill(worker.parts.executor.groups[None].templates.template.pid, signal.SIGSTOP)
        result = site.enqueue(jobs.add, 1, 1)
        await aeventually(lambda: worker.running, message="it is claimed")

    assert (site.record(result).state, site.record(result).attempts) == (State.WAITING, 0)


async def test_too_many_open_files_delay_new_jobs_and_keep_running_ones(site, monkeypatch):
    running = await site.running(jobs.sleeps, 1)

    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(templates.Template, "fork", full)
        waiting = site.enqueue(jobs.add, 1, 1)
        await site.reached(waiting, State.DELAYED)

    assert decoded((await site.ended(running)).result) == "slept"
    assert decoded((await site.ended(waiting)).result) == 2


# Found by review.


async def test_limits_apply_to_jobs_in_a_reused_pool(site):
    await site.result(jobs.add, 1, 1)

    assert (await site.failure(jobs.fills_memory))[0] == "memory_limit"
    assert await site.result(jobs.chatters, 3_000) == 3_000


async def test_processor_time_limit_kills_a_job_that_ignores_the_signal(site):
    assert (await site.failure(jobs.burns_and_ignores))[0] == "cpu_limit"


async def test_process_that_requests_without_reading_replies_is_killed(site):
    reason, _, message = await site.failure(jobs.asks_without_reading, 100)

    assert reason == "worker_crashed"
    assert "without reading the last answer" in message


async def test_async_handler_that_suppresses_cancellation_is_cancelled_again(site, tmp_path):
    await site.failure(jobs.cleans_up_async, str(tmp_path / "note"), timeout=0.2)

    assert (tmp_path / "note").read_text() == "cleaned"


async def test_job_can_close_its_standard_output(site):
    assert await site.result(jobs.closes_stdout) == "done"


async def test_sys_path_may_contain_path_objects(storage, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [*sys.path, tmp_path])
    async with Worker(storage, handlers=HANDLERS, maintain=False) as worker:
        assert await Site(storage, worker).result(jobs.add, 1, 1) == 2


async def test_template_process_imports_nothing_from_the_working_directory(storage, monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    async with Worker(storage, handlers=HANDLERS, maintain=False) as worker:
        assert await Site(storage, worker).result(jobs.add, 1, 1) == 2


async def test_stop_before_the_start_of_a_job_cancels_it(site):
    started = []
    start = site.worker.parts.executor.start

    def stopped_first(run):
        site.worker.parts.executor.stop(run, Stop.REQUESTED)
        started.append(run)
        start(run)

    site.worker.parts.claim_loop._executor = SimpleNamespace(start=stopped_first)
    record = await site.ended(site.enqueue(jobs.sleeps, 60))

    assert started
    assert record.state is State.CANCELLED


async def test_processes_that_fail_to_start_leave_no_children(site, monkeypatch):
    await site.result(jobs.add, 1, 1)
    group = site.worker.parts.executor.groups[None]
    fork = templates.Template.fork

    def broken(template, request):
        return fork(template, request._replace(files="many"))

    with monkeypatch.context() as patched:
        patched.setattr(templates.Template, "fork", broken)
        result = site.enqueue(jobs.pid)
        await site.reached(result, State.DELAYED)
    await site.ended(result)

    def left():
        return set(procfs.children(group.templates.template.pid)) - {
            process.root for process in site.processes()
        }

    await aeventually(lambda: not left(), message="no process is left")


async def test_error_while_handling_a_process_exit_fails_its_job(site, monkeypatch):
    def broken(_):
        raise OverflowError("no such status")

    monkeypatch.setattr(jobprocess.JobProcess, "ending", broken)

    assert (await site.failure(jobs.leaves_at_once))[1] == "OverflowError"


def test_job_type_under_another_name_is_rejected_for_processes(storage):
    with pytest.raises(ConfigurationError, match="not its own"):
        Worker(storage, handlers={"other": jobs.add})


async def test_timers_and_signal_handlers_end_with_their_job(site):
    [pid] = await site.result(jobs.leaves_timers_and_tasks)

    assert await site.result(jobs.leaves_timers_and_tasks) == [pid]
    assert (await site.failure(jobs.sleeps, 60, timeout=0.2))[0] == "timeout"


async def test_job_fails_whatever_its_async_handler_raises(site):
    failed = await site.record_of_failure(jobs.raises_what_cannot_be_looked_at)

    assert failed.error.type.endswith("HostileError")


async def test_changes_of_a_job_to_its_process_do_not_reach_the_next_one(site):
    first = await site.result(jobs.changes_its_process)

    assert await site.result(jobs.changes_its_process) == first


async def test_process_forked_by_an_isolated_job_can_be_terminated(site):
    assert await site.result(jobs.terminates_a_fork) == -signal.SIGTERM


async def test_shared_memory_of_forked_processes_counts_once(site):
    assert await site.result(jobs.shares_memory) == 100 * 2**20

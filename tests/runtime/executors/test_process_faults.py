"""Isolated and subprocess jobs: limits, leftovers, and processes that fail."""

import os
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from djqueue import Worker
from djqueue.core import procfs
from djqueue.core.states import State
from djqueue.errors import ConfigurationError
from djqueue.runtime import problems
from djqueue.runtime.executors.processes import frames, jobprocess, kernel
from djqueue.runtime.executors.processes import template as templates
from djqueue.runtime.runs import Stop
from tests.runtime.executors import process_jobs as jobs
from tests.runtime.executors.site import HANDLERS, Site, decoded, lives, pid_in
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.skipif(kernel.missing() is not None, reason=f"{kernel.missing()}")


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


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_job_whose_process_was_stopped_is_named_and_then_killed(site, monkeypatch):
    monkeypatch.setattr(jobprocess, "STOPPED_CHECK", 0.0)
    monkeypatch.setattr(jobprocess, "STOPPED_NOTED", 0.0)
    result = await site.running(jobs.stops_itself, max_attempts=1)
    [problem] = await aeventually(problems.noted)
    monkeypatch.setattr(jobprocess, "STOPPED_PATIENCE", 0.0)
    record = await site.ended(result)

    assert problem.id == "worker.process"
    assert f"{jobs.stops_itself.name} [{result.id}]" in problem.text
    assert record.reason == "worker_crashed"
    assert "was stopped by a signal" in record.error.message
    await aeventually(lambda: not problems.noted())


@pytest.fixture
def dying(monkeypatch):
    """Let the next processes die after they have been given a job, and before they read it."""

    def die(times):
        left = [times]
        assign = jobprocess.JobProcess.assign

        def assign_and_die(process, run, deadline):
            if left[0]:
                os.kill(process.pid, signal.SIGSTOP)
                # The signal arrives a moment later, in which the process could read the job.
                eventually(lambda: _state_of(process.pid) == "T")
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


@pytest.mark.parametrize("returns", [True, False])
async def test_child_that_a_job_forks_does_not_report_its_outcome(site, returns):
    assert await site.result(jobs.returns_in_a_fork, returns) == "the parent's"

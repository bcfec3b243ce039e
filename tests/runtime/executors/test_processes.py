"""Isolated and subprocess jobs: what they can do, and how they end."""

import errno
import os
import signal

import pytest

from djqueue import Worker
from djqueue.conf import get_settings
from djqueue.core.job import ItemMark
from djqueue.core.states import State
from djqueue.errors import ConfigurationError
from djqueue.runtime.executors.processes import kernel
from djqueue.runtime.executors.processes import template as templates
from djqueue.runtime.runs import Stop
from tests.runtime.executors import process_jobs as jobs
from tests.runtime.executors.site import HANDLERS, Site, decoded, lives, pid_in
from tests.support import aeventually

pytestmark = pytest.mark.skipif(kernel.missing() is not None, reason=f"{kernel.missing()}")


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

"""Permissions of jobs, as a worker applies them."""

import os
import signal
import socket
import threading

import pytest

from djqueue import Permissions, Worker, job
from djqueue.client import JobType
from djqueue.core.permissions import NOTHING
from djqueue.core.states import State
from djqueue.errors import ConfigurationError, OptionError
from djqueue.runtime.executors.processes import template
from djqueue.runtime.executors.sandbox import SandboxUnavailableError, apply, landlock
from djqueue.runtime.runs import Stop
from tests.runtime.executors import permission_jobs as jobs
from tests.runtime.executors.test_processes import Site, decoded
from tests.support import aeventually

pytestmark = [
    pytest.mark.skipif(bool(apply.missing_layers(NOTHING)), reason="this kernel cannot enforce permissions"),
]
HANDLERS = {value.name: value for value in vars(jobs).values() if isinstance(value, JobType)}


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch):
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.runtime.executors.plain_settings")


def handlers(*job_types):
    return {job_type.name: job_type for job_type in job_types}


@pytest.fixture
def site_of(storage):
    """A worker for some job types; each permission set has a template of its own."""

    class Opened:
        def __init__(self, *job_types):
            self.worker = Worker(storage, handlers=handlers(*job_types), maintain=False, shutdown_timeout=0)

        async def __aenter__(self):
            await self.worker.__aenter__()
            return Site(storage, self.worker)

        async def __aexit__(self, *error):
            await self.worker.__aexit__(*error)

    return Opened


@pytest.fixture
def server():
    """A server on a loopback port that greets everyone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"hello")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def exists(path):
    return os.path.exists(path)


async def test_job_without_permissions_can_compute(site_of):
    async with site_of(jobs.add, jobs.add_fresh) as site:
        assert await site.result(jobs.add, 20, 22) == 42
        assert await site.result(jobs.add_fresh, 20, 22) == 42


async def test_sandbox_is_applied_before_the_handler_is_imported(site_of):
    async with site_of(jobs.when_imported) as site:
        assert await site.result(jobs.when_imported) == {
            "list": "PermissionError",
            "project": "PermissionError",
        }


async def test_job_without_permissions_reaches_no_files_network_or_programs(site_of, tmp_path, server):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    attempts = [
        (jobs.reads, (str(secret),)),
        (jobs.reads, ("/etc/passwd",)),
        (jobs.reads, (__file__,)),
        (jobs.writes, (str(tmp_path / "new"),)),
        (jobs.connects, ("127.0.0.1", server)),
        (jobs.starts, ()),
        (jobs.forks, ()),
        (jobs.signals, (os.getpid(),)),
    ]
    async with site_of(*(job_type for job_type, _ in attempts)) as site:
        for job_type, arguments in attempts:
            reason, kind, _ = await site.failure(job_type, *arguments)
            assert (reason, kind) == ("max_attempts_exceeded", "PermissionError"), job_type
    assert not (tmp_path / "new").exists()


def test_files_for_imports_must_exist_and_hold_no_secrets(storage, settings, tmp_path):
    (tmp_path / ".env").touch()
    for path, words in (("/nowhere", "does not exist"), (tmp_path / ".env", "may hold secrets")):
        settings.DJQUEUE = {"SANDBOX_IMPORTS": [path]}
        with pytest.raises(ConfigurationError, match=words):
            Worker(storage, handlers=handlers(jobs.add))


async def test_environment_is_filtered_before_the_program_starts(site_of, monkeypatch):
    monkeypatch.setenv("SHOWN_ONE", "1")
    monkeypatch.setenv("HIDDEN_KEY", "secret")
    async with site_of(jobs.environment, jobs.shown_environment) as site:
        found = await site.result(jobs.environment)
        assert {"PATH", "DJANGO_SETTINGS_MODULE"} <= set(found)
        assert not {"SHOWN_ONE", "HIDDEN_KEY"} & set(found)
        assert await site.result(jobs.shown_environment) == ["SHOWN_ONE"]


async def test_error_for_a_denied_database_names_the_required_permission(site_of):
    uses = (jobs.uses_the_database, jobs.uses_a_transaction, jobs.uses_a_cursor, jobs.awaits_the_database)
    async with site_of(*uses) as site:
        for job_type in uses:
            _, kind, message = await site.failure(job_type)
            assert kind == "PermissionError", job_type
            assert message == (
                "the permissions of this job do not include the database 'default': to allow it, add "
                'Permissions(db=["default"]) to the job type'
            )


async def test_storage_is_not_accessible_in_the_sandbox(site_of):
    async with site_of(jobs.uses_the_storage) as site:
        assert (await site.record_of_failure(jobs.uses_the_storage)).state is State.FAILED


async def test_each_process_has_an_empty_temporary_directory_that_is_removed_with_it(site_of):
    async with site_of(jobs.keeps_a_file) as site:
        first, before = await site.result(jobs.keeps_a_file)
        second, again = await site.result(jobs.keeps_a_file)

        assert before == again == []
        assert first != second
        await aeventually(lambda: not exists(first), message="the directory is gone")
    assert not exists(os.path.dirname(first))


async def test_listed_hosts_are_reachable_and_denied_hosts_are_logged(site_of, server):
    async with site_of(jobs.connects_to_localhost) as site:
        assert await site.result(jobs.connects_to_localhost, "localhost", server) == b"hello"
        denied = site.enqueue(jobs.connects_to_localhost, "127.0.0.2", server)
        record = await site.ended(denied)
        assert record.error.type == "builtins.PermissionError"
        assert f"Denied access: 127.0.0.2:{server}" in [line for _, line in record.logs]
        record = await site.ended(site.enqueue(jobs.connects_to_localhost, "example.org", 80))
        assert record.error.type == "builtins.PermissionError"
        assert "Denied access: example.org:80" in [line for _, line in record.logs]


async def test_host_names_are_resolved_by_the_broker_of_the_own_template(site_of, server, monkeypatch):
    """Also after another template has replaced it: only that broker makes the connection."""
    monkeypatch.setattr(template, "SLOW_FORK", 0.2)
    async with site_of(jobs.connects_when_told, jobs.connects_to_localhost) as site:
        [group] = site.worker.parts.executor.groups.values()
        waiting = site.enqueue(jobs.connects_when_told, "localhost", server)
        process = await aeventually(site.busy_process, message="it runs")
        await site.reached(waiting, State.ACTIVE)
        old = group.templates.template
        os.kill(old.pid, signal.SIGSTOP)
        assert await site.result(jobs.connects_to_localhost, "localhost", server) == b"hello"

        assert process.template is old is not group.templates.template
        run = process.run
        os.kill(old.pid, signal.SIGCONT)
        site.worker.parts.executor.stop(run, Stop.SHUTDOWN)
        await aeventually(lambda: run.outcome is not None, message="it has ended")

    assert run.outcome.kind == "complete"
    assert decoded(run.outcome.result) == b"hello"


async def test_job_with_run_permission_starts_programs(site_of):
    async with site_of(jobs.starts_a_program) as site:
        assert await site.result(jobs.starts_a_program) == "hello\n"


async def test_only_job_types_with_equal_permissions_share_a_template(site_of):
    async with site_of(jobs.add, jobs.reads, jobs.shown_environment) as site:
        groups = site.worker.parts.executor.groups

        assert {permissions.describe() for permissions, _ in groups} == {"nothing", "env=[SHOWN_*]"}


# Systems that cannot enforce them.


def test_worker_rejects_permissions_that_the_system_cannot_enforce(storage, monkeypatch):
    monkeypatch.setattr(landlock, "abi", lambda: 0)

    with pytest.raises(SandboxUnavailableError, match=r"job '.*add' cannot run here: .*Landlock.*lsm="):
        Worker(storage, handlers=handlers(jobs.add))


def test_unenforced_permissions_need_consent_of_settings_and_job(storage, monkeypatch, settings):
    @job(name="relaxed", permissions=NOTHING, allow_unenforced=["read", "write", "net", "run", "listen"])
    def relaxed():
        return None

    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(SandboxUnavailableError):
        Worker(storage, handlers={"relaxed": relaxed})
    settings.DJQUEUE = {"SANDBOX": "degrade"}
    with pytest.raises(SandboxUnavailableError):
        Worker(storage, handlers=handlers(jobs.add))

    assert Worker(storage, handlers={"relaxed": relaxed})


def test_worker_rejects_permissions_for_missing_paths(storage):
    @job(name="lost", permissions=Permissions(read=["/nowhere/at/all"]))
    def lost():
        return None

    with pytest.raises(ConfigurationError, match="job 'lost': read: /nowhere/at/all can't be granted"):
        Worker(storage, handlers={"lost": lost})


def test_worker_rejects_permissions_for_unknown_databases(storage):
    @job(name="misspelled", permissions=Permissions(db=["defualt"]))
    def misspelled():
        return None

    with pytest.raises(ConfigurationError, match=r"job 'misspelled': .* db: .*did you mean 'default'\?"):
        Worker(storage, handlers={"misspelled": misspelled})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"permissions": "all"}, "expected djqueue.Permissions"),
        ({"permissions": {"reed": True}}, "unknown permission"),
        ({"permissions": NOTHING, "executor": "inline"}, "inline jobs have those of the worker"),
        ({"allow_unenforced": ["rad"]}, "is not one of read"),
        ({"allow_unenforced": ["read"]}, "requires permissions"),
    ],
    ids=str,
)
def test_invalid_permissions_are_rejected(options, words):
    with pytest.raises(OptionError, match=words):
        job(name="wrong", **options)(lambda: None)

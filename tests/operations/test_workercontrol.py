"""`manage.py djqueue workers`: listing workers and sending them commands."""

import json
import re
import threading
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from djqueue import Queue, Worker
from djqueue._version import __version__
from djqueue.client import get_storage
from djqueue.client.storages import close_storage
from djqueue.core.workers import ProcessInfo, RunningJob
from djqueue.management.commands import djqueue
from djqueue.management.subcommands import workers
from djqueue.testing.factories import worker
from tests.support import PATIENCE


@pytest.fixture
def storage(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
    yield get_storage()
    close_storage()


def run(*arguments):
    output = StringIO()
    call_command(djqueue.Command(), "workers", *arguments, stdout=output)
    return output.getvalue()


def test_workers_are_listed_with_what_they_run(storage):
    assert run() == "No live workers.\n"
    now = storage.engine.clock.now()
    jobs = (RunningJob("emails", "id-1", "shop.send", now - 90_000),)
    about = {"host": "web-1", "pid": 7, "kind": "runworkers", "rss": 50_000_000, "project": "2026.11"}
    about["supervisor"] = 5
    about["processes"] = (
        ProcessInfo(801, "shop.render", "isolated", 7, 45_000_000, "images", "job-5"),
        ProcessInfo(802, "shop.convert", "subprocess", 1, 0),
    )
    storage.workers.register(
        worker("w1", queues=("emails",), active=1, concurrency=10, version=__version__, jobs=jobs, **about)
    )
    storage.workers.register(worker("w0", host="web-2", state="quiet"))
    count, first, more, running, *processes, second, _ = run().splitlines()
    assert count == "2 workers on 2 hosts"
    assert processes == [
        "    process 801: shop.render, isolated, running job-5 of queue images, 45 MB",
        "    process 802: shop.convert, subprocess, idle",
    ]
    assert re.fullmatch(r"w1: running, 1 of 10 slots in use, last heartbeat \d+ s ago", first)
    process = "process 7 on web-1, supervisor 5, runworkers"
    for part in (process, "queues emails", "50 MB", "2026.11", __version__):
        assert part in more
    seconds, _, what = running.partition(" s: ")
    assert int(seconds) >= 90
    assert what == "shop.send [id-1] of queue emails"
    assert second.startswith("w0: quiet")


@pytest.mark.parametrize("command", ["quiet", "resume", "stop"])
def test_worker_receives_commands(storage, command):
    storage.workers.register(worker("w1"))
    assert run(f"--{command}", "w1") == f"Sent {command} to w1\n"
    assert storage.workers.register(worker("w1")) == (command,)


def test_leader_is_listed(storage, monkeypatch):
    found = [worker("w1", leads=True), worker("w2")]
    monkeypatch.setattr(storage.workers, "all", lambda: found)

    count, first, _, second, _ = run().splitlines()
    assert count == "2 workers on 1 host"
    assert first.startswith("w1: running, leader, 0 of")
    assert second.startswith("w2: running, 0 of")
    leads = {one["id"]: one["leads"] for one in json.loads(run("--json"))}
    assert leads == {"w1": True, "w2": False}


def test_a_dump_is_printed(storage):
    begun, go_on = threading.Event(), threading.Event()

    def handler(job):
        begun.set()
        assert go_on.wait(PATIENCE)

    with Worker(storage, ["emails"], {"handler": handler}, worker_id="w1", maintain=False):
        Queue("emails").enqueue(name="handler")
        assert begun.wait(PATIENCE)
        storage.workers.save_dump("w1", "an earlier one")
        assert "in handler" in run("--dump", "w1")
        go_on.set()


def test_unknown_stopping_or_silent_worker_is_an_error(storage, monkeypatch):
    with pytest.raises(CommandError, match="unknown worker 'w1'"):
        run("--quiet", "w1")
    storage.workers.register(worker("w1", state="stopping"))
    with pytest.raises(CommandError, match="is already stopping"):
        run("--stop", "w1")
    monkeypatch.setattr(workers, "MIN_DUMP_TIMEOUT", 1)
    with pytest.raises(CommandError, match="did not answer in time"):
        run("--dump", "w1")


def test_only_one_worker_command_is_accepted_at_a_time(storage):
    with pytest.raises(CommandError, match="not allowed with"):
        run("--quiet", "w1", "--stop", "w2")

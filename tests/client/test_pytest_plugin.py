"""The pytest plugin and its fixtures."""

import subprocess
import sys
from pathlib import Path

import pytest

from djqueue import Queue, Retry, Snooze, job
from djqueue.client import get_storage
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.factories import enqueue, enqueue_many

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_loading_the_pytest_plugin_does_not_import_django():
    code = (
        "import sys, djqueue.testing.plugin; "
        "print(*{name.partition('.')[0] for name in sys.modules} & {'django', 'msgpack', 'kombu'})"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )

    assert finished.stdout.split() == []


@pytest.mark.slow
def test_pytest_plugin_works_in_a_project(tmp_path):
    (tmp_path / "test_shop.py").write_text(
        "from djqueue import job\n"
        "from djqueue.testing.assertions import assert_enqueued\n"
        "\n"
        "@job\n"
        "def pay(n):\n"
        "    return n\n"
        "\n"
        "def test_it(djqueue_memory, djqueue_drain):\n"
        "    pay.enqueue(7)\n"
        "    assert_enqueued(pay, args=(7,), count=1)\n"
        "    assert djqueue_drain().completed == 1\n"
        "    assert djqueue_memory.reads.counts('default')['completed'] == 1\n"
        "\n"
        "def test_another_starts_with_nothing(djqueue_memory):\n"
        "    assert djqueue_memory.queues.names() == []\n"
    )
    # By its module, whether djqueue is installed (then its name is taken) or not.
    plugins = ["-p", "no:djqueue", "-p", "djqueue.testing.plugin", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", *plugins, "-c", str(ROOT / "pyproject.toml")),
            *(f"--rootdir={tmp_path}", str(tmp_path)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout
    assert "2 passed" in finished.stdout


def test_djqueue_memory_replaces_the_configured_storage(djqueue_memory):
    assert isinstance(djqueue_memory, MemoryStorage)
    assert get_storage() is djqueue_memory
    assert djqueue_memory.queues.names() == []


def test_djqueue_memory_keeps_other_settings(settings, request):
    settings.DJQUEUE = {**settings.DJQUEUE, "DEFAULTS": {"priority": 7}}

    answer = Queue("orders").enqueue(1)

    assert Queue("orders").get_job(answer.id).options.priority == 7


def test_drain_runs_waiting_jobs_and_the_jobs_they_enqueue(djqueue_drain):
    ran = []

    @job(name="count-down")
    def count_down(n):
        ran.append(n)
        if n:
            count_down.enqueue(n - 1)

    count_down.enqueue(5)

    counters = djqueue_drain()

    assert ran == [5, 4, 3, 2, 1, 0]
    assert (counters.claimed, counters.completed) == (6, 6)


def test_drain_without_jobs_ends_immediately(djqueue_drain):
    assert djqueue_drain().claimed == 0


def test_drain_runs_jobs_sequentially_in_order(djqueue_drain):
    ran = []

    @job(name="note")
    def note(n):
        ran.append(n)

    note.enqueue_many([((n,), {}) for n in range(50)])
    note.using(priority=1).enqueue("first")

    assert djqueue_drain().completed == 51
    assert ran == ["first", *range(50)]


def test_drain_leaves_jobs_that_are_not_due(djqueue_drain, storage):
    def handle(given):
        match given.payload:
            case "fail":
                raise KeyError("no")
            case "retry":
                raise Retry(delay=60)
            case "snooze":
                raise Snooze(delay=60)

    queue = Queue("orders")
    queue.enqueue("later", delay=30)
    queue.enqueue("fail", max_attempts=1)
    queue.enqueue("fail", max_attempts=2, backoff=30)
    queue.enqueue("retry")
    queue.enqueue("snooze")
    queue.enqueue("fine")

    counters = djqueue_drain(handlers={"orders": handle})

    assert (counters.completed, counters.failed, counters.retried, counters.released) == (1, 1, 2, 1)
    counts = {state: count for state, count in queue.counts().items() if count}
    assert counts == {"completed": 1, "failed": 1, "delayed": 4}


def test_drain_runs_immediate_retries(djqueue_drain):
    def handle(given):
        if given.attempts < 3:
            raise KeyError("not yet")

    Queue("orders").enqueue(1, backoff=0)

    counters = djqueue_drain(handlers={"orders": handle})

    assert (counters.retried, counters.completed) == (2, 1)


def test_drain_can_be_limited_to_queues_and_names(djqueue_drain, storage):
    for queue in ("a", "b"):
        enqueue(storage, queue=queue, name="known")
        enqueue(storage, queue=queue, name="unknown")

    counters = djqueue_drain(queues=["a"], handlers={"known": lambda given: None})

    assert counters.completed == 1
    assert storage.reads.waiting_names("a") == {"unknown": 1}
    assert storage.reads.waiting_names("b") == {"known": 1, "unknown": 1}


def test_drain_does_not_wait_for_paused_jobs(djqueue_drain, storage):
    enqueue(storage, queue="paused")
    storage.queues.pause("paused")
    storage.queues.set_limits("limited", None, 1)
    enqueue_many(storage, 3, queue="limited")

    counters = djqueue_drain(handlers={"handler": lambda given: None})

    assert counters.completed == 3
    assert storage.reads.waiting_names("paused") == {"handler": 1}


def test_drain_accepts_another_storage(djqueue_drain, storage):
    other = MemoryStorage()
    Queue("orders", storage=other).enqueue(1)

    assert djqueue_drain(other, handlers={"orders": lambda given: None}).completed == 1
    assert storage.queues.names() == []


@pytest.mark.parametrize("concurrency", [1, 8])
def test_drain_leaves_no_workers(djqueue_drain, storage, concurrency):
    enqueue_many(storage, 200)

    counters = djqueue_drain(handlers={"handler": lambda given: None}, concurrency=concurrency)

    assert counters.completed == 200
    assert storage.workers.all() == []

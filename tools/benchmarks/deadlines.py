"""`python -m tools.benchmarks.deadlines`: how long calls take while a server hangs.

Redis, or the PostgreSQL of the database storage, is frozen by SIGSTOP, refuses connections, is behind a
network that drops packets, and takes a second for each answer. Of each call two times are printed: of the
first, which does not know yet that the server is away, and of the one after it.

`--server postgresql` needs `python -m tests.servers postgresql env DJQUEUE_TEST_DB=postgresql` before it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.proxies import SlowProxy
from tools.benchmarks.pages import django_in, use, visitor

FAULTS = ("frozen", "refusing", "black hole", "slow")
LIMIT = 30.0
"""Seconds after which a call is not waited for any longer."""
QUEUE = "default"


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.deadlines", description=__doc__)
    parser.add_argument("--server", choices=sorted(SERVERS), action="append", help="default: redis")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: all")
    options = parser.parse_args()
    print("| server | fault | " + " | ".join(CALLS) + " |")
    print("|---|---|" + "---|" * len(CALLS), flush=True)
    for name in options.server or ["redis"]:
        for fault in options.fault or FAULTS:
            # A process of its own: what hangs in one does not reach the next.
            program = f"from tools.benchmarks.deadlines import one; one({name!r}, {fault!r})"
            subprocess.run([sys.executable, "-c", program], check=False)
    return 0


def one(name: str, fault: str) -> None:
    """Print a row of the table."""
    with tempfile.TemporaryDirectory() as folder, django_in(folder), SERVERS[name]() as server:
        storage, break_it, forget = server
        client = visitor()
        job_id = storage_calls(storage, client)["enqueue"]()
        storage.reads.jobs(QUEUE, [job_id])
        storage_calls(storage, client)["overview page"]()
        cells = []
        break_it(fault)
        for call in storage_calls(storage, client, job_id).values():
            forget()
            cells.append(f"{timed(call)}, {timed(call)}")
        print(f"| {name} | {fault} | " + " | ".join(cells) + " |", flush=True)
        os._exit(0)  # threads may hang for good


def storage_calls(storage: Any, client: Any, job_id: str = "") -> dict[str, Callable[[], Any]]:
    """The calls that are measured."""
    from django.urls import reverse

    from djqueue import Queue
    from djqueue.dashboard.reading import read_cache

    queue = Queue(QUEUE, storage=storage)

    def page() -> Any:
        read_cache.forget()
        return client.get(reverse("admin:djqueue_dashboard_changelist"))

    return {
        "enqueue": lambda: queue.enqueue(1).id,
        "enqueue_and_wait(wait=3)": lambda: queue.enqueue_and_wait(1, name="nobody", wait=3),
        "get_job": lambda: queue.get_job(job_id),
        "get_status": lambda: queue.get_status(job_id),
        "cancel": lambda: queue.cancel(job_id),
        "pause": queue.pause,
        "overview page": page,
    }


CALLS = (
    "enqueue",
    "enqueue_and_wait(wait=3)",
    "get_job",
    "get_status",
    "cancel",
    "pause",
    "overview page",
)


def timed(call: Callable[[], Any]) -> str:
    """Seconds, and the error if there is one."""
    outcome: list[str] = []

    def run() -> None:
        from django.db import connections

        began = time.monotonic()
        error = ""
        try:
            call()
        except Exception as raised:
            error = f" {type(raised).__name__.removesuffix('Error')}"
        outcome.append(f"{time.monotonic() - began:.1f}{error}")
        with suppress(Exception):
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return outcome[0] if outcome else f"over {LIMIT:g}"


Broken = tuple[Any, Callable[[str], None], Callable[[], None]]


@contextmanager
def redis() -> Iterator[Broken]:
    """Redis behind a proxy."""
    from tests.servers import RedisServer

    with RedisServer() as server, SlowProxy(server.port) as proxy, ExitStack() as stack:
        storage = use(
            BACKEND="djqueue.storage.redis.RedisStorage", OPTIONS={"URL": proxy.url, "MIRROR": False}
        )

        def break_it(fault: str) -> None:
            if fault == "frozen":
                stack.enter_context(server.frozen())
            elif fault == "refusing":
                proxy.refuse()
            elif fault == "black hole":
                proxy.swallow()
            else:
                proxy.slow_down(1.0)

        yield storage, break_it, storage._trips._breakers.clear


@contextmanager
def postgresql() -> Iterator[Broken]:
    """The database storage, with the project's own database behind a proxy."""
    from django.db import connection, connections

    said = connection.settings_dict
    with SlowProxy(int(said["PORT"])) as proxy:
        connections.close_all()
        said["PORT"] = proxy.port
        said["OPTIONS"] = {**said.get("OPTIONS", {}), "connect_timeout": 2}
        storage = use(BACKEND="djqueue.storage.database.DatabaseStorage")

        def break_it(fault: str) -> None:
            if fault == "refusing":
                proxy.refuse()
            elif fault == "slow":
                proxy.slow_down(1.0)
            else:
                # To a new connection, a server that is frozen is a black hole that accepts.
                proxy.swallow()

        yield storage, break_it, lambda: None


SERVERS: dict[str, Any] = {"redis": redis, "postgresql": postgresql}

if __name__ == "__main__":
    raise SystemExit(main())

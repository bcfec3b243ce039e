"""Fork processes of a project from one that has imported everything: `python -m tools.chaos.zygote`.

A start takes Python about a second of CPU time, nearly all of it for imports. This process imports Django,
djqueue and the project once, opens no connection and starts no thread. Each line of its standard input is a
request in JSON:

- {"start": [arguments], "log": path, "whole": bool} answers {"pid": n}. A whole start is a new interpreter.
- {"wait": pid, "seconds": n} answers {"status": n} once that process has ended; null if it has not.
- {"orphans": true} answers {"orphans": [pid, ...]}: processes that have outlived the one that started them.

Its children, and the orphans, end with it.
"""

import ctypes
import json
import os
import runpy
import select
import signal
import stat
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.db import connections

from .tree import children as children_of
from .tree import status

RUNWORKERS = ["-m", "django"]
PR_SET_CHILD_SUBREAPER = 36


def load() -> None:
    """Import what a worker imports, and make sure that a fork inherits no connection and no thread."""
    django.setup()
    import_module("djqueue.management.commands.runworkers")
    backend = (
        getattr(settings, "DJQUEUE", {})
        .get("STORAGE", {})
        .get("BACKEND", "djqueue.storage.database.DatabaseStorage")
    )
    import_module(backend.rpartition(".")[0])
    opened = [alias for alias in connections if connections[alias].connection is not None]
    sockets = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_socket(number)]
    if opened or sockets or threading.active_count() > 1:
        raise SystemExit(f"a fork would inherit {opened=}, {sockets=}, {threading.enumerate()=}")


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False  # It was open to list the folder.


def serve() -> list[str] | None:
    """Answer requests until there are no more; in a child, return the arguments of its program."""
    children: set[int] = set()
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            code = wait(request["wait"], request["seconds"])
            if code is not None:
                children.discard(request["wait"])
            answer({"status": code})
        elif "orphans" in request:
            answer({"orphans": orphans(children)})
        else:
            pid = os.fork()
            if not pid:
                become(request["log"])
                if request["whole"]:
                    os.execv(sys.executable, [sys.executable, *request["start"]])
                return list(request["start"])
            children.add(pid)
            answer({"pid": pid})
    for pid in (*children, *orphans(children)):
        os.kill(pid, signal.SIGKILL)
    return None


def wait(pid: int, seconds: float) -> int | None:
    """Wait for a child; return its exit code, or None if it has not ended in time."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], seconds)[0]:
            return None
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def orphans(known: set[int]) -> list[int]:
    """Return the running children that this process has not started, and reap those that have ended."""
    found = []
    for pid in set(children_of(os.getpid())) - known:
        if (one := status(pid)) is None or one.has_ended:
            os.waitpid(pid, 0)
        else:
            found.append(pid)
    return found


def answer(reply: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def become(log: str) -> None:
    """Make this fork a process of its own: another session, and other standard streams."""
    os.setsid()
    for path, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


def main() -> None:
    """Serve; in a child, run its program and end as Python would."""
    # Where `python -m tools.chaos.zygote` runs is the project's folder.
    sys.path.insert(0, str(Path.cwd()))
    os.environ["DJQUEUE_CHAOS"] = str(os.getpid())
    load()
    # Processes whose parent has ended become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    arguments = serve()
    if arguments is None:
        return
    if arguments[:2] == RUNWORKERS:
        sys.argv = ["", *arguments[2:]]
        # As `python -m django` does: a supervisor that reloads starts the main module again.
        runpy.run_module("django", run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

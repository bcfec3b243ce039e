"""Fork processes of a project from one that has imported everything: `python -m tests.chaos.zygote`.

A start takes Python about a second of CPU time, nearly all of it for imports. This process imports Django,
djqueue and the project once, opens no connection and starts no thread. Each line of its standard input is a
request in JSON: {"start": [arguments], "log": path} answers {"pid": n}, and {"wait": pid} answers
{"status": n} once that process has ended. Its children end with it.
"""

import json
import os
import runpy
import signal
import stat
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connections

RUNWORKERS = ["-m", "django"]


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
            _, status = os.waitpid(request["wait"], 0)
            children.discard(request["wait"])
            answer({"status": os.waitstatus_to_exitcode(status)})
            continue
        pid = os.fork()
        if not pid:
            become(request["log"])
            return list(request["start"])
        children.add(pid)
        answer({"pid": pid})
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return None


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
    # Where `python -m tests.chaos.zygote` runs is the project's folder.
    sys.path.insert(0, str(Path.cwd()))
    load()
    arguments = serve()
    if arguments is None:
        return
    if arguments[:2] == RUNWORKERS:
        execute_from_command_line(["django-admin", *arguments[2:]])
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

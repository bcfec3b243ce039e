"""The Redis of this demo: on a free port, with its data beside the database, so that both are one age."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from demo_project.demo.children import HOST, POLL_SECONDS, STARTUP_SECONDS, Child, ChildError, Children

PROGRAMS = ("redis-server", "valkey-server")


@contextmanager
def redis_in(folder: Path, port: int) -> Iterator[Child]:
    """A Redis that has what the last one of this folder had. Raises ChildError if there can be none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise ChildError(f"Neither {' nor '.join(PROGRAMS)} is installed (Debian: apt install redis-server).")
    data = folder / "redis"
    data.mkdir(parents=True, exist_ok=True)
    options = {"port": port, "bind": HOST, "dir": data, "save": "", "appendonly": "yes"}
    with alone_in(folder), Children(folder / "log") as children:
        command = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = children.run("Redis", program, *command)
        wait_for_answer(port, server)
        yield server


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two of them would write to one file."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ChildError(f"Another demo is running in {folder}: stop that demo first.") from None
    else:
        yield
    finally:
        os.close(lock)


def wait_for_answer(port: int, server: Child) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    with redis.Redis(HOST, port) as client:
        while True:
            server.expect_running()
            try:
                client.ping()
            except redis.ConnectionError as error:  # it starts, or reads its data
                if time.monotonic() > deadline:
                    raise server.error(f"does not answer at port {port} ({error})") from error
                time.sleep(POLL_SECONDS)
            else:
                return
